//! The rows of a fleet, made from the values of all measurements.

use peers::row::{Metric, OURS, Row, less, more, neutral};
use serde::Deserialize;

use crate::dynamo::CRATE;

/// The compared metrics, each with the divisor that converts values to the unit.
const METRICS: [(Metric, f64); 13] = [
    (more("events, filling", "M blocks/s"), 1e6),
    (more("events", "M blocks/s"), 1e6),
    (more("events, 2 threads", "M blocks/s"), 1e6),
    (more("events, from frames", "M blocks/s"), 1e6),
    (more("events, from frames, 2 threads", "M blocks/s"), 1e6),
    (more("events, hashed", "M blocks/s"), 1e6),
    (more("lookups", "k prompts/s"), 1e3),
    (more("lookups, 2 threads", "k prompts/s"), 1e3),
    (more("lookups, from tokens", "k prompts/s"), 1e3),
    (less("lookup p50 beside events", "µs"), 1.0),
    (less("lookup p99 beside events", "µs"), 1.0),
    (less("memory", "MB"), 1e6),
    (less("memory, cleared", "MB"), 1e6),
];
/// The metrics of our side alone, with divisors.
const OWN_METRICS: [(Metric, f64); 4] = [
    (neutral("held", "blocks of workers"), 1.0),
    (neutral("memory, own count", "MB"), 1e6),
    (neutral("prompt blocks", "blocks"), 1.0),
    (neutral("prompt workers", "workers"), 1.0),
];
/// Lookups on several threads, with the number of threads.
const SCALING: [(&str, f64); 2] =
    [("lookups alone, 2 threads", 2.0), ("lookups alone, 4 threads", 4.0)];

/// Values by side and metric.
#[derive(Default, Deserialize)]
pub(crate) struct Values(pub(crate) Vec<(String, String, f64)>);

impl Values {
    /// Returns a value; NaN if it was not measured.
    fn get(&self, side: &str, metric: &str) -> f64 {
        let found = self.0.iter().find(|it| it.0 == side && it.1 == metric);
        found.map_or(f64::NAN, |it| it.2)
    }

    /// Returns the rows of a fleet.
    pub(crate) fn rows(&self, case: &str) -> Vec<Row> {
        let ours = |metric: &str| self.get(OURS, metric);
        let own = OWN_METRICS
            .map(|(metric, divisor)| metric.row(case, OURS, ours(metric.name) / divisor, f64::NAN));
        let mut rows = own.to_vec();
        for side in crate::SIDES.into_iter().skip(1) {
            let peer = format!("{side} ({CRATE})");
            let [compared, different] = ["compared", "different"].map(|it| self.get(side, it));
            let equal = Some(compared > 0.0 && different == 0.0);
            let answers = neutral("different answers", "prompts");
            let row = |(metric, divisor): (Metric, f64)| {
                let [ours, theirs] = [OURS, side].map(|it| self.get(it, metric.name) / divisor);
                metric.row(case, &peer, ours, theirs)
            };
            let compared = answers.row(case, &peer, compared, different);
            let side_rows = [compared].into_iter().chain(METRICS.map(row));
            rows.extend(side_rows.map(|row| Row { equal, ..row }));
        }
        // Rates of ours in comparison with other rates of ours.
        for metric in ["frames, own hashes", "frames, twice"] {
            let different = ours(&format!("{metric}, different"));
            let rates = [metric, "frames, plain"].map(|it| ours(it) / 1e6);
            let row = more(metric, "M blocks/s").row(case, "plain", rates[0], rates[1]);
            rows.push(Row { equal: Some(different == 0.0), ..row });
        }
        let lookups = |metric, peer, reference| {
            more(metric, "k prompts/s").row(case, peer, ours(metric) / 1e3, reference / 1e3)
        };
        let one = ours("lookups alone, 1 thread");
        rows.extend(SCALING.map(|(metric, count)| lookups(metric, "one-thread", count * one)));
        let no_events = ours("lookups beside no events");
        rows.push(lookups("lookups beside few events", "no-events", no_events));
        // A side has no values for metrics that it does not support.
        rows.retain(|row| !row.ours.is_nan() && (!row.peer.is_nan() || row.peer_name == OURS));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_compared_with_peers_or_own_references() {
        let values = [
            (OURS, "events", 6e6),
            ("RadixTree", "events", 2e6),
            (OURS, "memory", 1e8),
            ("RadixTree", "memory", 2e8),
            ("RadixTree", "compared", 4096.0),
            ("RadixTree", "different", 3.0),
            (OURS, "frames, plain", 4e6),
            (OURS, "frames, twice", 1e6),
            (OURS, "frames, twice, different", 0.0),
            (OURS, "lookups alone, 1 thread", 2e6),
            (OURS, "lookups alone, 2 threads", 3.6e6),
            (OURS, "held", 1e6),
        ];
        let values = values.map(|(side, metric, value)| (side.into(), metric.into(), value));
        let rows = Values(values.to_vec()).rows("8 workers");
        let found: Vec<_> =
            rows.iter().map(|it| (it.metric, it.ours, it.peer, it.ratio, it.equal)).collect();
        assert!(found[0].0 == "held" && found[0].1 == 1e6 && found[0].2.is_nan());
        let expected = [
            ("different answers", 4096.0, 3.0, Some(false)),
            ("events", 6.0, 2.0, Some(false)),
            ("memory", 100.0, 200.0, Some(false)),
            ("frames, twice", 1.0, 4.0, Some(true)),
            ("lookups alone, 2 threads", 3600.0, 4000.0, None),
        ];
        let without_ratio: Vec<_> = found[1..].iter().map(|it| (it.0, it.1, it.2, it.4)).collect();
        assert_eq!(without_ratio, expected);
        let ratios: Vec<f64> = found[2..].iter().map(|it| it.3).collect();
        assert_eq!(ratios, [3.0, 2.0, 0.25, 0.9]);
    }
}
