//! The rows of comparisons with peers: one row per case, metric and peer.

use std::path::Path;
use std::{fs, thread};

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The name of Chiasm's side.
pub(crate) const OURS: &str = "chiasm";
/// The name of a `chiasm` of another commit.
pub(crate) const BASELINE: &str = "chiasm (baseline)";
/// The case of numbers of a whole run.
pub(crate) const RUN: &str = "all";
/// The metric of the load before a run. In its row, `ours` is the average number of running or
/// runnable processes over a minute, and `peer` the number of cores.
pub(crate) const LOAD: &str = "load before";
/// The metric of the cargo profile, whose name is in the row's `unit`.
pub(crate) const PROFILE: &str = "profile";
/// The metric of prompt lengths. In its row, `ours` is the number of compared prompts and `peer`
/// the number of prompts whose lengths differ.
pub(crate) const LENGTHS: &str = "prompts of another length";

/// A comparison. Numbers that were not measured are null, and so are the values derived from them.
///
/// Measuring programs print rows without `bench`, `target` and `ok`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(crate) struct Row {
    #[serde(default)]
    pub(crate) bench: String,
    pub(crate) case: String,
    pub(crate) metric: String,
    pub(crate) unit: String,
    pub(crate) ours: Option<f64>,
    /// The name and version of the peer.
    pub(crate) peer_name: String,
    pub(crate) peer: Option<f64>,
    /// The factor by which Chiasm is better than the peer. For a peer that is a limit, Chiasm's
    /// number as a multiple of the limit.
    pub(crate) ratio: Option<f64>,
    /// The minimum ratio, or for a limit the maximum ratio.
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

/// A target and the rows that it applies to, given by the metric and by prefixes of case and peer.
pub(crate) struct Goal {
    pub(crate) case: &'static str,
    pub(crate) metric: &'static str,
    pub(crate) peer: &'static str,
    pub(crate) target: Target,
}

impl Goal {
    /// Returns the target of the first goal that matches a row.
    pub(crate) fn find(goals: &[Self], row: &Row) -> Option<Target> {
        let is_match = |it: &&Self| {
            row.case.starts_with(it.case)
                && row.metric == it.metric
                && row.peer_name.starts_with(it.peer)
        };
        goals.iter().find(is_match).map(|it| it.target)
    }
}

impl Row {
    /// Creates a row without numbers.
    pub(crate) fn new(case: &str, metric: &str, unit: &str, peer: &str) -> Self {
        let [case, metric, unit, peer_name] = [case, metric, unit, peer].map(str::to_owned);
        Self { case, metric, unit, peer_name, ..Self::default() }
    }

    /// Creates the row of the current load; `None` if the system does not report it.
    pub(crate) fn load() -> Option<Self> {
        let text = fs::read_to_string("/proc/loadavg").ok()?;
        let ours = Some(text.split(' ').next()?.parse().ok()?);
        let peer = Some(thread::available_parallelism().ok()?.get() as f64);
        Some(Self { ours, peer, ..Self::new(RUN, LOAD, "processes", "cores") })
    }

    /// Rounds the numbers and sets `bench`, `target` and `ok`. Unequal outputs reach no target.
    pub(crate) fn with_target(self, bench: &str, target: Option<Target>) -> Self {
        let is_reached = |target| match target {
            Target::AtLeast(target) => self.ratio.is_some_and(|ratio| ratio >= target),
            Target::AtMost(target) => self.ratio.is_some_and(|ratio| ratio <= target),
        };
        let ok = target.map(|target| is_reached(target) && self.equal != Some(false));
        let target = target.map(|(Target::AtLeast(target) | Target::AtMost(target))| target);
        let [ours, peer, ratio, target] =
            [self.ours, self.peer, self.ratio, target].map(|number| number.map(rounded));
        Self { bench: bench.to_owned(), ours, peer, ratio, target, ok, ..self }
    }
}

/// Returns the comparisons of `expected` for which `rows` have no row with the numbers of both
/// sides. Versions of peers may differ.
pub(crate) fn missing<'a>(
    rows: &[Row],
    expected: impl IntoIterator<Item = &'a Row>,
) -> Vec<String> {
    let is_measured = |row: &Row| row.ours.is_some() && row.peer.is_some();
    let is_against = |row: &Row, peer: &str| {
        unversioned(&row.peer_name)
            .strip_prefix(peer)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    };
    let is_missing = |it: &&Row| {
        let peer = unversioned(&it.peer_name);
        !rows.iter().any(|row| {
            row.case == it.case
                && row.metric == it.metric
                && is_measured(row)
                && is_against(row, &peer)
        })
    };
    let expected = expected.into_iter().filter(|it| is_measured(it)).filter(is_missing);
    expected.map(|it| format!("{}, {}, {}", it.case, it.metric, it.peer_name)).collect()
}

/// Returns a peer's name without the numbers of versions.
fn unversioned(name: &str) -> String {
    name.replace(|letter: char| letter.is_ascii_digit() || letter == '.', "").trim_end().to_owned()
}

/// Rounds to three decimals, which keeps files readable.
fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

/// Parses the lines that `what` printed.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(
    what: &str,
    lines: &[String],
) -> Result<Vec<T>, Error> {
    let parsed: Result<_, _> = lines.iter().map(|line| serde_json::from_str(line)).collect();
    parsed.map_err(|source| Error::Json { what: format!("the output of {what}"), source })
}

/// Returns a JSON object per row.
pub(crate) fn lines(rows: &[Row]) -> Result<Vec<String>, Error> {
    let lines: Result<_, _> = rows.iter().map(serde_json::to_string).collect();
    lines.map_err(|source| Error::Json { what: "a row".to_owned(), source })
}

/// Reads the rows of a file; none if there is no file.
pub(crate) fn read(path: &Path) -> Result<Vec<Row>, Error> {
    let Ok(text) = fs::read(path) else { return Ok(Vec::new()) };
    serde_json::from_slice(&text)
        .map_err(|source| Error::Json { what: path.display().to_string(), source })
}

/// Writes a JSON array with a row per line.
pub(crate) fn write(path: &Path, rows: &[Row]) -> Result<(), Error> {
    let text = format!("[\n{}\n]\n", lines(rows)?.join(",\n"));
    fs::write(path, text).map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(case: &str, peer: &str, ours: Option<f64>) -> Row {
        Row { ours, peer: Some(1.0), ..Row::new(case, "whole", "ms", peer) }
    }

    #[test]
    fn target_needs_ratio_with_equal_outputs() {
        let ok = |ratio, equal, target| {
            let row = Row { ratio: Some(ratio), equal, ..row("c", "p", Some(1.0)) };
            row.with_target("b", Some(target)).ok
        };
        assert_eq!(ok(2.0, None, Target::AtLeast(2.0)), Some(true));
        assert_eq!(ok(1.9, Some(true), Target::AtLeast(2.0)), Some(false));
        assert_eq!(ok(2.0, Some(true), Target::AtMost(2.0)), Some(true));
        assert_eq!(ok(2.1, None, Target::AtMost(2.0)), Some(false));
        assert_eq!(ok(3.0, Some(false), Target::AtLeast(2.0)), Some(false));
        let ok = |target| row("c", "p", None).with_target("b", target).ok;
        assert_eq!(ok(Some(Target::AtLeast(2.0))), Some(false));
        assert_eq!(ok(None), None);
    }

    #[test]
    fn row_without_both_numbers_counts_as_missing() {
        let expected = [row("a", "peer 1.0", Some(1.0)), row("b", "peer", Some(1.0))];
        let complete = [row("a", "peer 2.0", Some(1.0)), row("b", "peer without x", Some(1.0))];
        assert!(missing(&complete, &expected).is_empty());
        assert_eq!(missing(&complete[..1], &expected), ["b, whole, peer"]);
        let incomplete = [row("a", "peer, in turn", Some(1.0)), row("b", "peer", None)];
        assert_eq!(missing(&incomplete, &expected), ["a, whole, peer 1.0", "b, whole, peer"]);
        assert!(missing(&[], &incomplete[1..]).is_empty());
    }

    #[test]
    fn rows_are_written_as_json_with_ordered_keys() {
        let row = row("c", "p 1.0", Some(1.000_46));
        let row = row.with_target("pixels", Some(Target::AtLeast(2.5)));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.json");
        write(&path, &[row.clone(), row.clone()]).unwrap();
        assert_eq!(read(&path).unwrap(), [row.clone(), row]);
        assert_eq!(
            fs::read_to_string(path).unwrap().lines().nth(2).unwrap(),
            concat!(
                r#"{"bench":"pixels","case":"c","metric":"whole","unit":"ms","ours":1.0,"#,
                r#""peer_name":"p 1.0","peer":1.0,"ratio":null,"target":2.5,"ok":false,"#,
                r#""equal":null}"#
            )
        );
    }
}
