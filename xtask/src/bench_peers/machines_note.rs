//! `docs/benchmarks/machines.md`, made of the rows and nothing else.

use crate::bench_peers::door::ROUNDS;
use crate::bench_peers::load;
use crate::bench_peers::machines::{
    ADDED, BACK, BARE, BEYOND, DYNAMO, LATENCY, LINKS, LOCAL, METRICS, TENSORS, TRANSFER, is_shaped,
};
use crate::bench_peers::page::{lengths, number, push, reached};
use crate::bench_peers::row::Row;

const HEAD: &str = "\
# Machines: what an agent between frontend and engine costs

Written by `cargo xtask bench-peers machines`; to change it, run that again. The same numbers as rows: [machines.json](machines.json).
";

const HOW: &str = "\
All sides run at once on one machine and are asked in turns, case by case, in an order that turns round each time. What counts is the
CPU time, user and system, of the frontend and, where there is one, of the agent *together*; engines and clients are other processes and
are not in it. They want the same cores, so latencies with 16 clients are those of a machine that is too small for all of it. Only ratios
of one run mean something; those of CPU time are medians of the rounds' ratios.

| side | is |
|---|---|
| local engine | `chiasm serve --attach`, cargo's release profile |
| agent, loopback | `chiasm serve --agents`, `chiasm agent --attach`, certificates on both sides |
| agent, shaped link | the same, with agent and engine in a network namespace behind a veth pair that `tbf` holds to 10 Gbit/s in each direction, with a burst of 128 kB |
| Dynamo | `python -m dynamo.frontend --router-mode kv` and its mocker, found by etcd, asked over TCP without TLS on loopback. What counts is the frontend alone: the mocker is worker and engine in one |
| null gRPC echo | a call of `tonic` that carries nothing to a process that does nothing, over the same link, with the same certificates, one call after the other for half a second per round, while nobody is asked anything else |
| bare TCP | as many bytes as the tensors of an image have, over the same link, without TLS, into memory that is there, and one byte back |

| case | is |
|---|---|
| 1k-token text | 1,000 tokens in each request, of words drawn by Zipf's law; answers of 4 tokens in one piece |
| repeated image | the same JPEG of 1024 × 1024 pixels (273 kB) with another question in each request, as data URI or by URL; answers of 4 tokens |
| distinct images | another JPEG file of that size in each request. Dynamo's frontend does not decode it, and its mocker needs no pixels |
| streams of 256 deltas | 64 clients that each open two streams, one after the other; the engine makes 100 steps per second, in each of which every stream gets a token. Dynamo's mocker has a pace of its own |

- All but Dynamo have one engine of the same kind, `chiasm sim-engine` in a process of its own, so fast for requests that it waits for
  nothing, with a receiver cache of 0.25 GiB. The model is Qwen2-VL: its vocabulary and its image processor, no weights.
- *Added p50* is the median with the agent less that with a local engine, round by round: of latencies with one client, of the times from
  the engine to the client for streams. Its limit is what the null call takes, and 100 µs.
- The bytes of a new image are counted between another frontend and the agent, in what TCP carries, TLS included: from sending a request
  until 0.1 s after its answer, less the file. What comes back is the answer and the engine's KV events.
- Images travel as files, which the agent decodes (`--agent-media encoded`). *Tensors in place of files* is another frontend of the same
  agent, which makes the tensors itself and sends those (`--agent-media tensors`), beside one that sends files: 60 new images each, in turns,
  from one client. On loopback that is only reported.
- *Local engine, then bare TCP* is the time of the request with a local engine, which makes the tensors, and that of the bare transfer of
  their bytes, added up.
- Each answer is a 200 with the expected number of prompt tokens, or the run fails. Before, the same prompts go to all: their lengths have
  to be equal. Dynamo does not count an image's tokens. Caches are full before anything is measured.
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let rounds = rows.iter().find(|row| row.metric == ROUNDS).and_then(|row| row.ours).unwrap_or_default();
    push(&mut text, format_args!("\nMedians of {rounds} rounds, latencies and delays of all rounds together."));
    push(&mut text, format_args!("{}\n\n{HOW}\n## Targets\n\n", load::sentence(rows)));
    if !is_shaped(rows) {
        text.push_str("Shaped link: not measured, as it needs root and `ip` and `tc` of iproute2.\n\n");
    }
    text.push_str(
        "| case | metric | against | ours | theirs | ratio | target | reached |\n|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let Row { case, metric, peer_name, target: Some(target), .. } = row else { continue };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        let sign = if peer_name.starts_with(DYNAMO) || peer_name == TENSORS { "≥" } else { "≤" };
        let reached = reached(row);
        push(
            &mut text,
            format_args!(
                "| {case} | {metric} | {peer_name} | {ours} | {peer} | {ratio} | {sign} {target} | {reached} |\n"
            ),
        );
    }
    text.push_str("\nThe ratio of *added p50* is to the null call's time and 100 µs.\n");
    new_image(rows, &mut text);
    for case in cases(rows) {
        table(rows, case, &mut text);
    }
    lengths(rows, &mut text);
    text
}

/// What new images send, and what is held against the time that it takes.
fn new_image(rows: &[Row], text: &mut String) {
    text.push_str("\n## A new image\n\n| | unit | agent, loopback | agent, shaped link |\n|---|---|---|---|\n");
    let mut line = |what: &str, unit: &str, value: &dyn Fn(&Row) -> Option<f64>| {
        push(text, format_args!("| {what} | {unit} |"));
        for link in LINKS {
            push(
                text,
                format_args!(" {} |", number(rows.iter().filter(|row| row.case.ends_with(link)).find_map(value))),
            );
        }
        text.push('\n');
    };
    line(BEYOND, "bytes", &|row| row.ours.filter(|_| row.metric == BEYOND));
    line(BACK, "bytes", &|row| row.ours.filter(|_| row.metric == BACK));
    line(LATENCY, "ms", &|row| row.ours.filter(|_| row.peer_name == BARE && row.metric != TRANSFER));
    line("bare TCP: transfer of the tensors' bytes", "ms", &|row| row.peer.filter(|_| row.metric == TRANSFER));
    line(BARE, "ms", &|row| row.peer.filter(|_| row.peer_name == BARE && row.metric != TRANSFER));
    line("that in times of the latency", "", &|row| row.ratio.filter(|_| row.peer_name == BARE));
    line("latency p50 beside a frontend that sends tensors", "ms", &|row| {
        row.ours.filter(|_| row.peer_name == TENSORS)
    });
    line("latency p50 of that one", "ms", &|row| row.peer.filter(|_| row.peer_name == TENSORS));
    line("that in times of the one before", "", &|row| row.ratio.filter(|_| row.peer_name == TENSORS));
}

/// The cases that were measured, without their links.
fn cases(rows: &[Row]) -> Vec<&str> {
    rows.iter()
        .filter(|row| row.metric == LATENCY && row.peer_name == LOCAL)
        .filter_map(|row| row.case.strip_suffix(LINKS[0]))
        .collect()
}

/// All sides' numbers of a case: a line per metric, a column per side.
fn table(rows: &[Row], case: &str, text: &mut String) {
    let title = case.trim_end_matches(", ");
    let [loopback, shaped] = LINKS.map(|link| format!("{case}{link}"));
    let find = |case: &str, metric: &str, peer: &str| {
        rows.iter().find(|row| row.case == case && row.metric == metric && row.peer_name.starts_with(peer))
    };
    let dynamo = find(&loopback, LATENCY, DYNAMO).map_or(DYNAMO, |row| &row.peer_name);
    push(
        text,
        format_args!(
            "\n## {title}\n\n| | unit | {LOCAL} | agent, loopback | agent, shaped link | {dynamo} |\n|---|---|---|---|---|---|\n"
        ),
    );
    for (metric, unit) in METRICS {
        let Some(row) = find(&loopback, metric, LOCAL) else { continue };
        let dynamo = find(&loopback, metric, DYNAMO).and_then(|row| row.peer);
        let shaped = find(&shaped, metric, LOCAL).and_then(|row| row.ours);
        let [local, loopback, shaped, dynamo] = [row.peer, row.ours, shaped, dynamo].map(number);
        push(text, format_args!("| {metric} | {unit} | {local} | {loopback} | {shaped} | {dynamo} |\n"));
    }
    let [loopback, shaped] = [loopback, shaped].map(|case| find(&case, ADDED, ""));
    if let Some(row) = loopback {
        let shaped = number(shaped.and_then(|row| row.ours));
        push(text, format_args!("| {ADDED} | µs | – | {} | {shaped} | – |\n", number(row.ours)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::machines::{rows, tests::measurements};

    #[test]
    fn the_note_tells_targets_and_each_case() {
        let text = write(&rows(&measurements(&LINKS), 7, None));
        for line in [
            "| 1k-token text, 1 client, loopback | CPU per request | local engine | 1.50 | 1.00 | 1.50 | ≤ 1.6 | yes |",
            "| 1k-token text, 1 client, shaped link | CPU per request | Dynamo 0.1 | 1.50 | 4.50 | 3.00 | ≥ 4 | **no** |",
            "| 1k-token text, 1 client, loopback | added p50 | null gRPC echo | 300 | 50.0 | 2.00 | ≤ 1 | **no** |",
            "| bytes from the agent | bytes | 5000 | 5000 |",
            "| local engine, then bare TCP | ms | 6.00 | 6.00 |",
            "| | unit | local engine | agent, loopback | agent, shaped link | Dynamo 0.1 |",
            "| CPU per output token | µs | 1.00 | 1.50 | 1.50 | 4.50 |",
            "| distinct images, data URI, 1 client, shaped link | latency p50 | tensors in place of files | 10.0 | 19.0 | 1.90 | ≥ 1.8 | yes |",
            "| latency p50 of that one | ms | 19.0 | 19.0 |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert!(!text.contains("not measured"));
    }

    #[test]
    fn a_link_that_was_not_there_is_named() {
        let text = write(&rows(&measurements(&LINKS[..1]), 7, None));
        assert!(text.contains("Shaped link: not measured"), "{text}");
        assert!(text.contains("| CPU per request | ms | 1.00 | 1.50 | – | 4.50 |"), "{text}");
    }
}
