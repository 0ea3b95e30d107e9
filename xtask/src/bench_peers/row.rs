//! The rows of comparisons with peers: one row per case, metric and peer.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::error::Error;

/// The metric of the number of rounds behind the medians.
pub(crate) const ROUNDS: &str = "rounds";
/// The name of Chiasm's side.
pub(crate) const OURS: &str = "chiasm";

/// A comparison. Numbers that were not measured are null, and so are the values derived from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
pub(crate) struct Row {
    pub(crate) bench: &'static str,
    pub(crate) case: String,
    pub(crate) metric: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: Option<f64>,
    /// The name and version of the peer.
    pub(crate) peer_name: String,
    pub(crate) peer: Option<f64>,
    /// The factor by which Chiasm is better than the peer. For a floor, which is a limit and not a
    /// peer, Chiasm's number as a multiple of it.
    pub(crate) ratio: Option<f64>,
    /// The minimum ratio, or for a floor the maximum.
    pub(crate) target: Option<f64>,
    /// `true` if the ratio reaches the target and the outputs are equal; `None` without a target.
    pub(crate) ok: Option<bool>,
    /// `true` if both sides have the same output; `None` if there is nothing to compare.
    pub(crate) equal: Option<bool>,
}

/// The minimum or the maximum of a ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
}

impl Row {
    /// Creates a row without numbers.
    pub(crate) fn new(
        bench: &'static str,
        case: &str,
        metric: &str,
        unit: &'static str,
        peer: &str,
    ) -> Self {
        Self {
            bench,
            case: case.to_owned(),
            metric: metric.to_owned(),
            unit,
            ours: None,
            peer_name: peer.to_owned(),
            peer: None,
            ratio: None,
            target: None,
            ok: None,
            equal: None,
        }
    }

    /// Creates the row with the number of rounds of a run.
    pub(crate) fn rounds(bench: &'static str, rounds: u32, peer: &str) -> Self {
        let rounds = Some(f64::from(rounds));
        Self { ours: rounds, peer: rounds, ..Self::new(bench, "all", ROUNDS, "rounds", peer) }
    }

    /// Sets both sides' numbers, rounded.
    pub(crate) fn numbers(self, ours: Option<f64>, peer: Option<f64>) -> Self {
        Self { ours: ours.map(rounded), peer: peer.map(rounded), ..self }
    }

    /// Sets the ratio, the target and `ok`. Unequal outputs reach no target, so `equal` has to be
    /// set before.
    pub(crate) fn judged(self, ratio: Option<f64>, target: Option<Target>) -> Self {
        let is_reached = |target| match target {
            Target::AtLeast(target) => ratio.is_some_and(|ratio| ratio >= target),
            Target::AtMost(target) => ratio.is_some_and(|ratio| ratio <= target),
        };
        let ok = target.map(|target| is_reached(target) && self.equal != Some(false));
        let target =
            target.map(|(Target::AtLeast(target) | Target::AtMost(target))| rounded(target));
        Self { ratio: ratio.map(rounded), target, ok, ..self }
    }
}

/// Comparisons that a run must contain. Without this check, a run in which a peer did not start or
/// a case was skipped would leave a page that looks complete.
pub(crate) struct Mandatory {
    /// The beginnings of the names of cases.
    pub(crate) cases: &'static [&'static str],
    /// The ends of the names of cases, combined with each beginning.
    pub(crate) ends: &'static [&'static str],
    /// The metrics, each with the name of a peer without its version.
    pub(crate) lines: &'static [(&'static str, &'static str)],
}

impl Mandatory {
    /// Returns the case, metric and peer of each comparison.
    pub(crate) fn comparisons(&self) -> impl Iterator<Item = (String, &'static str, &'static str)> {
        let cases = self
            .cases
            .iter()
            .flat_map(|case| self.ends.iter().map(move |end| format!("{case}{end}")));
        cases.flat_map(|case| {
            self.lines.iter().map(move |(metric, peer)| (case.clone(), *metric, *peer))
        })
    }
}

/// Returns the mandatory comparisons for which no row has the numbers of both sides.
pub(crate) fn missing(rows: &[Row], mandatory: &[Mandatory]) -> Vec<String> {
    let is_against = |row: &Row, peer: &str| {
        row.peer_name
            .strip_prefix(peer)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    };
    let is_measured = |case: &str, metric: &str, peer: &str| {
        let mut found = rows
            .iter()
            .filter(|row| row.case == case && row.metric == metric && is_against(row, peer));
        found.any(|row| row.ours.is_some() && row.peer.is_some())
    };
    let absent = mandatory.iter().flat_map(Mandatory::comparisons);
    let absent = absent.filter(|(case, metric, peer)| !is_measured(case, metric, peer));
    absent.map(|(case, metric, peer)| format!("{case}, {metric}, {peer}")).collect()
}

/// Checks that no mandatory comparison is missing.
///
/// # Errors
/// `MissingRows` with all missing comparisons.
pub(crate) fn check_complete(
    bench: &'static str,
    rows: &[Row],
    mandatory: &[Mandatory],
) -> Result<(), Error> {
    let missing = missing(rows, mandatory);
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::MissingRows { bench, rows: missing.join("; ") })
}

/// Rounds to three decimals, which keeps files readable.
pub(crate) fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

/// Returns a JSON object per row.
pub(crate) fn lines(rows: &[Row]) -> Result<Vec<String>, Error> {
    let line = |row| {
        serde_json::to_string(row)
            .map_err(|source| Error::Json { what: "a row".to_owned(), source })
    };
    rows.iter().map(line).collect()
}

/// Writes a JSON array with a row per line.
pub(crate) fn write(path: &Path, rows: &[Row]) -> Result<(), Error> {
    let text = format!("[\n{}\n]\n", lines(rows)?.join(",\n"));
    fs::write(path, text).map_err(Error::io("write", path))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the first row of this case and metric whose peer's name starts with `peer`.
    pub(crate) fn find<'a>(rows: &'a [Row], case: &str, metric: &str, peer: &str) -> &'a Row {
        rows.iter()
            .find(|row| row.case == case && row.metric == metric && row.peer_name.starts_with(peer))
            .unwrap()
    }

    #[test]
    fn row_without_both_numbers_counts_as_missing() {
        const MANDATORY: [Mandatory; 1] =
            [Mandatory { cases: &["a", "b"], ends: &[""], lines: &[("whole", "memcpy")] }];
        let row = |case, peer, ours| {
            Row::new("handoff", case, "whole", "ms", peer).numbers(ours, Some(1.0))
        };
        let complete = [row("a", "memcpy", Some(1.0)), row("b", "memcpy 1.0", Some(1.0))];
        assert!(missing(&complete, &MANDATORY).is_empty());
        assert_eq!(missing(&complete[..1], &MANDATORY), ["b, whole, memcpy"]);
        let incomplete = [row("a", "memcpy, in turn", Some(1.0)), row("b", "memcpy", None)];
        assert_eq!(missing(&incomplete, &MANDATORY), ["a, whole, memcpy", "b, whole, memcpy"]);
    }

    #[test]
    fn rows_are_written_as_json_with_ordered_keys() {
        let row = Row::new("pixels", "c", "whole", "ms", "p 1.0").numbers(Some(1.000_46), None);
        let row = row.judged(None, Some(Target::AtLeast(2.5)));
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
