//! Parses the results that measuring programs print as one JSON object per line.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::bench_peers::row::{OURS, Row};
use crate::error::Error;

/// The metric of prompt lengths. In its row, `ours` is the number of compared prompts and `peer`
/// the number of prompts whose lengths differ.
pub(crate) const DIFFERENT: &str = "prompts of another length";

/// The result of one side for one case.
#[derive(Debug, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) case: String,
    /// The number of concurrent clients; `None` for a value that does not depend on it.
    #[serde(default)]
    pub(crate) clients: Option<u32>,
    pub(crate) side: String,
    pub(crate) metric: String,
    pub(crate) value: f64,
}

/// A metric and its meaning.
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// `None` if neither direction is better.
    pub(crate) more_is_better: Option<bool>,
}

impl Metric {
    /// Returns the factor by which `ours` is better than `theirs`.
    pub(crate) fn ratio(&self, ours: f64, theirs: f64) -> Option<f64> {
        self.more_is_better.map(|more| if more { ours / theirs } else { theirs / ours })
    }
}

/// Parses the lines that `what` printed.
pub(crate) fn parse<T: DeserializeOwned>(what: &str, lines: &[String]) -> Result<Vec<T>, Error> {
    let parsed: Result<_, _> = lines.iter().map(|line| serde_json::from_str(line)).collect();
    parsed.map_err(|source| Error::Json { what: format!("the output of {what}"), source })
}

/// Parses lines of which the first describes the setting of the run.
pub(crate) fn parse_with_head<H: DeserializeOwned, T: DeserializeOwned>(
    what: &str,
    lines: &[String],
) -> Result<(H, Vec<T>), Error> {
    let head = parse(what, &lines[..lines.len().min(1)])?.pop();
    let head =
        head.ok_or_else(|| Error::Unreadable { what: what.to_owned(), printed: String::new() })?;
    Ok((head, parse(what, &lines[1..])?))
}

/// Returns the value of a metric, if it was measured.
pub(crate) fn value(
    measurements: &[Measurement],
    (case, clients): (&str, Option<u32>),
    side: &str,
    metric: &str,
) -> Option<f64> {
    let is_match = |it: &&Measurement| {
        (&*it.case, it.clients, &*it.side, &*it.metric) == (case, clients, side, metric)
    };
    measurements.iter().find(is_match).map(|it| it.value)
}

/// Returns the sides other than Chiasm, in the order of measurements.
pub(crate) fn peers(measurements: &[Measurement]) -> Vec<&str> {
    distinct(measurements.iter().map(|it| &*it.side).filter(|side| *side != OURS))
}

/// Returns the cases with their numbers of concurrent clients, in the order of measurements.
pub(crate) fn cases(measurements: &[Measurement]) -> Vec<(&str, u32)> {
    distinct(measurements.iter().filter_map(|it| Some((&*it.case, it.clients?))))
}

/// Returns the distinct items in the order of their first occurrence.
pub(crate) fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for item in items {
        if !distinct.contains(&item) {
            distinct.push(item);
        }
    }
    distinct
}

/// Creates a row for each case and side whose prompt lengths were compared with those of the first
/// side.
pub(crate) fn lengths(bench: &'static str, measurements: &[Measurement]) -> Vec<Row> {
    let different = measurements.iter().filter(|it| it.metric == "different");
    let row = |it: &Measurement| {
        let compared = value(measurements, (&it.case, None), &it.side, "compared");
        let row = Row::new(bench, &it.case, DIFFERENT, "prompts", &it.side)
            .numbers(compared, Some(it.value));
        Row { equal: Some(it.value == 0.0), ..row }
    };
    different.map(row).collect()
}

/// Returns `true` if a side counted the same prompt tokens as the first side; `None` if they were
/// not compared.
pub(crate) fn counts_alike(measurements: &[Measurement], case: &str, side: &str) -> Option<bool> {
    value(measurements, (case, None), side, "different").map(|different| different == 0.0)
}

/// Returns the name of a case with the number of clients.
pub(crate) fn case_name(case: &str, clients: u32) -> String {
    format!("{case}, {clients} client{}", if clients == 1 { "" } else { "s" })
}

#[cfg(test)]
impl Measurement {
    pub(crate) fn new(
        case: &str,
        clients: Option<u32>,
        side: &str,
        metric: &str,
        value: f64,
    ) -> Self {
        let [case, side, metric] = [case, side, metric].map(str::to_owned);
        Self { case, clients, side, metric, value }
    }
}
