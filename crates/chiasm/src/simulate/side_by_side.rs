//! Fleets of several shapes that were asked the same, in one table.

use std::fmt::Write as _;

use super::Run;

/// A line for each fleet and policy. `None` where there is nothing to compare: one fleet, or fleets without roles, of which the size is
/// all that differs.
pub(super) fn table(runs: &[Run]) -> Option<String> {
    if runs.len() < 2 || !runs.iter().any(|run| run.fleet.has_roles()) {
        return None;
    }
    let mut text = String::from(
        "| fleet | policy | TTFT p50 | p90 | p99 | ITL p50 | p90 | p99 | hit rate | split | work | requests/s |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    for run in runs {
        for report in &run.reports {
            let (ttft, itl) = (report.ttft_ms, report.itl_ms);
            let times = [ttft.p50, ttft.p90, ttft.p99, itl.p50, itl.p90, itl.p99].map(|time| format!("{time:.1}"));
            // Writing to a string can't fail.
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {:.1} |",
                run.fleet,
                report.policy,
                times.join(" | "),
                percent(report.hit_rate),
                report.split.map_or_else(|| "–".to_owned(), percent),
                percent(report.work),
                report.requests_per_second,
            );
        }
    }
    Some(text)
}
