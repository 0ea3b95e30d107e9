//! Runs as one page that needs nothing else: no script, no other file.

use chiasm_simulate::{Interval, Latency, PolicyReport};
use minijinja::Environment;
use minijinja::value::{Serde, Value};
use serde::Serialize;

use super::Run;
use super::chart::{Chart, Plot, Unit};

const TEMPLATE: &str = include_str!("page.html");

/// The page.
#[derive(Serialize)]
struct Page<'a> {
    version: &'static str,
    command: &'a str,
    policies: Vec<&'a str>,
    /// Fleets of several sizes beside each other, for each workload; empty if there is one size.
    sizes: Vec<Section>,
    runs: Vec<Section>,
}

/// Charts under a heading.
#[derive(Serialize)]
struct Section {
    heading: String,
    charts: Vec<Chart>,
    /// What each policy came to.
    rows: Vec<Vec<String>>,
}

/// The page of these runs, all of the same policies, which this command line has made.
pub(super) fn page(command: &str, runs: &[Run]) -> String {
    let policies = runs
        .first()
        .map(|run| run.reports.iter().map(|report| report.policy).collect())
        .unwrap_or_default();
    let page = Page {
        version: env!("CARGO_PKG_VERSION"),
        command,
        policies,
        sizes: sizes(runs),
        runs: runs.iter().map(section).collect(),
    };
    let mut environment = Environment::new();
    // By this name the template escapes what it is given.
    let made = environment
        .add_template("page.html", TEMPLATE)
        .and_then(|()| environment.get_template("page.html")?.render(Value::from(Serde(&page))));
    // The template is a constant, and what it is given is text and numbers.
    made.unwrap_or_else(|error| format!("the page can't be made: {error}"))
}

fn section(run: &Run) -> Section {
    let latency = |title: &str, part: fn(&Latency) -> f64| {
        over_time(run, title, Unit::Time, |interval| interval.ttft_ms.as_ref().map(part))
    };
    let charts = vec![
        latency("Time to first token, half of the requests", |ttft| ttft.p50),
        latency("Time to first token, 90 %", |ttft| ttft.p90),
        latency("Time to first token, 99 %", |ttft| ttft.p99),
        over_time(run, "Prompt tokens found in KV caches", Unit::Part, |interval| {
            interval.hit_rate
        }),
        over_time(run, "Work of the busiest worker, times the mean", Unit::Ratio, |interval| {
            interval.balance
        }),
        over_time(run, "Work of a worker, the mean, of its time", Unit::Part, |interval| {
            interval.work
        }),
    ];
    Section { heading: run.about.clone(), charts, rows: run.reports.iter().map(row).collect() }
}

fn over_time(run: &Run, title: &str, y: Unit, value: impl Fn(&Interval) -> Option<f64>) -> Chart {
    let line = |report: &PolicyReport| {
        let begins = [0.0].into_iter().chain(report.timeline.iter().map(|interval| interval.end));
        let middle =
            |(begin, interval): (f64, &Interval)| ((begin + interval.end) / 2.0, value(interval));
        begins.zip(&report.timeline).map(middle).collect()
    };
    Plot {
        title: title.to_owned(),
        x: Unit::Seconds,
        y,
        // All policies are asked the same at the same times.
        warm_up: run.reports.first().map(|report| report.warm_up_seconds),
        lines: run.reports.iter().map(line).collect(),
    }
    .draw()
}

/// What changes with the size of the fleet, for each workload.
fn sizes(runs: &[Run]) -> Vec<Section> {
    let mut sections = Vec::new();
    // What fleets with roles have beside their size is no number on an axis.
    let alike: Vec<&Run> = runs.iter().filter(|run| !run.fleet.has_roles()).collect();
    for of_workload in
        alike.chunk_by(|one, next| one.workload == next.workload).filter(|runs| runs.len() > 1)
    {
        let chart = |title: &str, y: Unit, value: fn(&PolicyReport) -> f64| {
            let policies = of_workload.iter().map(|run| run.reports.len()).min().unwrap_or(0);
            let point = |run: &Run, policy: usize| {
                (run.fleet.total() as f64, Some(value(&run.reports[policy])))
            };
            let line = |policy| of_workload.iter().map(|run| point(run, policy)).collect();
            let lines = (0..policies).map(line).collect();
            Plot { title: title.to_owned(), x: Unit::Workers, y, warm_up: None, lines }.draw()
        };
        let charts = vec![
            chart("Time to first token, half of the requests", Unit::Time, |report| {
                report.ttft_ms.p50
            }),
            chart("Time to first token, 90 %", Unit::Time, |report| report.ttft_ms.p90),
            chart("Time to first token, 99 %", Unit::Time, |report| report.ttft_ms.p99),
            chart("Between two tokens, 90 %", Unit::Time, |report| report.itl_ms.p90),
            chart("Prompt tokens found in KV caches", Unit::Part, |report| report.hit_rate),
            chart("Work of a worker, the mean, of its time", Unit::Part, |report| report.work),
        ];
        let heading = format!("{} by the number of workers", of_workload[0].workload);
        sections.push(Section { heading, charts, rows: Vec::new() });
    }
    sections
}

fn row(report: &PolicyReport) -> Vec<String> {
    let PolicyReport { ttft_ms: ttft, itl_ms: itl, .. } = report;
    let times =
        [ttft.p50, ttft.p90, ttft.p99, itl.p50, itl.p90, itl.p99].map(|time| Unit::Time.long(time));
    let part =
        |part: Option<f64>| part.map_or_else(|| "–".to_owned(), |part| Unit::Part.long(part));
    let parts = [Some(report.hit_rate), report.encoder_saved, report.tensors_reused].map(part);
    let rest = [
        Unit::Ratio.long(report.balance),
        part(Some(report.work)),
        format!("{:.1}", report.requests_per_second),
    ];
    [report.policy.to_owned()].into_iter().chain(times).chain(parts).chain(rest).collect()
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
    fn it_needs_nothing_else_and_names_can_not_break_it() {
        let page = page("simulate --trace <script>", &[run(1)]);
        assert!(
            !page.contains("<b>") && page.contains("&lt;b&gt;&amp;&quot;trace&quot;"),
            "{page}"
        );
        assert!(
            !page.contains("<script") && !page.contains("http://") && !page.contains("https://")
        );
        assert!(!page.contains("url(") && !page.contains("src="));
        assert_eq!(page.matches("<figure").count(), 6);
        assert!(!page.contains("by the number of workers"), "one fleet has one size");
    }

    #[test]
    fn fleets_with_roles_are_no_points_on_an_axis_of_sizes() {
        let split = Run { fleet: "prefill=1,decode=1".parse().unwrap(), ..run(2) };
        let page = page("simulate", &[run(1), split]);
        assert!(!page.contains("by the number of workers"), "{page}");
        assert_eq!(page.matches("<figure").count(), 12);
    }

    #[test]
    fn every_policy_has_its_line_and_its_numbers() {
        let page = page("simulate", &[run(1), run(2)]);
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
