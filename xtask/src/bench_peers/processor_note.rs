//! `docs/benchmarks/processor.md`, made of the rows and nothing else.

use crate::bench_peers::load;
use crate::bench_peers::page::{number, push};
use crate::bench_peers::processor::{
    ALONE, AT_ONCE, CALL, CLIPS, CLIPS_PER_CORE, CPU, DIFFERENT, FILE, HELPERS, ITEM_CPU, LATENCY, PROMPT, RATE, ROUNDS,
};
use crate::bench_peers::row::Row;

const HEAD: &str = "\
# Processor: items that vLLM's own processor makes

Written by `cargo xtask bench-peers processor`; to change it, run that again. The same numbers as rows: [processor.json](processor.json).
";

const HOW: &str = "\
Four questions are answered. What does a request cost whose image or video was there before, in our frontend and in others that
have vLLM's processor? How many new items do our processes make, beside one process that does nothing else? What does it add that
an item is made in another process? And how many clips are captioned per core, if 400 are asked for at once?

All sides run at once, and each is asked for each case in each round, in an order that is shuffled each time; a round before warms
up. CPU time is user and system, of all threads and processes of a frontend; engines, origins and clients are not in it. Rates and
times are those of the clock on the wall, so run this on a machine that has nothing else to do. Only ratios of one run mean
something.

| side | is |
|---|---|
| chiasm | `chiasm serve --attach --processor vllm`, cargo's release profile, before one simulated engine that waits for nothing: images too are made by vLLM's processor, in locked processes, as many as there are cores less one. Its CPU time is that of the frontend, of the fork server and of its children, from the request to the answer |
| vllm launch render | vLLM's frontend without an engine, as it comes: `POST /v1/chat/completions/render`, which answers with the prompt's tokens and the tensors |
| render without tensors | the same server, asked with `mm_payload: none` for tokens, hashes and places only: enough for a router, not for an engine. It is no target |
| one process | vLLM's frontend code called within one Python process as Dynamo's chat processor does it: the request checked, media loaded, the prompt rendered and tokenized, the processor run with the cache `processor_only`, the engine's request made, the tensors in a segment of shared memory. The calls and settings are those of `dynamo/frontend/vllm_processor.py`, made in `bench/processor/in_one_process.py`: that module itself does not import with this vLLM. Without Dynamo's HTTP server and router, which would cost more |
| decoding and processing alone | the code that our processes run, `python/chiasm_processor`, within one process on one thread, item after item: the file is in memory and the tensors stay there. No server, no prompt, no copies |

| case | is |
|---|---|
| repeated | the same file in each request, with another question. It is compared with what the others take for a file that they have not seen (theirs new) and for the same one again (theirs repeated too), all of them with the caches that they have by default |
| new image, new video | one client, and a file that nobody has seen in each request |
| new images, new videos | as many clients at our server as it takes for no process to wait, one more than twice the processes; beside decoding and processing alone |
| one call | `chiasm_processor::Processor::item` and a copy of its tensors out of the item's memory, as on the way to an engine: what IPC and copies add to decoding and processing alone |
| captioning of clips | the workload of vLLM's pull request 32104, where tensors come to the engine by IPC: clips of 10 frames, all at once, none of them seen before. Once, not in rounds; decoding and processing alone gets a tenth of them |

- The model is a tiny random one with the processor of Qwen2.5-VL, whose type is bfloat16, whose prompts may have 32,768 tokens and
  whose videos have frames of 401,408 pixels at most, so that engines with vLLM's defaults encode 32 frames at once.
- The image is a JPEG of 1920 × 1080 pixels. The video has 64 frames of 1280 × 720 pixels in 16 s, of which the processor takes 32; the
  clip 20 in 5 s, of which it takes 10. A camera moves over a picture; both are H.264. Files travel in the request, as data URIs.
- New files differ in a comment segment or a free box with a number.
- A request has one item and asks for 4 tokens, in one piece; a rendered one is not sent on.
- The engine's receiver cache holds 0.5 GiB: the repeated items, which are then not sent again.
- Before, the same requests go to all frontends, whose prompts have to be of the same length; and the bytes of the tensors that a call
  brings have to have the sum of those that are made alone.
- All log as they do by default, into files.
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let told = |metric: &str| rows.iter().find(|row| row.metric == metric).and_then(|row| row.ours).unwrap_or_default();
    push(
        &mut text,
        format_args!("\nMedians of {} rounds; processes of chiasm that make items: {}.", told(ROUNDS), told(HELPERS)),
    );
    text.push_str(&load::sentence(rows));
    push(&mut text, format_args!("\n\n{HOW}"));
    targets(rows, &mut text);
    inputs(rows, &mut text);
    equality(rows, &mut text);
    comparisons(rows, "What a request costs in the frontend", &[CPU, LATENCY], &mut text);
    comparisons(rows, "New items, and what another process adds", &[RATE, ITEM_CPU, CALL], &mut text);
    comparisons(rows, "Clips, all at once", &[CLIPS_PER_CORE, CLIPS], &mut text);
    text
}

fn targets(rows: &[Row], text: &mut String) {
    text.push_str("\n## Targets\n\n| case | | against | ours | theirs | ratio | target | reached |\n");
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    for row in rows {
        let Some(target) = row.target else { continue };
        let sign = if row.metric == CALL { "≤" } else { "≥" };
        let reached = match row.ok {
            Some(true) => "yes",
            _ if row.equal == Some(false) => "**no: others**",
            _ => "**no**",
        };
        push(text, format_args!("{} {sign} {target} | {reached} |\n", line(row)));
    }
}

/// What all lines have in common: case, metric and unit, peer, both numbers and their ratio.
fn line(row: &Row) -> String {
    let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
    let Row { case, metric, unit, peer_name, .. } = row;
    format!("| {case} | {metric}, {unit} | {peer_name} | {ours} | {peer} | {ratio} |")
}

fn inputs(rows: &[Row], text: &mut String) {
    text.push_str("\n## What is asked for\n\n| | | |\n|---|---|---|\n");
    for row in rows.iter().filter(|row| [FILE, PROMPT, AT_ONCE].contains(&&*row.metric)) {
        let made_by = if row.metric == FILE { format!(", by {}", row.peer_name) } else { String::new() };
        let Row { case, metric, unit, ours, .. } = row;
        push(text, format_args!("| {case} | {metric}{made_by} | {} {unit} |\n", number(*ours)));
    }
}

fn equality(rows: &[Row], text: &mut String) {
    text.push_str(
        "\n## Whether all sides make the same\n\n| item | against | compared | others |\n|---|---|---|---|\n",
    );
    for row in rows.iter().filter(|row| row.metric == DIFFERENT) {
        let [compared, different] =
            [row.ours, row.peer].map(|count| count.map_or("–".to_owned(), |count| count.to_string()));
        let of = if row.peer_name.starts_with(ALONE) { "sums of tensors" } else { "lengths of prompts" };
        push(text, format_args!("| {}, {of} | {} | {compared} | {different} |\n", row.case, row.peer_name));
    }
}

fn comparisons(rows: &[Row], title: &str, metrics: &[&str], text: &mut String) {
    push(
        text,
        format_args!("\n## {title}\n\n| case | | against | ours | theirs | ratio |\n|---|---|---|---|---|---|\n"),
    );
    for row in rows.iter().filter(|row| metrics.contains(&&*row.metric)) {
        push(text, format_args!("{}\n", line(row)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::load::Load;
    use crate::bench_peers::processor::{self, tests::run};

    #[test]
    fn the_note_tells_targets_inputs_and_all_comparisons() {
        let text = write(&processor::rows(&run(0.0), 9, Some(Load { processes: 0.5, cores: 3.0 })));
        for line in [
            "Medians of 9 rounds; processes of chiasm that make items: 2. Before, 0.5 processes wanted the machine's 3 cores.",
            "| repeated image, theirs new | CPU per request, ms | vllm launch render 0.32.0 | 2.00 | 50.0 | 25.0 | ≥ 20 | yes |",
            "| new image | one call, ms | decoding and processing alone (vLLM 0.32.0) | 22.0 | 20.0 | 1.10 | ≤ 1.1 | yes |",
            "| video | file, by libx264 of PyAV 18.1.0 | 487 kB |",
            "| captioning of clips | clips at once | 400 clips |",
            "| image, sums of tensors | decoding and processing alone (vLLM 0.32.0) | 3 | 0 |",
            "| captioning of clips | clips per second of CPU time, clips/s | decoding and processing alone (vLLM 0.32.0) | 4.00 | 5.00 | 0.80 |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn others_are_told() {
        let text = write(&processor::rows(&run(1.0), 9, None));
        assert!(text.contains("**no: others**") && !text.contains("| yes |"), "{text}");
    }
}
