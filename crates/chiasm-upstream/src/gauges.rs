//! Reads numbers from Prometheus' text format.

use std::collections::BTreeSet;

/// A line with a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample<'a> {
    name: &'a str,
    /// The labels, such as `a="b",c="d"`; may be empty.
    labels: &'a str,
    value: f64,
}

/// Returns the lines with values.
pub(crate) fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let (name, labels, value) = match line.split_once('{') {
            Some((name, rest)) => {
                // Label values may contain spaces.
                let (labels, value) = rest.rsplit_once('}')?;
                (name, labels, value)
            }
            None => {
                let (name, value) = line.split_once(' ')?;
                (name, "", value)
            }
        };
        let value = value.split_whitespace().next()?.parse().ok()?;
        Some(Sample { name, labels, value })
    })
}

impl Sample<'_> {
    /// Returns the numeric value of a label.
    fn label(&self, label: &str) -> Option<u64> {
        let begin = format!("{label}=\"");
        // None of the labels in use has a quote in its value.
        let mut pairs = self.labels.split("\",");
        let pair = pairs.find_map(|pair| pair.trim_start_matches(',').strip_prefix(&begin))?;
        pair.trim_end_matches('"').parse().ok()
    }
}

/// Returns the values of a gauge: of one engine, or of all engines of the server.
fn values(text: &str, name: &str, engine: Option<u64>) -> impl Iterator<Item = f64> {
    samples(text)
        .filter(move |sample| sample.name == name)
        .filter(move |sample| engine.is_none() || sample.label("engine") == engine)
        .map(|sample| sample.value)
}

/// Returns the sum of a gauge over its series; `None` if the gauge is missing. A server with
/// several engines reports one series per engine.
pub(crate) fn sum(text: &str, name: &str, engine: Option<u64>) -> Option<f64> {
    let mut values = values(text, name, engine).peekable();
    values.peek().is_some().then(|| values.sum())
}

/// Returns the mean of a gauge over its series; `None` if the gauge is missing.
pub(crate) fn mean(text: &str, name: &str, engine: Option<u64>) -> Option<f64> {
    let count = values(text, name, engine).count();
    sum(text, name, engine).map(|sum| sum / count as f64)
}

/// Returns the numbers of the engines that report a gauge.
pub(crate) fn engines(text: &str, name: &str) -> BTreeSet<u64> {
    samples(text)
        .filter(|sample| sample.name == name)
        .filter_map(|sample| sample.label("engine"))
        .collect()
}

/// Returns the numeric value of a metric's label.
pub(crate) fn label(text: &str, name: &str, label: &str) -> Option<u64> {
    samples(text).find(|sample| sample.name == name)?.label(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP a A\n# TYPE a gauge\na{engine=\"0\",model_name=\"x y}\"} 3.0\n\
        a{engine=\"1\"} 1e0 1700000000\nplain 7\nbroken{x=\"1\" 2\n\
        c:info{block_size=\"16\",gpu_memory_utilization=\"0.9\",num_gpu_blocks=\"1024\"} 1.0\n\
        d{num=\"None\"} 1\nnan NaN\n";

    #[test]
    fn metrics_are_found_by_name() {
        let sum = |name| sum(TEXT, name, None);
        assert_eq!(
            (sum("a"), mean(TEXT, "a", None), sum("plain")),
            (Some(4.0), Some(2.0), Some(7.0))
        );
        assert_eq!((sum("b"), sum("broken"), mean(TEXT, "b", None)), (None, None, None));
        assert_eq!(label(TEXT, "c:info", "block_size"), Some(16));
        assert_eq!(label(TEXT, "c:info", "num_gpu_blocks"), Some(1024));
        assert_eq!(
            (label(TEXT, "c:info", "size"), label(TEXT, "d", "num"), label(TEXT, "e", "num")),
            (None, None, None)
        );
    }

    #[test]
    fn engines_are_told_apart() {
        assert!(engines(TEXT, "a").into_iter().eq([0, 1]));
        assert_eq!((sum(TEXT, "a", Some(1)), mean(TEXT, "a", Some(0))), (Some(1.0), Some(3.0)));
        assert_eq!(sum(TEXT, "a", Some(2)), None);
        // A series without an engine belongs to none.
        assert_eq!((sum(TEXT, "plain", Some(0)), engines(TEXT, "plain").len()), (None, 0));
    }
}
