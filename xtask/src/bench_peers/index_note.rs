//! `docs/benchmarks/index.md`, made of the rows and nothing else.

use crate::bench_peers::index::{
    DIFFERENT, HELD, LOOKUPS, LOOKUPS_FROM_TOKENS, MEMORY, METRICS, OURS, PROMPT_BLOCKS, PROMPT_WORKERS, ROUNDS,
};
use crate::bench_peers::load;
use crate::bench_peers::page::push;
use crate::bench_peers::row::Row;

const HEAD: &str = "\
# Index: who holds what, against dynamo-kv-router

Written by `cargo xtask bench-peers index`; to change it, run that again. The same numbers as rows: [index.json](index.json).
";

const HOW: &str = "\
All sides go through the same trace in one process: slice by slice, in an order that turns round each time, and hold the same.
One thread's speed is by CPU time, so that what else the machine does counts little. Two threads' is that of the slower one, by
the clock on the wall without what threads waited for a core that others had; times beside events are by the clock on the wall.
Both need a quiet machine. Memory is measured with one side alone in a process. Only ratios of one run mean something.

| side | is |
|---|---|
| chiasm | `chiasm_kv::PrefixIndex`, without a cap; decoded event batches or frames in, block keys of 127 bits |
| RadixTree | for one thread; what Dynamo's router uses when told to have one event thread |
| ConcurrentRadixTreeCompressed | what Dynamo's router uses by default, on the threads and through the channels that it needs, without the pool's own wrapper; those threads' CPU time counts |
| PositionalIndexer | the strided search, jumps of 32 as documented; called directly |

| line | is |
|---|---|
| events, filling | stored and removed blocks per second, from the engine's tokens and hashes to the index, while the caches fill |
| events | the same when the caches are full, so that what comes in pushes something out |
| events, 2 threads | the same on two threads, each with half of the workers |
| events, from frames | as `events`, from the bytes that an engine publishes: with decoding, what a router does for each frame |
| events, from frames, 2 threads | the same on two threads, each with half of the workers |
| events, hashed | as `events`, but someone else has hashed the peers' tokens, as Dynamo's publishers do beside each engine; ours are hashed here |
| lookups | prompts per second, by hashes that were made just before, 64 prompts at a time, to the overlap of every worker (`find_matches(…, false)`) |
| lookups, 2 threads | the same on two threads, by hashes that were made long before and are in no near cache |
| lookups, from tokens | the same on one thread with hashing the prompt |
| lookup p50, p99 beside events | of one lookup, while another thread applies 200,000 blocks a second |
| frames, own hashes | as `events, from frames`, before engines that each have a seed of their own for their hashes, as vLLM's have where `PYTHONHASHSEED` is not set; against ours before plain ones |
| frames, twice | the same before engines that store and evict each block twice; blocks count as often as they are told of |
| lookups alone, N threads | prompts per second on that many threads together, by hashes that were made long before; against N times what one thread does. As far as the machine has cores |
| lookups beside few events | prompts per second on one thread, while another applies 50,000 blocks a second; against the same while that waits |
| memory | growth of what is resident from nothing to full caches; what the allocator wastes counts |
| memory, cleared | what is left of it when every worker has dropped all; most of it is the allocator's |
| ratio | how many times better we are than the best of the peers |

- Tokens are hashed for the peers with `compute_block_hash_for_seq`, an event at a time, which is less than their publisher does.
  Theirs are 64 bits that anyone can compute, ours 127 bits with a secret.
- Events are there twice: decoded ones show what the index alone takes, frames what a router takes to know of them. Decoded
  events are taken out of the inputs and dropped on the way on all sides, as when they come from the wire. That and fetching them from
  memory is so much of every side's time that decoded events have no target; frames do.
- Frames are as vLLM 0.32 writes them for text. Ours go through `apply_payload`, the peers' through `zmq_wire::decode_event_batch`
  and a `ZmqEventNormalizer` for each engine, in the order of Dynamo's listener, without its network; it hashes block by block.
- `RadixTree` takes prompts by value: the copies are made outside of the times.
- The sweep of the compressed tree, every five minutes, does not happen here.
- `PositionalIndexer` finds nothing unless engines hash blocks as Dynamo does, because it computes their hashes; so these do.
- Of every prompt the overlaps are compared: all workers, exactly. Text only, and each block is stored once per worker: of a
  block that an engine holds twice and evicts once, the peers say that it is gone. Tests in `bench/peers` show both.
- All are built alike: cargo's release profile, without link-time optimisation, the system's allocator.

The traces (`bench/peers/src/bin/index/workload.rs`) are made from a seed: conversations of up to 12 turns that start with one of
4 system prompts and in 4 of 10 cases a document, by Zipf's law; blocks of 16 tokens. Prompts come in events of up to 64 blocks,
answers in events of one block, four answers side by side. Caches evict what was used least recently, leaves first.
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let rounds = rows.iter().find(|row| row.metric == ROUNDS).and_then(|row| row.ours).unwrap_or_default();
    let peer = rows.iter().find_map(|row| Some(row.peer_name.split_once(" (")?.1.trim_end_matches(')')));
    push(&mut text, format_args!("\nMedians of {rounds} rounds against {}.", peer.unwrap_or("nobody")));
    text.push_str(&load::sentence(rows));
    push(&mut text, format_args!("\n\n{HOW}"));
    targets(rows, &mut text);
    for case in rows.chunk_by(|a, b| a.case == b.case).filter(|case| case[0].case != "all") {
        table(case, &mut text);
    }
    text
}

fn targets(rows: &[Row], text: &mut String) {
    text.push_str(
        "\n## Targets\n\n| fleet | line | unit | against the best: | ours | theirs | ratio | target | reached |\n",
    );
    text.push_str("|---|---|---|---|---|---|---|---|---|\n");
    let aimed: Vec<(&Row, f64)> = rows.iter().filter_map(|row| Some((row, row.target?))).collect();
    for (row, target) in &aimed {
        let reached = match row.ok {
            Some(true) => "yes",
            _ if row.equal == Some(false) => "**no: other answers**",
            _ => "**no**",
        };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        let (Row { case, metric, unit, .. }, peer_name) = (row, short(&row.peer_name));
        push(
            text,
            format_args!(
                "| {case} | {metric} | {unit} | {peer_name} | {ours} | {peer} | {ratio} | ≥ {target} | {reached} |\n"
            ),
        );
    }
    let missed: Vec<&Row> = aimed.iter().map(|(row, _)| *row).filter(|row| row.ok == Some(false)).collect();
    if missed.is_empty() {
        return;
    }
    text.push_str("\nWhat was not reached, per block, prompt, or pair of a worker and a block:\n\n");
    for row in missed {
        push(text, format_args!("- {}, {}: {}\n", row.case, row.metric, profile(rows, row)));
    }
}

/// Says what a missed metric costs both sides: time per block or prompt, or bytes per block held.
fn profile(rows: &[Row], missed: &Row) -> String {
    let of = |metric: &str, peer: &str| {
        rows.iter().find(|row| row.case == missed.case && row.metric == metric && row.peer_name == peer)
    };
    let (ours, theirs) = (missed.ours.unwrap_or(f64::NAN), missed.peer.unwrap_or(f64::NAN));
    match missed.unit {
        "M blocks/s" => format!("{:.0} ns, theirs {:.0} ns", 1e3 / ours, 1e3 / theirs),
        "MB" => {
            let held = of(HELD, OURS).and_then(|row| row.ours).unwrap_or(f64::NAN) / 1e6;
            format!("{:.0} bytes, theirs {:.0} bytes", ours / held, theirs / held)
        }
        _ => {
            let mut text = format!("{:.2} µs, theirs {:.2} µs", 1e3 / ours, 1e3 / theirs);
            let hashed = of(LOOKUPS, &missed.peer_name).filter(|_| missed.metric == LOOKUPS_FROM_TOKENS);
            if let Some((our_hashed, their_hashed)) = hashed.and_then(|row| Some((row.ours?, row.peer?))) {
                let hashing = |all: f64, hashed: f64| (1e3 / all - 1e3 / hashed).max(0.0);
                let (ours, theirs) = (hashing(ours, our_hashed), hashing(theirs, their_hashed));
                push(&mut text, format_args!("; of it hashing {ours:.2} µs, theirs {theirs:.2} µs"));
            }
            text
        }
    }
}

/// All sides of one fleet.
fn table(case: &[Row], text: &mut String) {
    let ours = |metric: &str| case.iter().find(|row| row.metric == metric && row.ours.is_some())?.ours;
    let mut peers: Vec<&str> = Vec::new();
    for row in case.iter().filter(|row| row.metric == DIFFERENT) {
        peers.push(&row.peer_name);
    }
    push(text, format_args!("\n## {}\n\n", case[0].case));
    push(
        text,
        format_args!(
            "{:.0} blocks held, each by a worker; prompts of {:.0} blocks, some of which {:.1} workers hold, on average.\n\n",
            ours(HELD).unwrap_or_default(),
            ours(PROMPT_BLOCKS).unwrap_or_default(),
            ours(PROMPT_WORKERS).unwrap_or_default(),
        ),
    );
    push(
        text,
        format_args!(
            "| | unit | **chiasm** | {} | ratio |\n",
            peers.iter().map(|peer| short(peer)).collect::<Vec<_>>().join(" | ")
        ),
    );
    push(text, format_args!("|---|---|---|{}---|\n", "---|".repeat(peers.len())));
    for metric in &METRICS {
        let rows: Vec<&Row> = case.iter().filter(|row| row.metric == metric.name).collect();
        let Some(first) = rows.first() else { continue };
        push(text, format_args!("| {} | {} | {} |", metric.name, metric.unit, number(first.ours)));
        for peer in &peers {
            let theirs = rows.iter().find(|row| row.peer_name == *peer).and_then(|row| row.peer);
            push(text, format_args!(" {} |", theirs.map_or_else(String::new, |theirs| number(Some(theirs)))));
        }
        // The least ratio is the one against the best peer.
        let ratio = rows.iter().filter_map(|row| row.ratio).reduce(f64::min);
        push(text, format_args!(" {} |\n", number(ratio)));
        if let Some(count) = ours("memory, own count").filter(|_| metric.name == MEMORY) {
            let line =
                format_args!("| memory, own count | MB | {count:.2} |{} |\n", " |".repeat(peers.len())).to_string();
            text.push_str(&line);
        }
    }
    let answer = |row: &Row| match (row.equal, row.ours, row.peer) {
        (Some(true), Some(compared), _) => format!(" {compared} of {compared} |"),
        (_, Some(compared), Some(different)) => format!(" **{} of {compared}** |", compared - different),
        _ => " **none** |".to_owned(),
    };
    let answers: String = case.iter().filter(|row| row.metric == DIFFERENT).map(answer).collect();
    push(text, format_args!("| equal answers | prompts | |{answers} |\n"));
}

/// A peer's name without its crate.
fn short(name: &str) -> &str {
    name.split(' ').next().unwrap_or(name)
}

fn number(number: Option<f64>) -> String {
    number.map_or_else(|| "not measured".to_owned(), |number| format!("{number:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::index::rows;
    use crate::bench_peers::index::tests::measurements;

    #[test]
    fn the_note_says_what_is_reached_and_what_not_and_why() {
        let note = write(&rows(&measurements(), 15, None));
        for line in [
            "Medians of 15 rounds against d 1.0.",
            "| 8 workers | events, from frames | M blocks/s | Tree | 3.00 | 1.00 | 3.00 | ≥ 3 | yes |",
            "| 8 workers | memory | MB | Tree | 33.33 | 100.00 | 3.00 | ≥ 2 | yes |",
            "| 64 workers | events, from frames | M blocks/s | Tree | 3.00 | 1.00 | 3.00 | ≥ 3 | **no: other answers** |",
            "- 64 workers, events, from frames: 333 ns, theirs 1000 ns",
            "- 64 workers, memory: 33 bytes, theirs 100 bytes",
            "- 64 workers, lookups, from tokens: 16.67 µs, theirs 50.00 µs; of it hashing 13.33 µs, theirs 40.00 µs",
        ] {
            assert!(note.lines().any(|found| found == line), "{line}\nis not in\n{note}");
        }
    }

    #[test]
    fn every_fleet_has_its_table_and_what_a_side_cannot_do_is_empty() {
        let note = write(&rows(&measurements(), 15, None));
        for line in [
            "## 8 workers",
            "1000000 blocks held, each by a worker; prompts of 240 blocks, some of which 7.5 workers hold, on average.",
            "| | unit | **chiasm** | Tree | Map | ratio |",
            "| events | M blocks/s | 6.00 | 2.00 | 1.00 | 3.00 |",
            "| events, from frames | M blocks/s | 3.00 | 1.00 | 0.50 | 3.00 |",
            "| events, from frames, 2 threads | M blocks/s | 6.00 |  | 1.00 | 6.00 |",
            "| lookup p50 beside events | µs | 2.00 | 6.00 | 12.00 | 3.00 |",
            "| memory, own count | MB | 30.00 | | | |",
            "| equal answers | prompts | | 4096 of 4096 | 4096 of 4096 | |",
            "| equal answers | prompts | | **4093 of 4096** | 4096 of 4096 | |",
        ] {
            assert!(note.lines().any(|found| found == line), "{line}\nis not in\n{note}");
        }
    }
}
