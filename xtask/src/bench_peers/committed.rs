//! Tests of what lies in `docs/benchmarks`: rows and notes belong together, and no mandatory row is
//! missing.

use std::fs;
use std::path::PathBuf;

use crate::bench_peers::row::{Mandatory, Row, missing};
use crate::bench_peers::{Bench, RESULTS};

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
    for bench in Bench::ALL {
        let rows = rows(bench);
        let page = bench.page(&rows).unwrap();
        let committed = fs::read_to_string(file(bench, "md")).unwrap();
        for (number, (made, found)) in page.lines().zip(committed.lines()).enumerate() {
            assert_eq!(made, found, "{}.md, line {}", bench.name(), number + 1);
        }
        assert!(
            page == committed,
            "{}.md: {} bytes, {} are committed",
            bench.name(),
            page.len(),
            committed.len()
        );
    }
}

#[test]
fn no_bench_may_end_without_any_of_its_mandatory_rows() {
    for bench in Bench::ALL {
        let all = rows(bench);
        let mandatory = bench.mandatory();
        assert_eq!(missing(&all, mandatory), [""; 0]);
        for (case, metric, peer) in mandatory.iter().flat_map(Mandatory::comparisons) {
            let is = |row: &&Row| {
                row.case == case && row.metric == metric && row.peer_name.starts_with(peer)
            };
            let others: Vec<Row> = all.iter().filter(|row| !is(row)).cloned().collect();
            assert_eq!(missing(&others, mandatory), [format!("{case}, {metric}, {peer}")]);
        }
    }
}
