//! Tests of the files in `docs/benchmarks`: pages match their rows, and a lost row is noticed.

use std::fs;
use std::path::PathBuf;

use crate::bench_peers::row::{self, Row, missing};
use crate::bench_peers::{Bench, DoorSides, RESULTS, door, expected, page, with_targets};

fn file(bench: Bench, extension: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    root.join(RESULTS).join(format!("{}.{extension}", bench.spec().name))
}

fn rows(bench: Bench) -> Vec<Row> {
    let rows = row::read(&file(bench, "json")).unwrap();
    assert!(!rows.is_empty(), "{bench:?}");
    rows
}

#[test]
fn committed_page_matches_committed_rows() {
    for bench in Bench::ALL {
        let page = page::write(bench.spec(), &rows(bench)).unwrap();
        let committed = fs::read_to_string(file(bench, "md")).unwrap();
        for (number, (expected, found)) in page.lines().zip(committed.lines()).enumerate() {
            assert_eq!(expected, found, "{bench:?}, line {}", number + 1);
        }
        assert!(
            page == committed,
            "{bench:?}: {} bytes, {} are committed",
            page.len(),
            committed.len()
        );
    }
}

#[test]
fn committed_rows_have_their_targets() {
    for bench in Bench::ALL {
        let rows = rows(bench);
        for (again, row) in with_targets(bench.spec(), &rows).iter().zip(&rows) {
            assert_eq!(again.target, row.target, "{bench:?}: {row:?}");
        }
    }
}

#[test]
fn lost_row_is_reported() {
    for bench in Bench::ALL {
        let rows = rows(bench);
        let expected = expected(bench.spec(), rows.clone(), &rows, &DoorSides::default());
        assert_eq!(missing(&rows, &expected), [""; 0]);
        let lost = expected.iter().find(|row| row.target.is_some() && row.peer.is_some()).unwrap();
        let rest: Vec<Row> = rows.iter().filter(|row| *row != lost).cloned().collect();
        let name = format!("{}, {}, {}", lost.case, lost.metric, lost.peer_name);
        assert_eq!(missing(&rest, &expected), [name]);
    }
}

#[test]
fn baseline_has_to_be_measured_in_all_cases() {
    let expected = door::baseline_rows(&rows(Bench::Door));
    assert_eq!(expected.len(), 19);
    assert_eq!(missing(&[], &expected).len(), expected.len());
}
