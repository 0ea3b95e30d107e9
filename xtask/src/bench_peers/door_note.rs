//! `docs/benchmarks/door.md`, made of the rows and nothing else.

use crate::bench_peers::door::{BASELINE, METRICS, ORIGIN, OUR_ENGINES, PER_CPU, ROUNDS, TOKENS_PER_CPU};
use crate::bench_peers::load;
use crate::bench_peers::page::{lengths, number, peers, push, reached, table};
use crate::bench_peers::row::Row;

const HEAD: &str = "\
# Door: what a request costs in the frontend

Written by `cargo xtask bench-peers door`; to change it, run that again. The same numbers as rows: [door.json](door.json).
";

const HOW: &str = "\
All frontends run at once, each before engines of its own, and are asked in turns: case by case, with 1, 16 and 64 clients, in
an order that turns round each time. A client asks again when it is answered, for 0.8 s. What counts is the frontend's CPU time,
user and system, of all its threads; engines, the origin and the clients are other processes or threads and are not in it. They want
the same cores, so requests per second and latencies are those of a machine that is too small for all of it, and say little
beyond themselves. Only ratios of one run mean something.

| side | is |
|---|---|
| chiasm | `chiasm serve --attach`, cargo's release profile; images to the engine in shared memory, or not at all if it has them |
| vllm-rs | vLLM's Rust frontend, the program in vLLM's wheel, by `vllm-rs serve`, with libturbojpeg at hand; images to the engine in messages, every time |
| Dynamo | `python -m dynamo.frontend --router-mode kv`; images are left to its workers, so this is no decoding at all |

| case | is |
|---|---|
| repeated image | the same JPEG of 1024 × 1024 pixels (270 kB) with another question in each request: as data URI, or by a URL of an origin that sends `Cache-Control: max-age` and `ETag` |
| distinct images | another JPEG file of that size in each request: one of 4 pictures, with a comment segment that no other has |
| 1k-token text | 1,000 tokens in each request, of words drawn by Zipf's law, one of 25 made of two |
| shared system prompt | the same, but the first seven tenths are the same system prompt each time |
| conversation | the next question, of 40 words, in one of 16 conversations with all that was said in it, answers of 200 words: up to 6,000 tokens, 3,000 on average |
| streaming | 64 clients that each open two streams of 128 tokens, one after the other, each after a short text; the engine makes 100 steps per second, in each of which every stream gets a token. Its mocker has no such pace, so Dynamo takes no part |

- chiasm and vllm-rs have the same engine: `chiasm sim-engine`, so fast that it waits for nothing, a receiver cache of 0.25 GiB. Dynamo
  has its mocker at a speed-up of a million. Answers have 4 tokens, in one piece, where nothing else is said.
- A simulated engine takes more CPU time for a small request than our frontend does, so before one engine our frontend would wait,
  at half of Dynamo's rate; it stands before several. How many cores the engines of a side took is in the tables: a side whose
  engines take about one each was waiting for them. For streams there is one.
- The model is Qwen2-VL: its vocabulary and its image processor, no weights; an image is 1,369 tokens.
- Each answer is a 200 with the expected number of prompt tokens, or the run fails. Before, the same prompts go to all: their
  lengths have to be equal. Dynamo's frontend does not count an image's tokens, so only its texts are compared.
- Before they are measured, sides are asked for a second per case, and for distinct images until 600 are answered, so caches are full
  and shared memory was used before. Each measurement begins after one more request, so a repeated image is known.
- vllm-rs fetches nothing from this machine's addresses, so its URL has an address for examples, and the origin is its proxy. Dynamo
  fetches what it wants to know of an image by itself; how often the origin was asked is in the table.
- All log as they do by default, into files.
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let rounds = rows.iter().find(|row| row.metric == ROUNDS).and_then(|row| row.ours).unwrap_or_default();
    let peers = peers(rows.iter().filter(|row| is_rate(row)));
    push(
        &mut text,
        format_args!(
            "\nMedians of {rounds} rounds, latencies of all rounds together, against {}.",
            peers.join(" and ")
        ),
    );
    text.push_str(&load::sentence(rows));
    if let Some(engines) = rows.iter().find(|row| row.metric == OUR_ENGINES).and_then(|row| row.ours) {
        push(&mut text, format_args!(" Engines before chiasm: {engines}."));
    }
    push(&mut text, format_args!("\n\n{HOW}"));
    targets(rows, &mut text);
    if peers.contains(&BASELINE) {
        push(&mut text, format_args!("\n{}", baseline(rows)));
    }
    lengths(rows, &mut text);
    let cases = rows.chunk_by(|a, b| a.case == b.case);
    for case in cases.filter(|case| case.iter().any(is_rate)) {
        // How often an origin was asked is told where an image comes from one.
        let metrics = METRICS.iter().filter(|metric| metric.name != ORIGIN || case[0].case.contains("URL"));
        table(case, metrics, &mut text);
    }
    text
}

/// What is told of a comparison with another commit.
pub(crate) fn baseline(rows: &[Row]) -> String {
    let mut text = String::from(
        "## CPU time of the frontend against another commit's\n\n| case | unit | ours | baseline | ratio | target | reached |\n|---|---|---|---|---|---|---|\n",
    );
    for row in rows.iter().filter(|row| row.peer_name == BASELINE) {
        let Row { case, unit, target: Some(target), .. } = row else { continue };
        let [ours, peer] = [row.ours, row.peer].map(number);
        let ratio = row.ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.3}"));
        push(
            &mut text,
            format_args!("| {case} | {unit} | {ours} | {peer} | {ratio} | ≤ {target} | {} |\n", reached(row)),
        );
    }
    text
}

fn is_rate(row: &Row) -> bool {
    [PER_CPU, TOKENS_PER_CPU].contains(&row.metric.as_str())
}

fn targets(rows: &[Row], text: &mut String) {
    text.push_str("\n## Targets: requests per second of the frontend's CPU time\n\n");
    text.push_str("| case | against | ours | theirs | ratio | target | reached |\n|---|---|---|---|---|---|---|\n");
    for row in rows.iter().filter(|row| row.peer_name != BASELINE) {
        let Some(target) = row.target else { continue };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        let (Row { case, peer_name, .. }, reached) = (row, reached(row));
        push(text, format_args!("| {case} | {peer_name} | {ours} | {peer} | {ratio} | ≥ {target} | {reached} |\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::door;

    #[test]
    fn the_note_tells_targets_lengths_and_all_metrics() {
        let text = write(&door::rows(&door::tests::measurements(0.0), 7, 3, None));
        assert!(
            text.contains("Medians of 7 rounds, latencies of all rounds together, against vllm-rs 0.1 and Dynamo 0.2."),
            "{text}"
        );
        assert!(
            text.contains("| repeated image, URL, 1 client | vllm-rs 0.1 | 1000 | 100 | 10.0 | ≥ 8 | yes |"),
            "{text}"
        );
        assert!(
            text.contains("| 1k-token text, 16 clients | Dynamo 0.2 | 1000 | 500 | 2.00 | ≥ 3 | **no** |"),
            "{text}"
        );
        assert!(text.contains("| 1k-token text | Dynamo 0.2 | 20 | 0 |"), "{text}");
        assert!(
            text.contains(
                "## 1k-token text, 1 client\n\n| | unit | chiasm | vllm-rs 0.1 | Dynamo 0.2 |\n|---|---|---|---|---|\n"
            ),
            "{text}"
        );
        assert!(text.contains("| CPU per request | ms | 1.00 | 10.0 (× 10.0) | 2.00 (× 2.00) |"), "{text}");
        assert_eq!(text.matches("| origin requests per request | requests | 1.00 | 1.00 | 1.00 |").count(), 2);
    }

    #[test]
    fn a_baseline_has_a_table_of_its_own() {
        let rows = door::rows(&door::tests::against_a_baseline(), 7, 3, None);
        let table = baseline(&rows);
        assert!(table.contains("| streaming, 64 clients | µs | 1.10 | 1.00 | 1.010 | ≤ 1.03 | yes |"), "{table}");
        let text = write(&rows);
        assert!(text.contains(&table) && text.contains("Engines before chiasm: 3."), "{text}");
        assert!(!text.contains("≥ 1.03"), "{text}");
    }

    #[test]
    fn prompts_of_another_length_are_told() {
        let text = write(&door::rows(&door::tests::measurements(2.0), 7, 3, None));
        assert!(text.contains("**no: other prompts**"), "{text}");
    }
}
