//! `docs/benchmarks/handoff.md`, made of the rows and nothing else.

use crate::bench_peers::handoff::{
    CACHED, FIRST_USE, INLINE, LIMIT, MEMCPY, MEMCPY_IN_TURN, ROUNDS, SEND, SHM, TEXT, USED_BEFORE, WRITE,
};
use crate::bench_peers::load;
use crate::bench_peers::page::push;
use crate::bench_peers::row::Row;

const HEAD: &str = "\
# Handoff: from the frontend's pixels to the engine's tensor

Written by `cargo xtask bench-peers handoff`; to change it, run that again. The same numbers as rows: [handoff.json](handoff.json).
";

const HOW: &str = "\
The clock starts when the frontend has an image's patches in its memory and stops when the engine has them as a tensor: after
vLLM's decoder and its receiver cache. Both ends are processes of one machine. It is the clock on the wall, because waiting for
the other process is part of the way; so run this on a machine that has nothing else to do. Only ratios of one run mean
something.

In each round each way hands each image over once, in an order that is shuffled each round; six rounds before warm up. Right
before each image one of four patches goes the same way, untimed, so that the code of both processes is in the caches, as it is
while an engine is busy. After each image a checksum of what arrived is compared.

| way | is |
|---|---|
| shm view | `chiasm_engine::EngineClient` and the plugin `chiasm_vllm`: a slot is taken and written with one copy, its handle is sent, the engine makes a view of it |
| cached | the same client, for an image that the engine's receiver cache holds |
| the same prompt without an image | the same client, and the clock stops after the decoder |
| inline | the same client, the patches as a frame of the message |
| memcpy | one copy by one thread within one process, into memory that was used before |
| memcpy, in turn | the same into memory that is used in turn, as slots are, so that it is in no cache |
| aux frames | vLLM's own way: its `MsgpackEncoder` and pyzmq to the same engine |
| pickle + SharedMemory | vLLM's item pickled, written to a segment of its own, the name sent, copied out and unpickled by another process: the steps of Dynamo 1.5.1 (`mm_kwargs_transfer.py`) in their order |
| msgpack + SharedMemory | the same with vLLM's encoder for pickle and the copies that joining its buffers takes: the steps of Dynamo 1.6.1 |

- The engine is the input thread of vLLM's `EngineCoreProc`, with its sockets, its decoder and its receiver cache, and no model
  behind it. The receiver cache holds four rounds of images, so that slots are returned and used again.
- Requests have 18 prompt tokens, whatever the image. Real ones have more, a token for four patches of Qwen2-VL, which have to be
  encoded and decoded in any way, also for text. Requests are part of `shm view`, `cached`, `inline` and `aux frames`; the segments'
  messages are their names only.
- The ways of the peers do not write the tensor first: for them, having the patches is having the tensor.
- The segments' way ends where Dynamo's worker has the item, which then goes on to the engine in aux frames.
- What the messages and segments hold is given back outside of the times.

All images are raw patches (u8), which look random.
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let rounds = rows.iter().find(|row| row.metric == ROUNDS).and_then(|row| row.ours).unwrap_or_default();
    push(&mut text, format_args!("\nMedians of {rounds} rounds; ratios are those of the medians."));
    text.push_str(&load::sentence(rows));
    push(&mut text, format_args!("\n\n{HOW}"));
    targets(rows, &mut text);
    table(rows, &mut text);
    first_use(rows, &mut text);
    text
}

fn targets(rows: &[Row], text: &mut String) {
    text.push_str("\n## Targets\n\n| image | way | against | ours, ms | theirs, ms | ratio | target | reached |\n");
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    let aimed: Vec<(&Row, f64)> = rows.iter().filter_map(|row| Some((row, row.target?))).collect();
    for (row, target) in &aimed {
        let sign = if matches!(row.peer_name.as_str(), MEMCPY | LIMIT) { "≤" } else { "≥" };
        let reached = match row.ok {
            Some(true) => "yes",
            _ if row.equal == Some(false) => "**no: other bytes**",
            _ => "**no**",
        };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        let Row { case, metric, peer_name, .. } = row;
        push(
            text,
            format_args!(
                "| {case} | {metric} | {peer_name} | {ours} | {peer} | {ratio} | {sign} {target} | {reached} |\n"
            ),
        );
    }
    let missed: Vec<&Row> = aimed.iter().map(|(row, _)| *row).filter(|row| row.ok == Some(false)).collect();
    if missed.is_empty() {
        return;
    }
    text.push_str("\nWhere the time goes in what was not reached:\n\n");
    for row in missed {
        let Row { case, metric, peer_name, .. } = row;
        push(text, format_args!("- {case}, {metric}, {peer_name}: {}\n", profile(rows, row)));
    }
}

fn profile(rows: &[Row], missed: &Row) -> String {
    let part = |metric: &str| {
        let row = rows.iter().find(|row| row.case == missed.case && row.metric == metric);
        number(row.and_then(|row| row.ours))
    };
    if missed.metric == CACHED {
        let text = rows.iter().find(|row| row.case == missed.case && row.peer_name == TEXT);
        return format!("{TEXT} takes {} ms", number(text.and_then(|row| row.peer)));
    }
    if missed.peer_name == MEMCPY {
        let in_turn = rows.iter().find(|row| row.case == missed.case && row.peer_name == MEMCPY_IN_TURN);
        let in_turn = number(in_turn.and_then(|row| row.peer));
        return format!(
            "writing the slot takes {} ms, one copy to memory used in turn {in_turn} ms; sending the rest of the request {} ms",
            part(WRITE),
            part(SEND)
        );
    }
    format!("writing the slot takes {} ms, sending the rest of the request {} ms", part(WRITE), part(SEND))
}

/// All ways, a column per image.
fn table(rows: &[Row], text: &mut String) {
    let mut cases: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.case != "all") {
        if cases.last() != Some(&row.case.as_str()) {
            cases.push(&row.case);
        }
    }
    push(
        text,
        format_args!("\n## All ways, ms\n\n| way | {} |\n|---|{}\n", cases.join(" | "), "---|".repeat(cases.len())),
    );
    let mut line = |name: &str, time: &dyn Fn(&Row) -> Option<f64>| {
        let times = cases.iter().map(|case| {
            let mut rows = rows.iter().filter(|row| row.case == *case);
            rows.find_map(time).map_or_else(String::new, |time| format!("{time:.2}"))
        });
        push(text, format_args!("| {name} | {} |\n", times.collect::<Vec<_>>().join(" | ")));
    };
    for metric in [SHM, WRITE, SEND, CACHED, INLINE] {
        let name = if metric == SHM { format!("**{metric}**") } else { metric.to_owned() };
        line(&name, &|row| row.ours.filter(|_| row.metric == metric));
        if metric == CACHED {
            line(TEXT, &|row| row.peer.filter(|_| row.peer_name == TEXT));
        }
    }
    let mut peers: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.metric == SHM) {
        if !peers.contains(&row.peer_name.as_str()) {
            peers.push(&row.peer_name);
        }
    }
    for peer in peers {
        line(peer, &|row| row.peer.filter(|_| row.peer_name == peer));
    }
}

fn first_use(rows: &[Row], text: &mut String) {
    text.push_str(
        "\n## Memory that was never used\n\nAn arena takes memory from the system as it needs it, 32 MiB at a time.",
    );
    text.push_str(" Taking and writing a slot, where that happens and where not:\n\n");
    text.push_str("| image | first use, ms | used before, ms | ratio |\n|---|---|---|---|\n");
    for row in rows.iter().filter(|row| row.metric == FIRST_USE && row.peer_name == USED_BEFORE) {
        let [first, before, ratio] = [row.ours, row.peer, row.ratio].map(number);
        push(text, format_args!("| {} | {first} | {before} | {ratio} |\n", row.case));
    }
}

fn number(number: Option<f64>) -> String {
    number.map_or_else(String::new, |number| format!("{number:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::handoff::rows;
    use crate::bench_peers::handoff::tests::{BUSY, run};

    #[test]
    fn every_target_has_its_line_and_what_was_missed_its_reason() {
        let note = write(&rows(&run("13 MB", true), BUSY));
        for line in [
            "Medians of 3 rounds; ratios are those of the medians. Before, 1.25 processes wanted the machine's 2 cores.",
            "| 13 MB | shm view | memcpy | 2.60 | 2.00 | 1.30 | ≤ 1.3 | yes |",
            "| 13 MB | shm view | pickle + SharedMemory, as Dynamo 1.5.1 (Python 3.11.7) | 2.60 | 26.00 | 10.00 | ≥ 5 | yes |",
            "| 13 MB | cached | limit | 1.10 | 0.20 | 5.50 | ≤ 1 | **no** |",
            "- 13 MB, shm view, msgpack + SharedMemory, as Dynamo 1.6.1 (vLLM 0.32.0, Python 3.11.7): writing the slot takes \
             2.10 ms, sending the rest of the request 0.50 ms",
            "| way | 13 MB |",
            "| **shm view** | 2.60 |",
            "- 13 MB, cached, limit: the same prompt without an image takes 1.00 ms",
            "| inline | 20.00 |",
            "| memcpy | 2.00 |",
            "| memcpy, in turn | 2.20 |",
            "| aux frames (vLLM 0.32.0, pyzmq 27.3.0) | 10.00 |",
            "| 13 MB | 8.40 | 2.10 | 4.00 |",
        ] {
            assert!(note.lines().any(|found| found == line), "{line}\nis not in\n{note}");
        }
    }

    #[test]
    fn a_missed_copy_is_compared_with_one_in_turn() {
        let mut rows = rows(&run("13 MB", true), BUSY);
        rows.iter_mut().filter(|row| row.target == Some(1.3)).for_each(|row| row.ok = Some(false));
        let line = "- 13 MB, shm view, memcpy: writing the slot takes 2.10 ms, one copy to memory used in turn 2.20 ms; sending \
                    the rest of the request 0.50 ms";
        assert!(write(&rows).lines().any(|found| found == line));
    }

    #[test]
    fn other_bytes_are_named() {
        let note = write(&rows(&run("13 MB", false), BUSY));
        assert!(note.contains("| ≤ 1.3 | **no: other bytes** |"), "{note}");
    }
}
