//! Makes the page `docs/benchmarks/upstream.md` from its rows.

use crate::bench_peers::load;
use crate::bench_peers::measured::distinct;
use crate::bench_peers::page::{
    BY_METRIC, Table, Targets, fill, number, peers, prompts, run_value,
};
use crate::bench_peers::row::{ROUNDS, Row};
use crate::bench_peers::upstream::{
    CACHE_AWARE, CACHED, CONVERSATIONS, CPU, FLOORS, METRICS, SHARED_METRICS, WAYS,
};
use crate::error::Error;

const TARGETS: Targets = Targets {
    heads: "case | against | ours, µs | theirs, µs",
    cells: |row| format!("{} | {}", row.case, row.peer_name),
    is_limit: |row| FLOORS.iter().any(|floor| row.peer_name.starts_with(floor)),
    ..BY_METRIC
};

/// The beginning of the names of cases with shared images.
const SHARED_IMAGES: &str = "shared images, ";

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    // The names of cases without the way.
    let cases = |metric: &str| {
        let rows = rows.iter().filter(|row| row.metric == metric);
        distinct(rows.filter_map(|row| row.case.strip_suffix(WAYS[0].0)))
    };
    let shared_cases = cases(CACHED);
    let shared = SHARED_METRICS.iter().filter(|_| !shared_cases.is_empty());
    let shared = shared.map(|metric| shared_images(rows, &shared_cases, *metric));
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
        ("load", load::sentence(rows)),
        ("targets", TARGETS.table(rows)),
        ("conversations", run_value(rows, CONVERSATIONS)),
        ("shared", shared.collect::<Vec<_>>().join("\n\n")),
        ("cases", cases(CPU).iter().map(|case| table(rows, case)).collect::<Vec<_>>().join("\n\n")),
        ("prompts", prompts(rows)),
    ];
    fill(include_str!("templates/upstream.md"), &values)
}

/// Returns a section with the table of a metric: a line per side and a column per case.
fn shared_images(rows: &[Row], cases: &[&str], (metric, unit): (&str, &str)) -> String {
    let names: Vec<&str> =
        cases.iter().map(|case| case.trim_start_matches(SHARED_IMAGES)).collect();
    let lines = sides(rows, cases[0]).into_iter().filter_map(|side| {
        let values: Vec<_> = cases.iter().map(|case| value(rows, case, side, metric)).collect();
        let cells = cases.iter().zip(&values).map(|(case, value_of_side)| {
            let smg = value(rows, case, CACHE_AWARE, metric).filter(|_| metric == CACHED);
            let points =
                value_of_side.zip(smg).map(|(value, smg)| format!(" ({:+.1})", value - smg));
            format!(" | {}{}", number(*value_of_side), points.unwrap_or_default())
        });
        let line = format!("{side}{}", cells.collect::<String>());
        values.iter().any(Option::is_some).then_some(line)
    });
    let table = Table::new(format_args!("| {}", names.join(" | "))).rows(lines);
    format!("### {metric}, {unit}\n\n{table}")
}

/// Returns a section with the table of a case: a line per side and a column per metric.
fn table(rows: &[Row], case: &str) -> String {
    let is_measured =
        |metric: &str| rows.iter().any(|row| row.case.starts_with(case) && row.metric == metric);
    let metrics: Vec<_> = METRICS.iter().filter(|(metric, _)| is_measured(metric)).collect();
    let heads = metrics.iter().map(|(metric, unit)| format!("| {metric}, {unit}"));
    let table = Table::new(heads.collect::<Vec<_>>().join(" "));
    let table = table.rows(sides(rows, case).into_iter().map(|side| {
        let cells = metrics
            .iter()
            .map(|(metric, _)| format!(" | {}", number(value(rows, case, side, metric))));
        format!("{side}{}", cells.collect::<String>())
    }));
    format!("## {case}\n\n{table}")
}

/// Returns the sides of a case, ours first.
fn sides<'a>(rows: &'a [Row], case: &str) -> Vec<&'a str> {
    let rows_of_case = rows.iter().filter(|row| row.case.strip_suffix(WAYS[0].0) == Some(case));
    WAYS.iter().map(|(_, name)| *name).chain(peers(rows_of_case)).collect()
}

/// Returns a number of the first side whose name starts with `side` in a case.
fn value(rows: &[Row], case: &str, side: &str, metric: &str) -> Option<f64> {
    let ours = WAYS.iter().find(|(_, name)| *name == side);
    let (way, _) = ours.unwrap_or(&WAYS[0]);
    let mut found =
        rows.iter().filter(|row| row.metric == metric && row.case.strip_suffix(way) == Some(case));
    if ours.is_some() {
        return found.next()?.ours;
    }
    found.find(|row| row.peer_name.starts_with(side))?.peer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::upstream::{rows, tests::measurements};

    #[test]
    fn page_shows_targets_sides_cached_tokens() {
        let text = write(&rows(&measurements(0.0), 7, 1_000, None)).unwrap();
        for line in [
            "Medians of 7 rounds, latencies of all rounds together.",
            "| 1k-token text, 16 clients, http | SMG cache_aware 0.1 | 100 | 300 | 3.00 | ≥ 2 | \
             yes |",
            "| 1k-token text, 1 client, vllm+http | Envoy 0.2 | 400 | 50.0 | 8.00 | ≤ 4 | **no** |",
            "1000 conversations about 256 pictures, which Zipf's law makes frequent or rare: a \
             system prompt that all share, a picture, and three",
            "| | conversations, 2 upstreams | conversations, 4 upstreams | single questions, 2 \
             upstreams | single questions, 4 upstreams |",
            "| chiasm, vllm+http | 80.0 (+40.0) | 80.0 (+40.0) | 80.0 (+40.0) | 80.0 (+40.0) |",
            "| one upstream with the memory of all | 40.0 (+0.0) | 40.0 (+0.0) | 40.0 (+0.0) | \
             40.0 (+0.0) |",
            "## repeated image, data URI, 16 clients\n\n| | CPU per request, µs | latency p50, ms \
             |\n|---|---|---|\n| chiasm, http | 100 | 1.00 |",
            "| Dynamo 0.4 | 2000 | 20.0 |",
            "| 1k-token text | nginx 0.3 | 20 | 0 |",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}\n{text}");
        }
        assert_eq!(text.matches("\n## 1k-token text").count(), 5);
    }

    #[test]
    fn different_prompt_lengths_are_shown() {
        let text = write(&rows(&measurements(2.0), 7, 1_000, None)).unwrap();
        assert!(text.contains("**no: other prompts**"), "{text}");
    }
}
