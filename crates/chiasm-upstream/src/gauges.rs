//! Reads numbers from Prometheus' text format.

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

/// Returns the sum of a gauge over all its series; `None` if the gauge is missing. A server with
/// several engines reports one series per engine.
pub(crate) fn sum(text: &str, name: &str) -> Option<f64> {
    let mut values =
        samples(text).filter(|sample| sample.name == name).map(|sample| sample.value).peekable();
    values.peek().is_some().then(|| values.sum())
}

/// Returns the mean of a gauge over all its series; `None` if the gauge is missing.
pub(crate) fn mean(text: &str, name: &str) -> Option<f64> {
    let count = samples(text).filter(|sample| sample.name == name).count();
    sum(text, name).map(|sum| sum / count as f64)
}

/// Returns the numeric value of a metric's label.
pub(crate) fn label(text: &str, name: &str, label: &str) -> Option<u64> {
    let labels = samples(text).find(|sample| sample.name == name)?.labels;
    let begin = format!("{label}=\"");
    // None of the labels in use has a quote in its value.
    let pair =
        labels.split("\",").find_map(|pair| pair.trim_start_matches(',').strip_prefix(&begin))?;
    pair.trim_end_matches('"').parse().ok()
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
        assert_eq!(
            (sum(TEXT, "a"), mean(TEXT, "a"), sum(TEXT, "plain")),
            (Some(4.0), Some(2.0), Some(7.0))
        );
        assert_eq!((sum(TEXT, "b"), sum(TEXT, "broken"), mean(TEXT, "b")), (None, None, None));
        assert_eq!(label(TEXT, "c:info", "block_size"), Some(16));
        assert_eq!(label(TEXT, "c:info", "num_gpu_blocks"), Some(1024));
        assert_eq!(
            (label(TEXT, "c:info", "size"), label(TEXT, "d", "num"), label(TEXT, "e", "num")),
            (None, None, None)
        );
    }
}
