//! The runs as a self-contained HTML page, without scripts or other files.

use chiasm_simulate::{Interval, Latency, PolicyReport};
use minijinja::Environment;
use minijinja::value::{Serde, Value};
use serde::Serialize;

use super::Run;
use super::chart::{Chart, Plot, Unit};

const TEMPLATE: &str = include_str!("page.html");

/// The values for the page's template.
#[derive(Serialize)]
struct Page<'a> {
    version: &'static str,
    command: &'a str,
    policies: Vec<&'a str>,
    /// The sections that compare fleet sizes, one per workload; empty with a single size.
    sizes: Vec<Section>,
    runs: Vec<Section>,
}

/// A heading with charts.
#[derive(Serialize)]
struct Section {
    heading: String,
    charts: Vec<Chart>,
    /// The table's rows, one per policy.
    rows: Vec<Vec<String>>,
}

/// Renders the page of the runs of a command line. All runs must have the same policies.
pub(super) fn render(command: &str, runs: &[Run]) -> String {
    let policies = runs
        .first()
        .map(|run| run.reports.iter().map(|report| report.policy).collect())
        .unwrap_or_default();
    let page = Page {
        version: env!("CARGO_PKG_VERSION"),
        command,
        policies,
        sizes: size_sections(runs),
        runs: runs.iter().map(run_section).collect(),
    };
    let mut environment = Environment::new();
    // The extension .html enables escaping.
    let rendered = environment
        .add_template("page.html", TEMPLATE)
        .and_then(|()| environment.get_template("page.html")?.render(Value::from(Serde(&page))));
    // The template is a constant and its values are text and numbers, so rendering can't fail.
    rendered.unwrap_or_else(|error| format!("the page can't be rendered: {error}"))
}

fn run_section(run: &Run) -> Section {
    let latency = |title: &str, part: fn(&Latency) -> f64| {
        time_chart(run, title, Unit::Milliseconds, |interval| interval.ttft_ms.as_ref().map(part))
    };
    let charts = vec![
        latency("Time to first token, median", |ttft| ttft.p50),
        latency("Time to first token, 90 %", |ttft| ttft.p90),
        latency("Time to first token, 99 %", |ttft| ttft.p99),
        time_chart(run, "Prompt tokens found in KV caches", Unit::Fraction, |interval| {
            interval.hit_rate
        }),
        time_chart(
            run,
            "Work of the busiest worker relative to the mean",
            Unit::Ratio,
            |interval| interval.balance,
        ),
        time_chart(run, "Mean share of time that a worker works", Unit::Fraction, |interval| {
            interval.work
        }),
    ];
    Section {
        heading: run.about.clone(),
        charts,
        rows: run.reports.iter().map(table_row).collect(),
    }
}

/// Draws a value of each interval over time. A point is at the middle of its interval.
fn time_chart(run: &Run, title: &str, y: Unit, value: impl Fn(&Interval) -> Option<f64>) -> Chart {
    let line = |report: &PolicyReport| {
        let starts = [0.0].into_iter().chain(report.timeline.iter().map(|interval| interval.end));
        let point =
            |(start, interval): (f64, &Interval)| ((start + interval.end) / 2.0, value(interval));
        starts.zip(&report.timeline).map(point).collect()
    };
    Plot {
        title: title.to_owned(),
        x: Unit::Seconds,
        y,
        // All policies get the same requests at the same times.
        warm_up: run.reports.first().map(|report| report.warm_up_seconds),
        lines: run.reports.iter().map(line).collect(),
    }
    .draw()
}

/// Returns a section for each workload with charts over the size of the fleet.
fn size_sections(runs: &[Run]) -> Vec<Section> {
    let mut sections = Vec::new();
    // Fleets with roles differ in more than their size, so they have no place on the axis.
    let comparable: Vec<&Run> = runs.iter().filter(|run| !run.fleet.has_roles()).collect();
    for workload_runs in
        comparable.chunk_by(|one, next| one.workload == next.workload).filter(|runs| runs.len() > 1)
    {
        let chart = |title: &str, y: Unit, value: fn(&PolicyReport) -> f64| {
            let policies = workload_runs.iter().map(|run| run.reports.len()).min().unwrap_or(0);
            let point = |run: &Run, policy: usize| {
                (run.fleet.total() as f64, Some(value(&run.reports[policy])))
            };
            let line = |policy| workload_runs.iter().map(|run| point(run, policy)).collect();
            let lines = (0..policies).map(line).collect();
            Plot { title: title.to_owned(), x: Unit::Workers, y, warm_up: None, lines }.draw()
        };
        let charts = vec![
            chart("Time to first token, median", Unit::Milliseconds, |report| report.ttft_ms.p50),
            chart("Time to first token, 90 %", Unit::Milliseconds, |report| report.ttft_ms.p90),
            chart("Time to first token, 99 %", Unit::Milliseconds, |report| report.ttft_ms.p99),
            chart("Between two tokens, 90 %", Unit::Milliseconds, |report| report.itl_ms.p90),
            chart("Prompt tokens found in KV caches", Unit::Fraction, |report| report.hit_rate),
            chart("Mean share of time that a worker works", Unit::Fraction, |report| report.work),
        ];
        let heading = format!("{} by the number of workers", workload_runs[0].workload);
        sections.push(Section { heading, charts, rows: Vec::new() });
    }
    sections
}

fn table_row(report: &PolicyReport) -> Vec<String> {
    let PolicyReport { ttft_ms: ttft, itl_ms: itl, .. } = report;
    let times = [ttft.p50, ttft.p90, ttft.p99, itl.p50, itl.p90, itl.p99]
        .map(|time| Unit::Milliseconds.format_value(time));
    let format_fraction = |fraction: Option<f64>| {
        fraction.map_or_else(|| "–".to_owned(), |fraction| Unit::Fraction.format_value(fraction))
    };
    let fractions =
        [Some(report.hit_rate), report.encoder_saved, report.tensors_reused].map(format_fraction);
    let rest = [
        Unit::Ratio.format_value(report.balance),
        format_fraction(Some(report.work)),
        format!("{:.1}", report.requests_per_second),
    ];
    [report.policy.to_owned()].into_iter().chain(times).chain(fractions).chain(rest).collect()
}

#[cfg(test)]
mod tests {
    use chiasm_router::Policy;
    use chiasm_simulate::{Arrivals, Scenario, Source, Workload};
    use chiasm_types::Role;

    use super::*;
    use crate::cli::EngineCounts;

    fn run(workers: u32) -> Run {
        let fleet = EngineCounts::aggregated(workers);
        let scenario = Scenario {
            workers: vec![Role::Aggregated; workers as usize],
            sized_for: 2,
            requests: 200,
            warm_up: 50,
            source: Source::Generated(Workload::SharedImageQa, Default::default()),
            seed: 1,
            engine: Default::default(),
            frontend: Default::default(),
            router: Default::default(),
        };
        let reports = scenario
            .run_all(&[Policy::KvMedia, Policy::RoundRobin], Arrivals::Poisson(20.0), 1)
            .unwrap();
        let workload = "<b>&\"trace\".jsonl".to_owned();
        Run { about: format!("{workload}: {workers} workers"), workload, fleet, reports }
    }

    #[test]
    fn page_is_self_contained_with_escaped_names() {
        let page = render("simulate --trace <script>", &[run(1)]);
        assert!(
            !page.contains("<b>") && page.contains("&lt;b&gt;&amp;&quot;trace&quot;"),
            "{page}"
        );
        assert!(
            !page.contains("<script") && !page.contains("http://") && !page.contains("https://")
        );
        assert!(!page.contains("url(") && !page.contains("src="));
        assert_eq!(page.matches("<figure").count(), 6);
        assert!(!page.contains("by the number of workers"), "a single fleet has no size chart");
    }

    #[test]
    fn fleets_with_roles_are_left_out_of_size_charts() {
        let split = Run { fleet: "prefill=1,decode=1".parse().unwrap(), ..run(2) };
        let page = render("simulate", &[run(1), split]);
        assert!(!page.contains("by the number of workers"), "{page}");
        assert_eq!(page.matches("<figure").count(), 12);
    }

    #[test]
    fn each_policy_has_line_in_each_chart() {
        let page = render("simulate", &[run(1), run(2)]);
        assert_eq!(page.matches("<figure").count(), 18);
        for policy in 0..2 {
            let lines = page.matches(&format!("class=\"of{policy} line{policy}\" d=\"M")).count();
            assert_eq!(lines, 18);
        }
        assert!(
            page.contains("kv+media")
                && page.contains("round-robin")
                && page.contains("by the number of workers")
        );
        assert!(!page.contains("NaN") && !page.contains("inf "));
    }
}
