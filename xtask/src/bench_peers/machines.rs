//! The benchmark `machines`: an agent between frontend and engine.

use crate::bench_peers::page::{BY_METRIC, Grid, Table, number, sections};
use crate::bench_peers::row::Target::{AtLeast, AtMost};
use crate::bench_peers::row::{Row, Target};
use crate::bench_peers::runs;
use crate::bench_peers::spec::Spec;

/// The side whose frontend is attached to an engine on the same machine.
const LOCAL: &str = "local engine";
/// The time of a local engine plus the time of a plain transfer of the tensors' bytes, which is the
/// lower limit for sending the tensors of an image.
const LOCAL_THEN_TCP: &str = "local engine, then bare TCP";
/// The side whose frontend makes the tensors of images and sends them.
const TENSORS: &str = "tensors in place of files";
/// An empty gRPC call with the same certificates.
const ECHO: &str = "null gRPC echo";
const DYNAMO: &str = "Dynamo";
/// A fixed limit, which is not measured.
const LIMIT: &str = "limit";
/// The links between frontend and agent. The second one needs root.
const LINKS: [&str; 2] = ["loopback", "shaped link"];

const LATENCY: &str = "latency p50";
const ADDED: &str = "added p50";
const EXTRA_BYTES: &str = "bytes to the agent beyond the file";
const RETURNED_BYTES: &str = "bytes from the agent";
const TRANSFER: &str = "transfer of the tensors";

const NOT_SHAPED: &str =
    "Shaped link: not measured, as it needs root and `ip` and `tc` of iproute2.\n\n";

pub(crate) const SPEC: Spec = Spec {
    name: "machines",
    // A round takes a minute.
    min_rounds: 7,
    has_short_run: true,
    measure: runs::machines,
    target,
    is_optional: |row, rows| is_shaped(row) && !rows.iter().any(is_shaped),
    template: include_str!("templates/machines.md"),
    columns: BY_METRIC,
    values: |rows| {
        let shaped = if rows.iter().any(is_shaped) { "" } else { NOT_SHAPED };
        vec![("shaped", shaped.to_owned()), ("new_image", new_image(rows)), ("cases", cases(rows))]
    },
};

fn is_shaped(row: &Row) -> bool {
    row.case.ends_with(LINKS[1])
}

fn target(row: &Row, _: &[Row]) -> Option<Target> {
    let has_new_image = row.case.starts_with("distinct images");
    match &*row.metric {
        "CPU per request" | "CPU per output token" if !has_new_image => {
            Some(if row.peer_name == LOCAL { AtMost(1.6) } else { AtLeast(4.0) })
        }
        ADDED | EXTRA_BYTES => Some(AtMost(1.0)),
        LATENCY if row.peer_name == TENSORS && is_shaped(row) => Some(AtLeast(1.8)),
        _ => None,
    }
}

/// Returns the table of new images: bytes sent, latency, and the references for the latency.
fn new_image(rows: &[Row]) -> String {
    let line =
        |name: &str, unit: &str, metric: &str, peer: &str, value: fn(&Row) -> Option<f64>| {
            let values = LINKS.map(|link| {
                let row = rows.iter().find(|row| {
                    row.case.ends_with(link) && row.metric == metric && row.peer_name == peer
                });
                number(row.and_then(value))
            });
            format!("{name} | {unit} | {}", values.join(" | "))
        };
    Table::new("| unit | agent, loopback | agent, shaped link").rows([
        line(EXTRA_BYTES, "bytes", EXTRA_BYTES, LIMIT, |row| row.ours),
        line(RETURNED_BYTES, "bytes", RETURNED_BYTES, LIMIT, |row| row.ours),
        line(LATENCY, "ms", LATENCY, LOCAL_THEN_TCP, |row| row.ours),
        line("bare TCP: the bytes of the tensors", "ms", TRANSFER, LOCAL_THEN_TCP, |row| row.peer),
        line(LOCAL_THEN_TCP, "ms", LATENCY, LOCAL_THEN_TCP, |row| row.peer),
        line("the same as a multiple of the latency", "", LATENCY, LOCAL_THEN_TCP, |row| row.ratio),
        line("latency p50, files, beside tensors", "ms", LATENCY, TENSORS, |row| row.ours),
        line("latency p50, tensors, beside files", "ms", LATENCY, TENSORS, |row| row.peer),
        line("tensors as a multiple of files", "", LATENCY, TENSORS, |row| row.ratio),
    ])
}

/// Returns a section for each case with both links: a line per metric and a column per side.
fn cases(rows: &[Row]) -> String {
    let cases = rows.iter().filter(|row| row.metric == LATENCY && row.peer_name == LOCAL);
    sections(cases.filter_map(|row| row.case.strip_suffix(LINKS[0])), |case| {
        let mut grid = Grid::new([LOCAL, "agent, loopback", "agent, shaped link"]);
        for row in rows {
            let Some(link) = row.case.strip_prefix(case) else { continue };
            let is_dynamo = row.peer_name.starts_with(DYNAMO);
            if !LINKS.contains(&link) || !(is_dynamo || [LOCAL, ECHO].contains(&&*row.peer_name)) {
                continue;
            }
            let line = format!("{} | {}", row.metric, row.unit);
            grid.set(&line, &format!("agent, {link}"), number(row.ours));
            if row.peer_name != ECHO {
                grid.set(&line, &row.peer_name, number(row.peer));
            }
        }
        grid.table("| unit", "–")
    })
}
