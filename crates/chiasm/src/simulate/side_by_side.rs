//! Fleets of several shapes that were asked the same, in one table.

use std::fmt::Write as _;

use super::Run;

/// A line for each fleet and policy, with what was encoded elsewhere if some engines encode alone.
/// `None` where there is nothing to compare: one fleet, or fleets without roles, of which the size
/// is all that differs.
pub(super) fn table(runs: &[Run]) -> Option<String> {
    if runs.len() < 2 || !runs.iter().any(|run| run.fleet.has_roles()) {
        return None;
    }
    let has_encoders =
        runs.iter().flat_map(|run| &run.reports).any(|report| report.encoded_elsewhere.is_some());
    let (name, line) = if has_encoders { (" encoded elsewhere |", "---|") } else { ("", "") };
    let mut text = format!(
        "| fleet | policy | TTFT p50 | p90 | p99 | ITL p50 | p90 | p99 | hit rate | split |{name} work | requests/s |\n\
         |---|---|---|---|---|---|---|---|---|---|{line}---|---|\n",
    );
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    let maybe = |part: Option<f64>| part.map_or_else(|| "–".to_owned(), percent);
    for run in runs {
        for report in &run.reports {
            let (ttft, itl) = (report.ttft_ms, report.itl_ms);
            let times = [ttft.p50, ttft.p90, ttft.p99, itl.p50, itl.p90, itl.p99]
                .map(|time| format!("{time:.1}"));
            let elsewhere = match has_encoders {
                true => format!(" {} |", maybe(report.encoded_elsewhere)),
                false => String::new(),
            };
            // Writing to a string can't fail.
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} |{elsewhere} {} | {:.1} |",
                run.fleet,
                report.policy,
                times.join(" | "),
                percent(report.hit_rate),
                maybe(report.split),
                percent(report.work),
                report.requests_per_second,
            );
        }
    }
    Some(text)
}
