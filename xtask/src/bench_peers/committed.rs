//! Tests of what lies in `docs/benchmarks`: rows and notes belong together, and no mandatory row is missing.

use std::fs;
use std::path::PathBuf;

use crate::bench_peers::row::{Row, missing};
use crate::bench_peers::{
    Bench, RESULTS, door_note, handoff_note, index_note, machines_note, pixels_note, processor_note, roles_note,
    serve_note, stream_note, upstream_note,
};

const BENCHES: [Bench; 10] = [
    Bench::Pixels,
    Bench::Handoff,
    Bench::Index,
    Bench::Door,
    Bench::Stream,
    Bench::Processor,
    Bench::Serve,
    Bench::Machines,
    Bench::Roles,
    Bench::Upstream,
];

fn file(bench: Bench, extension: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    root.join(RESULTS).join(format!("{}.{extension}", bench.name()))
}

fn rows(bench: Bench) -> Vec<Row> {
    // Rows borrow their units, which a run takes from constants.
    let text: &'static str = fs::read_to_string(file(bench, "json")).unwrap().leak();
    serde_json::from_str(text).unwrap()
}

#[test]
fn each_note_is_made_of_the_rows_beside_it() {
    for bench in BENCHES {
        let rows = rows(bench);
        let note = match bench {
            Bench::Pixels => pixels_note::write(&rows),
            Bench::Handoff => handoff_note::write(&rows),
            Bench::Index => index_note::write(&rows),
            Bench::Door => door_note::write(&rows),
            Bench::Stream => stream_note::write(&rows),
            Bench::Processor => processor_note::write(&rows),
            Bench::Serve => serve_note::write(&rows),
            Bench::Machines => machines_note::write(&rows),
            Bench::Roles => roles_note::write(&rows),
            Bench::Upstream => upstream_note::write(&rows),
        };
        let committed = fs::read_to_string(file(bench, "md")).unwrap();
        for (number, (made, found)) in note.lines().zip(committed.lines()).enumerate() {
            assert_eq!(made, found, "{}.md, line {}", bench.name(), number + 1);
        }
        assert_eq!(note.lines().count(), committed.lines().count(), "{}.md", bench.name());
    }
}

#[test]
fn no_bench_may_end_without_any_of_its_mandatory_rows() {
    for bench in BENCHES {
        let (all, mandatory) = (rows(bench), bench.mandatory());
        assert_eq!(missing(&all, mandatory), [""; 0]);
        for it in mandatory {
            for (case, (metric, peer)) in it.cases.iter().flat_map(|case| it.lines.iter().map(move |line| (case, line)))
            {
                let is = |row: &&Row| row.case == *case && row.metric == *metric && row.peer_name.starts_with(peer);
                let others: Vec<Row> = all.iter().filter(|row| !is(row)).cloned().collect();
                assert_eq!(missing(&others, mandatory), [format!("{case}, {metric}, {peer}")]);
            }
        }
    }
}
