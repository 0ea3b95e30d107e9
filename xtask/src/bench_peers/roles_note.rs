//! `docs/benchmarks/roles.md`, made of the rows and nothing else.

use crate::bench_peers::door::ROUNDS;
use crate::bench_peers::load;
use crate::bench_peers::page::{lengths, number, push, reached};
use crate::bench_peers::roles::{ADDED, CPU, DYNAMO, METRICS, NULL, SLOW_HOP, WAYS};
use crate::bench_peers::row::Row;

const HEAD: &str = "\
# Roles: what it costs that one engine computes a prompt and another one answers

Written by `cargo xtask bench-peers roles`; to change it, run that again. The same numbers as rows: [roles.json](roles.json).
";

const HOW: &str = "\
All sides run at once on one machine, each with two engines of its own, and are asked in turns, case by case, in an order that turns
round each time. What counts is the CPU time, user and system, of the frontend; engines and clients are other processes and are not in
it. They want the same cores, so requests per second and latencies are those of a machine that is too small for all of it. Only ratios
of one run mean something; those of CPU time are medians of the rounds' ratios.

| side | is |
|---|---|
| chiasm, aggregated | `chiasm serve --attach`, cargo's release profile, before two engines that compute prompts and answers |
| chiasm, split | `chiasm serve --attach prefill=…,decode=…`, before one engine of either role |
| Dynamo, aggregated | `python -m dynamo.frontend --router-mode kv` before two mockers |
| Dynamo, split | the same before one mocker with `--disaggregation-mode prefill` and one with `decode` |

| case | is |
|---|---|
| 1k-token text | 1,000 tokens in each request, of words drawn by Zipf's law; answers of 4 tokens in one piece |
| 64 tokens streamed | the same with an answer of 64 tokens, each of them an event; 64 clients, who ask again for 3 s. Our engine makes 100 steps per second, in each of which every stream gets a token; Dynamo's mocker has a pace of its own |

- Requests to a side that splits are all split, or the run fails: our answers name in `x-chiasm-prefill-worker` who computed the
  prompt, and of Dynamo the worker that prefills counts its requests. Requests to the others never are. Of our router that
  takes weights by which no prompt stays with the engine that answers (`--disturb-weight 1000 --hop-weight 0`): both ways are still priced
  for each request. Dynamo's splits whatever it can.
- Engines have no GPU, and nothing is computed or handed over but a few bytes. Ours are `chiasm sim-engine`, a process each, so fast that they wait
  for nothing; the decoding one asks the other for the prompt over TCP and goes on when it looks the next time, which takes milliseconds that are
  in the latencies of split requests and not in what frontends spend. Dynamo's mockers run at a speed-up of a million, with transfers that take
  no time. So latencies compare engines that pretend, and are told only to show what was waited for.
- Dynamo's frontend is Rust below a Python process; what it spends is that of the process. Between it and its mockers is TCP, found by files.
  As with vLLM's engines and NIXL, its decoding worker is asked when the prompt has been computed, not meanwhile.
- There are text requests alone: Dynamo's mocker makes nothing of an image, so what a second engine's tensors cost is not compared. Nor are
  agents of other machines, or fleets in which the router has a choice.
- *CPU added by the second hop* is what a split request costs more than one that one engine has whole, the median of the rounds' differences,
  which are small parts of what they are taken from. A decoding mocker of Dynamo says nothing of its cache, which aggregated ones do, so the
  frontend has less to keep track of. An engine of ours that waits for a prompt makes empty steps, up to 7,500 per second as vLLM does,
  and says after each how busy it is, which our frontend reads. With one client there are most of them for each request.
- *Engine to engine* is from when our engine that prefills has its output ready to be sent until the one that decodes has the request, before it
  reads what is in it; both write down when that was. Requests come one after the other, so that nothing else is done meanwhile. Both
  engines' sockets and queues are in it, so it is more than what the frontend takes. Its limit is what the *null relay* takes, a process that does
  nothing but send 2.2 kB on when 1 kB comes, over sockets of the same kind (ZMQ on loopback), asked every 2 ms; and 100 µs.
- Each answer is a 200 with the expected number of prompt tokens, or the run fails. Before, the same prompts go to all: their lengths have
  to be those that *chiasm, aggregated* counts. All log as they do by default, into files.
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let rounds = rows.iter().find(|row| row.metric == ROUNDS).and_then(|row| row.ours).unwrap_or_default();
    push(&mut text, format_args!("\nMedians of {rounds} rounds, latencies of all rounds together."));
    push(&mut text, format_args!("{}\n\n{HOW}\n## Targets\n\n", load::sentence(rows)));
    text.push_str(
        "| case | metric | against | ours, µs | theirs, µs | ratio | target | reached |\n|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let Row { case, metric, peer_name, target: Some(target), .. } = row else { continue };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        let (sign, reached) = (if peer_name == NULL { "≤" } else { "≥" }, reached(row));
        push(
            &mut text,
            format_args!(
                "| {case} | {metric} | {peer_name} | {ours} | {peer} | {ratio} | {sign} {target} | {reached} |\n"
            ),
        );
    }
    text.push_str("\nThe ratio of *engine to engine* is to the null relay's time and 100 µs.");
    if let Some(slow) = rows.iter().find(|row| row.metric == SLOW_HOP) {
        push(&mut text, format_args!(" Of 100 hops one took {} µs or more.", number(slow.ours)));
    }
    text.push('\n');
    hop(rows, &mut text);
    for case in rows.iter().filter(|row| row.metric == ADDED) {
        table(rows, &case.case, &mut text);
    }
    lengths(rows, &mut text);
    text
}

/// What splitting adds to what a frontend spends.
fn hop(rows: &[Row], text: &mut String) {
    text.push_str("\n## The second hop\n\n");
    push(text, format_args!("| {ADDED}, µs | chiasm | {} |\n|---|---|---|\n", dynamo(rows)));
    for Row { case, ours, peer, .. } in rows.iter().filter(|row| row.metric == ADDED) {
        push(text, format_args!("| {case} | {} | {} |\n", signed(*ours), signed(*peer)));
    }
}

/// All sides' numbers of a case: a line per metric, a column per side.
fn table(rows: &[Row], case: &str, text: &mut String) {
    let dynamo = dynamo(rows);
    push(text, format_args!("\n## {case}\n\n| | unit |"));
    for (name, way) in ["chiasm", dynamo].iter().flat_map(|name| WAYS.map(|way| (name, way))) {
        push(text, format_args!(" {name}{way} |"));
    }
    text.push_str("\n|---|---|---|---|---|---|\n");
    for (metric, unit) in METRICS {
        let [aggregated, split] =
            WAYS.map(|way| rows.iter().find(|row| row.metric == metric && row.case.strip_suffix(way) == Some(case)));
        let (Some(aggregated), Some(split)) = (aggregated, split) else { continue };
        let [a, b, c, d] = [aggregated.ours, split.ours, aggregated.peer, split.peer].map(number);
        let ratios = [aggregated, split].map(|row| match row.ratio.filter(|_| metric == CPU) {
            Some(ratio) => format!(" (× {})", number(Some(ratio))),
            None => String::new(),
        });
        push(text, format_args!("| {metric} | {unit} | {a} | {b} | {c}{} | {d}{} |\n", ratios[0], ratios[1]));
    }
}

/// The peer with its version.
fn dynamo(rows: &[Row]) -> &str {
    rows.iter().find(|row| row.metric == ADDED).map_or(DYNAMO, |row| &row.peer_name)
}

/// A number of µs that may be negative.
fn signed(value: Option<f64>) -> String {
    value.map_or("–".to_owned(), |value| format!("{value:.0}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::roles::{rows, tests::measurements};

    #[test]
    fn the_note_tells_targets_the_hop_and_all_sides() {
        let text = write(&rows(&measurements(0.0), 7, None));
        for line in [
            "Medians of 7 rounds, latencies of all rounds together.",
            "| 1k-token text, 16 clients, split | CPU per request | Dynamo 0.1 | 300 | 1800 | 6.00 | ≥ 4 | yes |",
            "| 1k-token text, 1 client | engine to engine p50 | null relay | 90.0 | 20.0 | 0.75 | ≤ 1 | yes |",
            "The ratio of *engine to engine* is to the null relay's time and 100 µs. Of 100 hops one took 300 µs or more.",
            "| CPU added by the second hop, µs | chiasm | Dynamo 0.1 |",
            "| 1k-token text, 64 tokens streamed, 64 clients | 100 | 600 |",
            "| | unit | chiasm, aggregated | chiasm, split | Dynamo 0.1, aggregated | Dynamo 0.1, split |",
            "| CPU per request | µs | 200 | 300 | 1200 (× 6.00) | 1800 (× 6.00) |",
            "| 1k-token text, split | chiasm | 20 | 0 |",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}\n{text}");
        }
        assert_eq!(text.matches("\n## 1k-token text").count(), 4);
    }

    #[test]
    fn prompts_of_another_length_are_told() {
        let text = write(&rows(&measurements(2.0), 7, None));
        assert!(text.contains("**no: other prompts**"), "{text}");
    }
}
