//! A table of several fleets under the same workload.

use std::fmt::Write as _;

use super::Run;

/// Returns a table with a line for each fleet and policy. It has a column for items encoded
/// elsewhere if some engines only encode.
///
/// Returns `None` for a single fleet, and for fleets without roles, which only differ in size.
pub(super) fn table(runs: &[Run]) -> Option<String> {
    if runs.len() < 2 || !runs.iter().any(|run| run.fleet.has_roles()) {
        return None;
    }
    let has_encoders =
        runs.iter().flat_map(|run| &run.reports).any(|report| report.encoded_elsewhere.is_some());
    let heading = if has_encoders { " encoded elsewhere |" } else { "" };
    let rule = if has_encoders { "---|" } else { "" };
    let mut text = format!(
        "| fleet | policy | TTFT p50 | p90 | p99 | ITL p50 | p90 | p99 | hit rate | split |\
         {heading} work | requests/s |\n\
         |---|---|---|---|---|---|---|---|---|---|{rule}---|---|\n",
    );
    let percent = |fraction: f64| format!("{:.1} %", 100.0 * fraction);
    let percent_or_dash = |fraction: Option<f64>| fraction.map_or_else(|| "–".to_owned(), percent);
    for run in runs {
        for report in &run.reports {
            let ttft = report.ttft_ms;
            let itl = report.itl_ms;
            let times = [ttft.p50, ttft.p90, ttft.p99, itl.p50, itl.p90, itl.p99]
                .map(|time| format!("{time:.1}"));
            let elsewhere = if has_encoders {
                format!(" {} |", percent_or_dash(report.encoded_elsewhere))
            } else {
                String::new()
            };
            // Writing to a string can't fail.
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} |{elsewhere} {} | {:.1} |",
                run.fleet,
                report.policy,
                times.join(" | "),
                percent(report.hit_rate),
                percent_or_dash(report.split),
                percent(report.work),
                report.requests_per_second,
            );
        }
    }
    Some(text)
}
