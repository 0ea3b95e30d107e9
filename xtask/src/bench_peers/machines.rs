//! Turns what the program `door machines` measured into rows, with the targets that the project has
//! set itself.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{self, Measurement, case_name, cases, counts_alike, lengths};
use crate::bench_peers::row::{Mandatory, Row, Target, missing};

/// The bench's name in rows and files.
pub(crate) const BENCH: &str = "machines";
/// A frontend that has attached its engine itself.
pub(crate) const LOCAL: &str = "local engine";
/// How the name of the peer begins.
pub(crate) const DYNAMO: &str = "Dynamo";
/// A call over gRPC that does nothing, with the same certificates.
pub(crate) const ECHO: &str = "null gRPC echo";
/// What sending tensors of an image would take at least: a local engine's time, then that of a bare
/// transfer of their bytes.
pub(crate) const BARE: &str = "local engine, then bare TCP";
/// A frontend that makes the tensors of images itself and sends those.
pub(crate) const TENSORS: &str = "tensors in place of files";
/// A number that is not measured.
const LIMIT: &str = "limit";
/// The ways to an agent.
pub(crate) const LINKS: [&str; 2] = ["loopback", "shaped link"];
/// The program's name of the case whose answers are streamed, and ours.
const STREAMS: (&str, &str) = ("plain", "streams of 256 deltas");
const NEW_IMAGE: &str = "distinct images, data URI";

pub(crate) const CPU: &str = "CPU per request";
pub(crate) const TOKEN_CPU: &str = "CPU per output token";
pub(crate) const LATENCY: &str = "latency p50";
/// What the agent adds to the median, of latencies or, for streams, of the times from the engine to
/// the client.
pub(crate) const ADDED: &str = "added p50";
/// What a frontend sends an agent beside the file of a new image.
pub(crate) const BEYOND: &str = "bytes to the agent beyond the file";
pub(crate) const BACK: &str = "bytes from the agent";
pub(crate) const TRANSFER: &str = "transfer of the tensors";

/// All metrics that sides have in common, with their units, in the order in which the note shows
/// them.
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

/// Most that frontend and agent may spend, in times of a frontend with a local engine.
const CPU_TARGET: f64 = 1.6;
/// Least that Dynamo's frontend spends, in times of frontend and agent.
const DYNAMO_TARGET: f64 = 4.0;
/// Most that an agent may add, in µs more than the null call takes.
const ADDED_TARGET: f64 = 100.0;
/// Least that a new image takes as tensors on the shaped link, in times of what it takes as a file.
const TENSORS_TARGET: f64 = 1.8;
/// Most bytes that a new image may send beyond its file.
const BEYOND_TARGET: f64 = 2_000.0;

/// What each run has to measure on loopback, and on the shaped link too where there is one: see
/// [`missing_on_shaped`].
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
        lines: &[(LATENCY, BARE), (LATENCY, TENSORS), (BEYOND, LIMIT)],
    },
];

/// Names what is mandatory on loopback and missing on the shaped link, unless that was not there at
/// all.
pub(crate) fn missing_on_shaped(rows: &[Row]) -> Vec<String> {
    if !is_shaped(rows) {
        return Vec::new();
    }
    let as_loopback = |row: &Row| {
        let case = row.case.strip_suffix(LINKS[1])?;
        Some(Row { case: format!("{case}{}", LINKS[0]), ..row.clone() })
    };
    let rows: Vec<Row> = rows.iter().filter_map(as_loopback).collect();
    missing(&rows, &MANDATORY).iter().map(|name| name.replace(LINKS[0], LINKS[1])).collect()
}

/// Whether the shaped link was there.
pub(crate) fn is_shaped(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.case.ends_with(LINKS[1]))
}

/// All rows of a run that began under some load.
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

/// What was measured of a case with an agent behind a link.
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
        // Where 16 clients wait for each other, a median tells of the queue.
        if let (Some(added), Some(echo), true) =
            (self.value(&ours, ADDED), echo, self.case != NEW_IMAGE && self.clients != 16)
        {
            let row = self.row(ADDED, "µs", ECHO, [Some(added), Some(echo)]);
            rows.push(row.judged(Some(added / (echo + ADDED_TARGET)), Some(Target::AtMost(1.0))));
        }
        let bare = self.value(&format!("bare TCP, {}", self.link), TRANSFER);
        if let (Some(bare), Some(local), Some(value)) =
            (bare, self.value(LOCAL, LATENCY), self.value(&ours, LATENCY))
        {
            let row = self.row(LATENCY, "ms", BARE, [Some(value), Some(local + bare)]);
            rows.push(row.judged(
                self.value(&ours, "local engine and bare transfer in times of this"),
                None,
            ));
            rows.push(self.row(TRANSFER, "ms", BARE, [None, Some(bare)]));
        }
        let [files, tensors] =
            ["files", "tensors"].map(|form| self.value(&ours, &format!("latency p50 with {form}")));
        if let (Some(files), Some(tensors)) = (files, tensors) {
            let row = self.row(LATENCY, "ms", TENSORS, [Some(files), Some(tensors)]);
            let target = (self.link == LINKS[1]).then_some(Target::AtLeast(TENSORS_TARGET));
            rows.push(row.judged(Some(tensors / files), target));
        }
        if let (Some(beyond), Some(back)) = (self.value(&ours, BEYOND), self.value(&ours, BACK)) {
            let row = self.row(BEYOND, "bytes", LIMIT, [Some(beyond), Some(BEYOND_TARGET)]);
            rows.push(row.judged(Some(beyond / BEYOND_TARGET), Some(Target::AtMost(1.0))));
            rows.push(self.row(BACK, "bytes", LIMIT, [Some(back), None]));
        }
        rows
    }

    /// A row of CPU time with its ratio, which was measured in pairs, and with its target.
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

    /// All that a run measures: an agent costs half of a frontend, Dynamo's frontend three times
    /// both.
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
                    add(agent, BEYOND, 1_000.0);
                    add(agent, BACK, 5_000.0);
                }
            }
        }
        measurements
    }

    #[test]
    fn an_agent_is_held_against_a_local_engine_a_null_call_and_a_peer() {
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
    fn a_new_image_has_a_limit_for_its_bytes_and_on_the_shaped_link_for_its_time() {
        let rows = rows(&measurements(&LINKS), 7, None);
        let beyond = find(&rows, "distinct images, data URI, 1 client, loopback", BEYOND, LIMIT);
        assert_eq!((beyond.ratio, beyond.target, beyond.ok), (Some(0.5), Some(1.0), Some(true)));
        let bare = find(&rows, "distinct images, data URI, 1 client, shaped link", LATENCY, BARE);
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
    fn a_shaped_link_that_was_there_has_to_be_measured_whole() {
        let mut all = rows(&measurements(&LINKS), 7, None);
        assert_eq!((missing(&all, &MANDATORY), missing_on_shaped(&all)), (vec![], vec![]));
        all.retain(|row| row.metric != BEYOND || row.case.ends_with(LINKS[0]));
        let name = format!("distinct images, data URI, 1 client, shaped link, {BEYOND}, limit");
        assert_eq!((missing(&all, &MANDATORY), missing_on_shaped(&all)), (vec![], vec![name]));
        all.retain(|row| row.case.ends_with(LINKS[0]));
        assert!(!is_shaped(&all));
        assert_eq!(missing_on_shaped(&all), [""; 0]);
    }
}
