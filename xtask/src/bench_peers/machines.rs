//! Converts the results of the program `door machines` to rows, with the project's targets.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{self, Measurement, case_name, cases, counts_alike, lengths};
use crate::bench_peers::row::{Mandatory, Row, Target, missing};

/// The name of the benchmark in rows and files.
pub(crate) const BENCH: &str = "machines";
/// The name of the side whose frontend is attached to an engine on the same machine.
pub(crate) const LOCAL: &str = "local engine";
/// The beginning of the name of the peer.
pub(crate) const DYNAMO: &str = "Dynamo";
/// The name of an empty gRPC call with the same certificates.
pub(crate) const ECHO: &str = "null gRPC echo";
/// The name of the lower limit for sending the tensors of an image: the time of a local engine plus
/// the time of a plain transfer of the same number of bytes.
pub(crate) const LOCAL_THEN_TCP: &str = "local engine, then bare TCP";
/// The name of the side whose frontend makes the tensors of images and sends them.
pub(crate) const TENSORS: &str = "tensors in place of files";
/// The name of a fixed limit, which is not measured.
const LIMIT: &str = "limit";
/// The links between frontend and agent.
pub(crate) const LINKS: [&str; 2] = ["loopback", "shaped link"];
/// The name of the case of streamed answers in the program's output, and in rows.
const STREAMS: (&str, &str) = ("plain", "streams of 256 deltas");
const NEW_IMAGE: &str = "distinct images, data URI";

pub(crate) const CPU: &str = "CPU per request";
pub(crate) const TOKEN_CPU: &str = "CPU per output token";
pub(crate) const LATENCY: &str = "latency p50";
/// The metric of what the agent adds to the median latency, or for streams to the median time from
/// engine to client.
pub(crate) const ADDED: &str = "added p50";
/// The metric of the bytes that a frontend sends an agent in addition to the file of a new image.
pub(crate) const EXTRA_BYTES: &str = "bytes to the agent beyond the file";
pub(crate) const RETURNED_BYTES: &str = "bytes from the agent";
pub(crate) const TRANSFER: &str = "transfer of the tensors";

/// The metrics of all sides with their units, in the order of the page.
pub(crate) const METRICS: [(&str, &str); 11] = [
    (CPU, "ms"),
    (TOKEN_CPU, "µs"),
    ("frontend's part of the CPU", "%"),
    ("requests per second", "requests/s"),
    ("output tokens per second", "tokens/s"),
    (LATENCY, "ms"),
    ("latency p99", "ms"),
    ("engine to client p50", "µs"),
    ("engine to client p99", "µs"),
    ("engines", "cores"),
    ("load generator", "cores"),
];

/// The maximum CPU time of frontend and agent, as a multiple of a frontend with a local engine.
const CPU_TARGET: f64 = 1.6;
/// The minimum CPU time of Dynamo's frontend, as a multiple of frontend and agent.
const DYNAMO_TARGET: f64 = 4.0;
/// The maximum time in µs that an agent adds, in addition to the empty call.
const ADDED_LIMIT_US: f64 = 100.0;
/// The minimum latency of a new image sent as tensors on the shaped link, as a multiple of the
/// latency when sent as a file.
const TENSORS_TARGET: f64 = 1.8;
/// The maximum number of bytes that are sent for a new image in addition to its file.
const EXTRA_BYTES_LIMIT: f64 = 2_000.0;

/// The mandatory comparisons on loopback. They are mandatory on the shaped link too if it exists,
/// see [`missing_on_shaped`].
pub(crate) const MANDATORY: [Mandatory; 4] = [
    Mandatory {
        cases: &["1k-token text", "repeated image, data URI", "repeated image, URL"],
        ends: &[", 1 client, loopback"],
        lines: &[(CPU, LOCAL), (CPU, DYNAMO), (ADDED, ECHO)],
    },
    Mandatory {
        cases: &["1k-token text", "repeated image, data URI", "repeated image, URL"],
        ends: &[", 16 clients, loopback"],
        lines: &[(CPU, LOCAL), (CPU, DYNAMO)],
    },
    Mandatory {
        cases: &["streams of 256 deltas, 64 clients, loopback"],
        ends: &[""],
        lines: &[(TOKEN_CPU, LOCAL), (TOKEN_CPU, DYNAMO), (ADDED, ECHO)],
    },
    Mandatory {
        cases: &["distinct images, data URI, 1 client, loopback"],
        ends: &[""],
        lines: &[(LATENCY, LOCAL_THEN_TCP), (LATENCY, TENSORS), (EXTRA_BYTES, LIMIT)],
    },
];

/// Returns the mandatory comparisons that are missing on the shaped link; none if the link was not
/// measured at all.
pub(crate) fn missing_on_shaped(rows: &[Row]) -> Vec<String> {
    if !has_shaped_link(rows) {
        return Vec::new();
    }
    let as_loopback = |row: &Row| {
        let case = row.case.strip_suffix(LINKS[1])?;
        Some(Row { case: format!("{case}{}", LINKS[0]), ..row.clone() })
    };
    let rows: Vec<Row> = rows.iter().filter_map(as_loopback).collect();
    missing(&rows, &MANDATORY).iter().map(|name| name.replace(LINKS[0], LINKS[1])).collect()
}

/// Returns `true` if the shaped link was measured.
pub(crate) fn has_shaped_link(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.case.ends_with(LINKS[1]))
}

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, load: Option<Load>) -> Vec<Row> {
    let mut rows = vec![Row::rounds(BENCH, rounds, LOCAL)];
    rows.extend(load.map(|load| load.row(BENCH)));
    for (case, clients) in cases(measurements) {
        for link in LINKS {
            rows.extend(Case { measurements, case, clients, link }.rows());
        }
    }
    let named = |row: Row| Row { case: name(&row.case).to_owned(), ..row };
    rows.extend(lengths(BENCH, measurements).into_iter().map(named));
    rows
}

/// The measurements of a case with an agent behind a link.
struct Case<'a> {
    measurements: &'a [Measurement],
    case: &'a str,
    clients: u32,
    link: &'a str,
}

impl Case<'_> {
    fn rows(&self) -> Vec<Row> {
        let ours = format!("agent, {}", self.link);
        let is_dynamo = |it: &&Measurement| it.case == self.case && it.side.starts_with(DYNAMO);
        let dynamo = self.measurements.iter().find(is_dynamo).map_or(DYNAMO, |it| &it.side);
        let mut rows = Vec::new();
        for ((metric, unit), peer) in
            METRICS.into_iter().flat_map(|metric| [LOCAL, dynamo].map(|peer| (metric, peer)))
        {
            let Some(value) = self.value(&ours, metric) else { continue };
            let row = self.row(metric, unit, peer, [Some(value), self.value(peer, metric)]);
            rows.push(if [CPU, TOKEN_CPU].contains(&metric) {
                self.judged(row, &ours)
            } else {
                row
            });
        }
        let echo = self.value(&format!("{ECHO}, {}", self.link), "call p50");
        // With 16 clients the median mostly shows the wait in the queue.
        if let (Some(added), Some(echo), true) =
            (self.value(&ours, ADDED), echo, self.case != NEW_IMAGE && self.clients != 16)
        {
            let row = self.row(ADDED, "µs", ECHO, [Some(added), Some(echo)]);
            rows.push(row.judged(Some(added / (echo + ADDED_LIMIT_US)), Some(Target::AtMost(1.0))));
        }
        let bare = self.value(&format!("bare TCP, {}", self.link), TRANSFER);
        if let (Some(bare), Some(local), Some(value)) =
            (bare, self.value(LOCAL, LATENCY), self.value(&ours, LATENCY))
        {
            let row = self.row(LATENCY, "ms", LOCAL_THEN_TCP, [Some(value), Some(local + bare)]);
            rows.push(row.judged(
                self.value(&ours, "local engine and bare transfer in times of this"),
                None,
            ));
            rows.push(self.row(TRANSFER, "ms", LOCAL_THEN_TCP, [None, Some(bare)]));
        }
        let [files, tensors] =
            ["files", "tensors"].map(|form| self.value(&ours, &format!("latency p50 with {form}")));
        if let (Some(files), Some(tensors)) = (files, tensors) {
            let row = self.row(LATENCY, "ms", TENSORS, [Some(files), Some(tensors)]);
            let target = (self.link == LINKS[1]).then_some(Target::AtLeast(TENSORS_TARGET));
            rows.push(row.judged(Some(tensors / files), target));
        }
        let [extra, returned] =
            [EXTRA_BYTES, RETURNED_BYTES].map(|metric| self.value(&ours, metric));
        if let (Some(extra), Some(returned)) = (extra, returned) {
            let numbers = [Some(extra), Some(EXTRA_BYTES_LIMIT)];
            let row = self.row(EXTRA_BYTES, "bytes", LIMIT, numbers);
            rows.push(row.judged(Some(extra / EXTRA_BYTES_LIMIT), Some(Target::AtMost(1.0))));
            rows.push(self.row(RETURNED_BYTES, "bytes", LIMIT, [Some(returned), None]));
        }
        rows
    }

    /// Adds the ratio, which was measured in pairs, and the target to a row of CPU time.
    fn judged(&self, row: Row, ours: &str) -> Row {
        let (ratio, side, target) = if row.peer_name == LOCAL {
            let ratio = self.value(ours, "CPU in times of the local engine's");
            (ratio, ours, Target::AtMost(CPU_TARGET))
        } else {
            let ratio = self.value(ours, "CPU in times of Dynamo's").map(f64::recip);
            (ratio, &*row.peer_name, Target::AtLeast(DYNAMO_TARGET))
        };
        if ratio.is_none() {
            return row;
        }
        let equal = counts_alike(self.measurements, self.case, side);
        Row { equal, ..row }.judged(ratio, (self.case != NEW_IMAGE).then_some(target))
    }

    fn value(&self, side: &str, metric: &str) -> Option<f64> {
        measured::value(self.measurements, (self.case, Some(self.clients)), side, metric)
    }

    fn row(&self, metric: &str, unit: &'static str, peer: &str, numbers: [Option<f64>; 2]) -> Row {
        let case = format!("{}, {}", case_name(name(self.case), self.clients), self.link);
        row(&case, metric, unit, peer).numbers(numbers[0], numbers[1])
    }
}

/// Returns the name of a case in rows.
fn name(case: &str) -> &str {
    if case == STREAMS.0 { STREAMS.1 } else { case }
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::tests::find;

    /// Returns the measurements of a run. An agent costs half of a frontend; Dynamo's frontend
    /// costs three times as much as frontend and agent.
    pub(crate) fn measurements(links: &[&str]) -> Vec<Measurement> {
        let mut measurements = Vec::new();
        let cases: [(&str, &[u32]); 5] = [
            ("1k-token text", &[1, 16]),
            ("repeated image, data URI", &[1, 16]),
            ("repeated image, URL", &[1, 16]),
            (NEW_IMAGE, &[1]),
            (STREAMS.0, &[64]),
        ];
        for (case, clients) in
            cases.into_iter().flat_map(|(case, all)| all.iter().map(move |it| (case, *it)))
        {
            let mut add = |side: &str, metric: &str, value| {
                measurements.push(Measurement::new(case, Some(clients), side, metric, value));
            };
            let agents: Vec<String> = links.iter().map(|link| format!("agent, {link}")).collect();
            let sides = agents
                .iter()
                .map(|agent| (&**agent, 1.5))
                .chain([(LOCAL, 1.0), ("Dynamo 0.1", 4.5)]);
            for (side, cpu) in sides {
                add(side, if case == STREAMS.0 { TOKEN_CPU } else { CPU }, cpu);
                add(side, LATENCY, 2.0 * cpu);
            }
            for (link, agent) in links.iter().zip(&agents) {
                add(agent, "CPU in times of the local engine's", 1.5);
                add(agent, "CPU in times of Dynamo's", 1.0 / 3.0);
                add(agent, ADDED, 300.0);
                add(&format!("{ECHO}, {link}"), "call p50", 50.0);
                if case == NEW_IMAGE {
                    add(&format!("bare TCP, {link}"), TRANSFER, 4.0);
                    add(agent, "local engine and bare transfer in times of this", 1.9);
                    add(agent, "latency p50 with files", 10.0);
                    add(agent, "latency p50 with tensors", 19.0);
                    add(agent, EXTRA_BYTES, 1_000.0);
                    add(agent, RETURNED_BYTES, 5_000.0);
                }
            }
        }
        measurements
    }

    #[test]
    fn agent_is_compared_with_local_engine_null_call_peer() {
        let rows = rows(&measurements(&LINKS), 7, None);
        let local = find(&rows, "1k-token text, 16 clients, loopback", CPU, LOCAL);
        assert_eq!((local.ours, local.peer, local.ratio), (Some(1.5), Some(1.0), Some(1.5)));
        assert_eq!((local.target, local.ok), (Some(1.6), Some(true)));
        let dynamo =
            find(&rows, "streams of 256 deltas, 64 clients, shaped link", TOKEN_CPU, DYNAMO);
        assert_eq!((dynamo.ratio, dynamo.target, dynamo.ok), (Some(3.0), Some(4.0), Some(false)));
        let added = find(&rows, "1k-token text, 1 client, loopback", ADDED, ECHO);
        assert_eq!((added.ratio, added.target, added.ok), (Some(2.0), Some(1.0), Some(false)));
        assert!(!rows.iter().any(|row| row.metric == ADDED && row.case.contains("16 clients")));
    }

    #[test]
    fn new_image_has_limits_for_bytes_with_time_on_shaped_link() {
        let rows = rows(&measurements(&LINKS), 7, None);
        let extra =
            find(&rows, "distinct images, data URI, 1 client, loopback", EXTRA_BYTES, LIMIT);
        assert_eq!((extra.ratio, extra.target, extra.ok), (Some(0.5), Some(1.0), Some(true)));
        let bare = find(
            &rows,
            "distinct images, data URI, 1 client, shaped link",
            LATENCY,
            LOCAL_THEN_TCP,
        );
        assert_eq!(
            (bare.ours, bare.peer, bare.ratio, bare.target),
            (Some(3.0), Some(6.0), Some(1.9), None)
        );
        assert_eq!(
            find(&rows, "distinct images, data URI, 1 client, shaped link", CPU, LOCAL).target,
            None
        );
        let tensors = LINKS.map(|link| {
            let row = find(
                &rows,
                &format!("distinct images, data URI, 1 client, {link}"),
                LATENCY,
                TENSORS,
            );
            (row.ours, row.peer, row.ratio, row.target, row.ok)
        });
        let [ours, peer, ratio] = [10.0, 19.0, 1.9].map(Some);
        assert_eq!(
            tensors,
            [(ours, peer, ratio, None, None), (ours, peer, ratio, Some(1.8), Some(true))]
        );
    }

    #[test]
    fn shaped_link_has_to_be_measured_completely() {
        let mut rows = rows(&measurements(&LINKS), 7, None);
        assert_eq!((missing(&rows, &MANDATORY), missing_on_shaped(&rows)), (vec![], vec![]));
        rows.retain(|row| row.metric != EXTRA_BYTES || row.case.ends_with(LINKS[0]));
        let name =
            format!("distinct images, data URI, 1 client, shaped link, {EXTRA_BYTES}, limit");
        assert_eq!((missing(&rows, &MANDATORY), missing_on_shaped(&rows)), (vec![], vec![name]));
        rows.retain(|row| row.case.ends_with(LINKS[0]));
        assert!(!has_shaped_link(&rows));
        assert_eq!(missing_on_shaped(&rows), [""; 0]);
    }
}
