//! `docs/benchmarks/serve.md`, made of the rows and nothing else.

use crate::bench_peers::door::ROUNDS;
use crate::bench_peers::load;
use crate::bench_peers::page::{lengths, number, push, reached, table};
use crate::bench_peers::row::Row;
use crate::bench_peers::serve::{METRICS, RATE};

const HEAD: &str = "\
# Serve: the whole, with real engines

Written by `cargo xtask bench-peers serve`; to change it, run that again. The same numbers as rows: [serve.json](serve.json).
";

const HOW: &str = "\
All sides run at once, each with two vLLM engines of its own on this machine's cores, and are asked in turns, in an order that turns
round each time: the same 96 requests of 8 clients, each of which asks again when it is answered. A request has one of 12 pictures, drawn
by Zipf's law, and a question that was never asked before; its answer is streamed and has 16 tokens. Engines and frontends share the
cores, so what the engines take bounds what any frontend can reach: it is measured too. Only ratios of one run mean something.

| side | is |
|---|---|
| chiasm | `chiasm serve --engines 2`, cargo's release profile; images to engines in shared memory |
| vllm serve | `vllm serve --data-parallel-size 2` |
| vllm-rs | vLLM's Rust frontend, the program in vLLM's wheel, by `vllm-rs serve --data-parallel-size 2` |
| engines alone | two engines as `chiasm serve` launches them. The requests of each round were prepared and recorded before, and are sent by a loop, 8 in flight, each to the engine that chiasm has chosen for it in this round. No HTTP, no JSON, no image is read, no text is made |

- The engines are vLLM's for CPUs, one thread each, with the tiny random model `qwen25vl` of the tests: a picture of 1024 × 1024 pixels
  (270 kB as JPEG) is some 1,200 tokens, and computing them takes far less than with a real model. So frontends weigh more here than
  before a real model, and keeping a picture's tokens weighs less. All have `--enforce-eager --block-size 32 --max-model-len 4096
  --dtype float32 --num-gpu-blocks-override 2048`: room for all pictures in each engine's KV cache several times over.
- The second case has `--max-num-batched-tokens 8192` beside that, vLLM's default on GPUs of the size of an H100; on a CPU it is 2048.
  The engine's encoder cache grows with it.
- The pictures are four, each as three files that differ in a comment. vLLM and chiasm know a picture by the bytes of its file, so to
  their engines these are twelve.
- *TTFT* is the time from sending a request until its first text is there, of all rounds together; for the engines alone, from sending
  it to the engine until its first tokens are back.
- Before, each side is asked for every picture once, and for one more round that does not count.
- Requests per second are medians over the rounds; their ratio is the median of the ratios within a round. CPU time is user and system, of
  all processes of a side: its engines, and the rest, which is the frontend. What the other sides take while one is asked is in the table.
- An answer is a 200 with 16 tokens, or the run fails. The lengths of all prompts are compared.
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let rounds = rows.iter().find(|row| row.metric == ROUNDS).and_then(|row| row.ours).unwrap_or_default();
    push(&mut text, format_args!("\n{rounds} rounds.{}\n\n{HOW}\n## Targets\n\n", load::sentence(rows)));
    text.push_str(
        "| case | metric | against | ours | theirs | ratio | target | reached |\n|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let Row { case, metric, peer_name, target: Some(target), .. } = row else { continue };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        let reached = reached(row);
        push(
            &mut text,
            format_args!("| {case} | {metric} | {peer_name} | {ours} | {peer} | {ratio} | ≥ {target} | {reached} |\n"),
        );
    }
    for case in rows.chunk_by(|a, b| a.case == b.case).filter(|case| case.iter().any(|row| row.metric == RATE)) {
        table(case, METRICS.iter(), &mut text);
    }
    lengths(rows, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::serve::{rows, tests::measurements};

    #[test]
    fn the_note_tells_targets_all_sides_and_prompts() {
        let text = write(&rows(&measurements(0.0), 5, None));
        for line in [
            "5 rounds.",
            "| vLLM's defaults | requests per second | engines alone | 40.0 | 40.0 | 0.95 | ≥ 0.9 | yes |",
            "| 8192 tokens per step | TTFT p90 | vllm serve 0.1 | 10.0 | 40.0 | 4.00 | ≥ 3 | yes |",
            "| | unit | chiasm | vllm serve 0.1 | vllm-rs 0.1 | engines alone |",
            "| frontend's CPU per request | ms | 10.0 | 40.0 (× 4.00) | 20.0 (× 2.00) | – |",
            "| vLLM's defaults | vllm-rs 0.1 | 480 | 0 |",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}\n{text}");
        }
    }

    #[test]
    fn prompts_of_another_length_are_told() {
        let text = write(&rows(&measurements(2.0), 5, None));
        assert!(text.contains("**no: other prompts**"), "{text}");
    }
}
