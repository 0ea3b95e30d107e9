//! Tests of the files in `docs/benchmarks`: pages match their rows, and no mandatory row is
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
fn committed_page_matches_committed_rows() {
    for bench in Bench::ALL {
        let rows = rows(bench);
        let page = bench.page(&rows).unwrap();
        let committed = fs::read_to_string(file(bench, "md")).unwrap();
        for (number, (expected, found)) in page.lines().zip(committed.lines()).enumerate() {
            assert_eq!(expected, found, "{}.md, line {}", bench.name(), number + 1);
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
fn missing_mandatory_row_is_reported() {
    for bench in Bench::ALL {
        let rows = rows(bench);
        let mandatory = bench.mandatory();
        assert_eq!(missing(&rows, mandatory), [""; 0]);
        for (case, metric, peer) in mandatory.iter().flat_map(Mandatory::comparisons) {
            let is_match = |row: &&Row| {
                row.case == case && row.metric == metric && row.peer_name.starts_with(peer)
            };
            let others: Vec<Row> = rows.iter().filter(|row| !is_match(row)).cloned().collect();
            assert_eq!(missing(&others, mandatory), [format!("{case}, {metric}, {peer}")]);
        }
    }
}
