//! `docs/benchmarks/stream.md`, made of the rows and nothing else.

use crate::bench_peers::door::{METRICS, ORIGIN, ROUNDS};
use crate::bench_peers::load;
use crate::bench_peers::page::{lengths, number, push, reached, table};
use crate::bench_peers::row::Row;

const HEAD: &str = "\
# Stream: what a token costs on its way to the client

Written by `cargo xtask bench-peers stream`; to change it, run that again. The same numbers as rows: [stream.json](stream.json).
";

const HOW: &str = "\
All frontends run at once, each before an engine of its own, and are asked in turns: case by case, in an order that turns round each
time. Clients open streams of 256 tokens after a short text, one token in each step of the engine, two streams one after the other
where there are 1 or 64 at 100 steps per second, one where there are 512 at 25. What counts is the frontend's CPU time, user and system,
of all its threads; engines and clients are other processes or threads. Only ratios of one run mean something.

| side | is |
|---|---|
| chiasm | `chiasm serve --attach --tool-call-parser hermes`, cargo's release profile |
| vllm-rs | vLLM's Rust frontend, the program in vLLM's wheel, with `--enable-auto-tool-choice --tool-call-parser hermes` |
| Dynamo | `python -m dynamo.frontend --router-mode kv` before its mocker, whose steps take as long as it thinks they do: no flag sets how many there are per second, so its rate is in the tables. The mocker knows no log probabilities and registers no parser of calls: Dynamo takes part where answers are plain |
| null relay | one thread that receives a message by ZMQ as often as the engine makes steps, and writes the bytes of an event to each client. The limit for what has to receive a message and write to each socket |

| case | is |
|---|---|
| plain | the engine's answer is the text of a function call of more than 256 tokens, told as text |
| tools | the same with `tools`, so the call is read from the text and told as one; what belongs to its form is not told, so there are fewer events than tokens |
| logprobs | plain, with `logprobs` and one candidate per token |

- chiasm and vllm-rs have the same engine: `chiasm sim-engine`, for 512 streams at once. Each answer is a 200 with 256 tokens, or the run
  fails. Before, one prompt of each case goes to all: its length has to be the same.
- *Engine to client* is the time from when an engine has its outputs ready to be sent, which it writes down, until the client has read
  the event. All clients are one thread, so where there are many streams most of it is the reading of those before, for all sides alike;
  the first and last eight events of a stream are left out, as others begin and end then.
- A token of a single stream costs what it costs to wake up for it: its ratio to the null relay tells what is ours of that.
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let rounds = rows.iter().find(|row| row.metric == ROUNDS).and_then(|row| row.ours).unwrap_or_default();
    push(
        &mut text,
        format_args!("\nMedians of {rounds} rounds, delays of all rounds together.{}", load::sentence(rows)),
    );
    push(&mut text, format_args!("\n\n{HOW}\n## Targets\n\n"));
    text.push_str(
        "| case | metric | against | ours | theirs | ratio | target | reached |\n|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let Row { case, metric, peer_name, target: Some(target), .. } = row else { continue };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        // What has a limit is told as its part of it.
        let sign = if metric.starts_with("output tokens") { "≥" } else { "≤" };
        let reached = reached(row);
        push(
            &mut text,
            format_args!(
                "| {case} | {metric} | {peer_name} | {ours} | {peer} | {ratio} | {sign} {target} | {reached} |\n"
            ),
        );
    }
    for case in cases(rows) {
        let rows: Vec<Row> = rows.iter().filter(|row| row.case == case).cloned().collect();
        // There are no images that an origin would be asked for.
        table(&rows, METRICS.iter().filter(|metric| metric.name != ORIGIN), &mut text);
    }
    lengths(rows, &mut text);
    text
}

/// The cases that were measured, in their order.
fn cases(rows: &[Row]) -> Vec<&str> {
    let mut cases: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.case.contains(" stream")) {
        if !cases.contains(&row.case.as_str()) {
            cases.push(&row.case);
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::stream::{rows, tests::measurements};

    #[test]
    fn the_note_tells_targets_and_each_case() {
        let text = write(&rows(&measurements(), 5, None));
        assert!(text.contains("Medians of 5 rounds"), "{text}");
        for line in [
            "| plain, 64 streams | output tokens per CPU second | Dynamo 0.2 | 100000 | 25000 | 4.00 | ≥ 5 | **no** |",
            "| plain, 512 streams | engine to client p99 | null relay | 100 | 50.0 | 2.00 | ≤ 2 | yes |",
            "| | unit | chiasm | vllm-rs 0.1 | Dynamo 0.2 | null relay | chiasm (baseline) |",
            "| CPU per output token | µs | 10.0 | 20.0 (× 2.00) | 40.0 (× 4.00) | 5.00 (× 0.50) | 15.0 (× 1.50) |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert_eq!(text.matches("\n## logprobs, ").count(), 3);
    }
}
