//! What every comparison with peers comes out as: rows, one per case, metric and peer.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::error::Error;

/// One comparison. Numbers that could not be had are null, and so is what follows from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
pub(crate) struct Row {
    pub(crate) bench: &'static str,
    pub(crate) case: String,
    pub(crate) metric: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: Option<f64>,
    /// Name and version of the peer.
    pub(crate) peer_name: String,
    pub(crate) peer: Option<f64>,
    /// How many times better we are than a peer; for a floor, which is a limit and no peer, how far we are above it.
    pub(crate) ratio: Option<f64>,
    /// What the ratio has to reach, or for a floor, may not exceed.
    pub(crate) target: Option<f64>,
    /// Whether it does, and the outputs are equal; none without a target.
    pub(crate) ok: Option<bool>,
    /// Whether both sides made the same bits; none where there is nothing to compare.
    pub(crate) equal: Option<bool>,
}

impl Row {
    /// A row of milliseconds without any.
    pub(crate) fn milliseconds(bench: &'static str, case: &str, peer: &str) -> Self {
        Self {
            bench,
            case: case.to_owned(),
            metric: String::new(),
            unit: "ms",
            ours: None,
            peer_name: peer.to_owned(),
            peer: None,
            ratio: None,
            target: None,
            ok: None,
            equal: None,
        }
    }
}

/// Comparisons that a bench must not end without: each line for each case. A bench whose peer did not start, or that skipped a case,
/// would otherwise leave a note that looks complete.
pub(crate) struct Mandatory {
    pub(crate) cases: &'static [&'static str],
    /// Metrics, each with a peer's name without its version.
    pub(crate) lines: &'static [(&'static str, &'static str)],
}

/// Names each mandatory comparison for which no row has both sides' numbers.
pub(crate) fn missing(rows: &[Row], mandatory: &[Mandatory]) -> Vec<String> {
    let is_of = |row: &Row, peer: &str| {
        row.peer_name.strip_prefix(peer).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    };
    let is_there = |case: &str, metric: &str, peer: &str| {
        let mut found = rows.iter().filter(|row| row.case == case && row.metric == metric && is_of(row, peer));
        found.any(|row| row.ours.is_some() && row.peer.is_some())
    };
    let mut missing = Vec::new();
    for Mandatory { cases, lines } in mandatory {
        for case in *cases {
            let absent = lines.iter().filter(|(metric, peer)| !is_there(case, metric, peer));
            missing.extend(absent.map(|(metric, peer)| format!("{case}, {metric}, {peer}")));
        }
    }
    missing
}

/// Whether a bench has measured all that it must not end without.
///
/// # Errors
/// `MissingRows` with all that is not there.
pub(crate) fn complete(bench: &'static str, rows: &[Row], mandatory: &[Mandatory]) -> Result<(), Error> {
    let missing = missing(rows, mandatory);
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Error::MissingRows { bench, rows: missing.join("; ") }),
    }
}

/// Rounds to three decimals, so that files stay readable.
pub(crate) fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

/// One JSON object per row.
pub(crate) fn lines(rows: &[Row]) -> Result<Vec<String>, Error> {
    let line = |row| serde_json::to_string(row).map_err(|source| Error::Json { what: "a row".to_owned(), source });
    rows.iter().map(line).collect()
}

/// Writes an array of all rows, one per line.
pub(crate) fn write(path: &Path, rows: &[Row]) -> Result<(), Error> {
    let text = format!("[\n{}\n]\n", lines(rows)?.join(",\n"));
    fs::write(path, text).map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mandatory_row_is_missing_unless_both_sides_have_a_number() {
        const MANDATORY: [Mandatory; 1] = [Mandatory { cases: &["a", "b"], lines: &[("whole", "memcpy")] }];
        let row = |case, peer, ours| Row {
            metric: "whole".to_owned(),
            ours,
            peer: Some(1.0),
            ..Row::milliseconds("handoff", case, peer)
        };
        let all = [row("a", "memcpy", Some(1.0)), row("b", "memcpy 1.0", Some(1.0))];
        assert!(missing(&all, &MANDATORY).is_empty());
        assert_eq!(missing(&all[..1], &MANDATORY), ["b, whole, memcpy"]);
        let other = [row("a", "memcpy, in turn", Some(1.0)), row("b", "memcpy", None)];
        assert_eq!(missing(&other, &MANDATORY), ["a, whole, memcpy", "b, whole, memcpy"]);
    }

    #[test]
    fn a_file_of_rows_is_json_with_all_keys_in_their_order() {
        let row = Row {
            bench: "pixels",
            case: "c".into(),
            metric: "whole".into(),
            unit: "ms",
            ours: Some(rounded(1.000_46)),
            peer_name: "p 1.0".into(),
            peer: None,
            ratio: None,
            target: Some(2.5),
            ok: Some(false),
            equal: None,
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.json");
        write(&path, &[row.clone(), row]).unwrap();
        let text = fs::read_to_string(path).unwrap();
        let read: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(
            text.lines().nth(2).unwrap(),
            r#"{"bench":"pixels","case":"c","metric":"whole","unit":"ms","ours":1.0,"peer_name":"p 1.0","peer":null,"ratio":null,"target":2.5,"ok":false,"equal":null}"#
        );
    }
}
