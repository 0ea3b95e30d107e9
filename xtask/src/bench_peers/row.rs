//! What every comparison with peers comes out as: rows, one per case, metric and peer.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::error::Error;

/// One comparison. Numbers that could not be had are null, and so is what follows from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) bench: &'static str,
    pub(crate) case: String,
    pub(crate) metric: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: Option<f64>,
    /// With its version.
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

/// To three decimals, so that files stay readable.
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
