//! Makes the page `docs/benchmarks/handoff.md` from its rows.

use crate::bench_peers::handoff::{
    CACHED, FIRST_USE, INLINE, LATER_USE, LIMIT, MEMCPY, MEMCPY_IN_TURN, SEND, SHM, TEXT, WRITE,
};
use crate::bench_peers::load;
use crate::bench_peers::measured::distinct;
use crate::bench_peers::page::{Table, Targets, fill, missed, peers, run_value};
use crate::bench_peers::row::{ROUNDS, Row};
use crate::error::Error;

const TARGETS: Targets = Targets {
    heads: "image | way | against | ours, ms | theirs, ms",
    cells: |row| format!("{} | {} | {}", row.case, row.metric, row.peer_name),
    number,
    is_limit: |row| matches!(row.peer_name.as_str(), MEMCPY | LIMIT),
    outputs: "other bytes",
};

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let missed =
        missed(rows, "Where the time goes in what was not reached:", |row| profile(rows, row));
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
        ("load", load::sentence(rows)),
        ("targets", TARGETS.table(rows) + &missed),
        ("ways", ways(rows)),
        ("first_use", first_use(rows)),
    ];
    fill(include_str!("templates/handoff.md"), &values)
}

/// Describes the parts of the time of a missed target.
fn profile(rows: &[Row], Row { case, metric, peer_name, .. }: &Row) -> String {
    let part = |metric: &str| {
        let row = rows.iter().find(|row| row.case == *case && row.metric == metric);
        number(row.and_then(|row| row.ours))
    };
    let peer = |name: &str| {
        let row = rows.iter().find(|row| row.case == *case && row.peer_name == name);
        number(row.and_then(|row| row.peer))
    };
    let parts = if metric == CACHED {
        format!("{TEXT} takes {} ms", peer(TEXT))
    } else if peer_name == MEMCPY {
        let [write, in_turn, send] = [part(WRITE), peer(MEMCPY_IN_TURN), part(SEND)];
        format!(
            "writing the slot takes {write} ms, one copy to memory used in turn {in_turn} ms; \
             sending the rest of the request {send} ms"
        )
    } else {
        format!(
            "writing the slot takes {} ms, sending the rest of the request {} ms",
            part(WRITE),
            part(SEND)
        )
    };
    format!("{case}, {metric}, {peer_name}: {parts}")
}

/// Returns the table of all ways of transfer with a column per image.
fn ways(rows: &[Row]) -> String {
    let cases = distinct(rows.iter().map(|row| row.case.as_str()).filter(|case| *case != "all"));
    let mut lines = Vec::new();
    let mut line = |name: &str, time: &dyn Fn(&Row) -> Option<f64>| {
        let times = cases
            .iter()
            .map(|case| number(rows.iter().filter(|row| row.case == *case).find_map(time)));
        lines.push(format!("{name} | {}", times.collect::<Vec<_>>().join(" | ")));
    };
    for metric in [SHM, WRITE, SEND, CACHED, INLINE] {
        let name = if metric == SHM { format!("**{metric}**") } else { metric.to_owned() };
        line(&name, &|row| row.ours.filter(|_| row.metric == metric));
        if metric == CACHED {
            line(TEXT, &|row| row.peer.filter(|_| row.peer_name == TEXT));
        }
    }
    for peer in peers(rows.iter().filter(|row| row.metric == SHM)) {
        line(peer, &|row| row.peer.filter(|_| row.peer_name == peer));
    }
    Table::new(format_args!("way | {}", cases.join(" | "))).rows(lines)
}

/// Returns the table of first uses of slots.
fn first_use(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.metric == FIRST_USE && row.peer_name == LATER_USE);
    Table::new("image | first use, ms | used before, ms | ratio").rows(rows.map(|row| {
        let [first, before, ratio] = [row.ours, row.peer, row.ratio].map(number);
        format!("{} | {first} | {before} | {ratio}", row.case)
    }))
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
    fn page_shows_targets_with_reasons_of_misses() {
        let note = write(&rows(&run("13 MB", true), BUSY)).unwrap();
        for line in [
            "Medians of 3 rounds; ratios are those of the medians. Before, 1.25 processes wanted \
             the machine's 2 cores.",
            "| 13 MB | shm view | memcpy | 2.60 | 2.00 | 1.30 | ≤ 1.3 | yes |",
            "| 13 MB | shm view | pickle + SharedMemory, as Dynamo 1.5.1 (Python 3.11.7) | 2.60 | \
             26.00 | 10.00 | ≥ 5 | yes |",
            "| 13 MB | cached | limit | 1.10 | 0.20 | 5.50 | ≤ 1 | **no** |",
            "- 13 MB, shm view, msgpack + SharedMemory, as Dynamo 1.6.1 (vLLM 0.32.0, Python \
             3.11.7): writing the slot takes 2.10 ms, sending the rest of the request 0.50 ms",
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
    fn missed_copy_is_compared_with_copy_in_rotation() {
        let mut rows = rows(&run("13 MB", true), BUSY);
        rows.iter_mut().filter(|row| row.target == Some(1.3)).for_each(|row| row.ok = Some(false));
        let line = "- 13 MB, shm view, memcpy: writing the slot takes 2.10 ms, one copy to memory \
                    used in turn 2.20 ms; sending the rest of the request 0.50 ms";
        assert!(write(&rows).unwrap().lines().any(|found| found == line));
    }

    #[test]
    fn different_bytes_are_shown() {
        let note = write(&rows(&run("13 MB", false), BUSY)).unwrap();
        assert!(note.contains("| ≤ 1.3 | **no: other bytes** |"), "{note}");
    }
}
