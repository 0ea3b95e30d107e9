//! Walks the table of steps: a title and a time for each, a stop at the first failure, a summary at the end.
//!
//! Once everything is built, steps with real engines run on a second thread. What they print goes to logs, which are
//! shown when a step fails.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::child::Output;
use crate::error::Error;
use crate::real_engines::Background;
use crate::test_step_run::Performer;
use crate::test_steps::{self, Action, Step};
use crate::versions_page::{self, Passed, Tested};
use crate::workspace::Workspace;

const WITHOUT_ENGINES: &str = "\
!!!
!!!  --no-vllm: THE REAL ENGINES ARE NOT TESTED IN THIS RUN.
!!!  It does not show that a change is good; `cargo xtask test` does.
!!!";

/// What a run is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// The versions of vLLM with whose engines it tests, one after the other.
    pub(crate) versions: Vec<&'static str>,
    /// Keeps what passed, for `docs/versions.md`.
    pub(crate) record: bool,
    /// The version of SGLang that there are tests with, too.
    pub(crate) sglang: Option<&'static str>,
    /// The names of the only steps to run; all steps if there are none.
    pub(crate) steps: Vec<String>,
    /// A step that takes twice its budget fails.
    pub(crate) has_budgets: bool,
}

/// How a step ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed(String),
    LeftOut(&'static str),
}

/// One step that was come to.
#[derive(Debug)]
struct Entry {
    title: &'static str,
    time: Duration,
    budget: Option<Duration>,
    outcome: Outcome,
}

/// Runs all steps that are asked for, those with real engines for each version. Returns `true` if all passed.
pub(crate) fn run(workspace: &Workspace, asked: &Asked) -> Result<bool, Error> {
    let Asked { versions, record, sglang, steps, .. } = asked;
    if !steps.is_empty() {
        let plan = test_steps::named(steps)?;
        let version = versions.first().copied().filter(|_| plan.iter().any(|step| step.has_engines()));
        return Ok(run_plan(workspace, &plan, version, asked)?.is_some());
    }
    let Some((first, others)) = versions.split_first() else {
        println!("{WITHOUT_ENGINES}\n");
        let passed = run_plan(workspace, &test_steps::plan(false, sglang.is_some()), None, asked)?.is_some();
        println!("\n{WITHOUT_ENGINES}");
        return Ok(passed);
    };
    let mut passed = Vec::new();
    let mut run = |plan: &[&'static Step], version| -> Result<(), Error> {
        passed.extend(run_plan(workspace, plan, Some(version), asked)?.map(|entries| tested(version, entries)));
        Ok(())
    };
    run(&test_steps::plan(true, sglang.is_some()), first)?;
    for version in others {
        println!("\n==> vLLM {version}");
        run(&test_steps::engine_steps(), version)?;
    }
    let all = passed.len() == versions.len();
    if *record {
        versions_page::record(workspace, versions, &passed)?;
    }
    Ok(all)
}

/// Returns what a run's steps say of a version: the tests with real engines.
fn tested(version: &str, entries: Vec<Entry>) -> Tested {
    let is_told = |title: &str| {
        test_steps::engine_steps()
            .iter()
            .any(|step| step.title == title && !matches!(step.action, Action::AwaitEngines))
    };
    let steps = entries.into_iter().filter(|entry| is_told(entry.title) && entry.outcome == Outcome::Passed);
    let steps = steps.map(|entry| Passed { title: entry.title.to_owned(), seconds: entry.time.as_secs() });
    Tested { version: version.to_owned(), steps: steps.collect() }
}

/// Runs steps, those with real engines with `version`, and prints how they ended. `None` unless all passed or were left out.
fn run_plan(
    workspace: &Workspace,
    plan: &[&'static Step],
    version: Option<&'static str>,
    asked: &Asked,
) -> Result<Option<Vec<Entry>>, Error> {
    let start = Instant::now();
    let background = version.map(|version| Background::start(workspace, version)).transpose()?;
    let walk = Walk { plan, has_budgets: asked.has_budgets, is_stopped: AtomicBool::new(false) };
    let with_engines: Vec<&'static Step> = plan.iter().copied().filter(|step| step.has_engines()).collect();
    let others: Vec<&'static Step> = plan.iter().copied().filter(|step| !step.has_engines()).collect();
    let build = others.iter().position(|step| step.name == "build").map_or(0, |build| build + 1);
    let (first, rest) = others.split_at(build);

    let mut here = Performer { workspace, background: None, sglang: asked.sglang, output: Output::Terminal };
    let mut entries = walk.steps(first, |step| here.timed(step));
    let logs = logs(&with_engines, rest)?;
    let mut beside = Performer { workspace, background, sglang: asked.sglang, output: Output::Terminal };
    let more = thread::scope(|scope| {
        let engines = scope.spawn(|| {
            walk.steps(&with_engines, |step| match &logs {
                Some(folder) => beside.logged(step, folder.join(step.name).with_extension("log")),
                None => beside.timed(step),
            })
        });
        let mut entries = walk.steps(rest, |step| here.timed(step));
        entries.extend(engines.join().map_err(|_| Error::Panicked)?);
        Ok::<_, Error>(entries)
    })?;
    entries.extend(more);
    let passed =
        entries.len() == plan.len() && !entries.iter().any(|entry| matches!(entry.outcome, Outcome::Failed(_)));
    drop(beside);
    println!("\n{}", summary(plan, &entries, start.elapsed()));
    Ok(passed.then_some(entries))
}

/// Returns the folder for the logs of steps with engines, if other steps run beside them.
fn logs(with_engines: &[&'static Step], others: &[&'static Step]) -> Result<Option<PathBuf>, Error> {
    if with_engines.is_empty() || others.is_empty() {
        return Ok(None);
    }
    let folder = env::temp_dir().join(format!("chiasm-test-{}", std::process::id()));
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    Ok(Some(folder))
}

/// A walk through the steps of a plan, on one thread or two.
struct Walk<'a> {
    plan: &'a [&'static Step],
    has_budgets: bool,
    /// A step has failed, so no other one begins.
    is_stopped: AtomicBool,
}

impl Walk<'_> {
    /// Performs some steps in order until one fails. One that only takes too long does not stop the walk: later steps may
    /// tell more.
    fn steps(&self, steps: &[&'static Step], mut perform: impl FnMut(&Step) -> (Outcome, Duration)) -> Vec<Entry> {
        let mut entries = Vec::new();
        for step in steps {
            if self.is_stopped.load(Ordering::Relaxed) {
                break;
            }
            let number = self.plan.iter().position(|other| other.name == step.name).map_or(0, |at| at + 1);
            announce(number, self.plan.len(), step);
            let (outcome, time) = perform(step);
            let ending = match &outcome {
                Outcome::Passed => String::new(),
                Outcome::Failed(_) => ", failed".to_owned(),
                Outcome::LeftOut(reason) => format!(", left out: {reason}"),
            };
            println!("    {}: {}{ending}", step.title, beside_budget(time, step.budget));
            if matches!(outcome, Outcome::Failed(_)) {
                self.is_stopped.store(true, Ordering::Relaxed);
            }
            let budget = step.budget;
            let outcome = if self.has_budgets { in_time(outcome, time, budget) } else { outcome };
            entries.push(Entry { title: step.title, time, budget, outcome });
        }
        entries
    }
}

/// How much longer than its budget a step may take on a machine that others use too.
const NOISE: u32 = 2;

fn in_time(outcome: Outcome, time: Duration, budget: Option<Duration>) -> Outcome {
    match (outcome, budget) {
        (Outcome::Passed, Some(budget)) if time > budget * NOISE => Outcome::Failed(format!(
            "it took {}, more than {NOISE} times its budget: make it faster, or raise the budget in test_steps.rs and say why",
            beside_budget(time, Some(budget)),
        )),
        (outcome, _) => outcome,
    }
}

/// Returns `true` if a step took a fifth more than its budget.
fn has_grown(entry: &Entry) -> bool {
    entry.budget.is_some_and(|budget| entry.time * 5 > budget * 6)
}

fn beside_budget(time: Duration, budget: Option<Duration>) -> String {
    budget.map_or(readable(time), |budget| format!("{} of {}", readable(time), readable(budget)))
}

fn announce(number: usize, of: usize, step: &Step) {
    let detail = match step.action {
        Action::Cargo(arguments) => format!(": cargo {arguments}"),
        _ => String::new(),
    };
    println!("\n==> {number}/{of} {}{detail}", step.title);
    // Children write to the same place; what is said before them must come out before them. A closed output is their affair.
    let _ = io::stdout().flush();
}

/// The cargo that runs this program, without what it told this program about its own package: build scripts that watch
/// those variables would run again, here and in the next plain build.
pub(crate) fn cargo(workspace: &Workspace) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command.current_dir(&workspace.root).stdin(std::process::Stdio::null());
    command
}

/// A table of all steps, the steps that have grown, the failures if there were any, and the total.
fn summary(plan: &[&Step], entries: &[Entry], total: Duration) -> String {
    let mut lines = Vec::new();
    let width = plan.iter().map(|step| step.title.len()).max().unwrap_or(0);
    let line =
        |title: &str, time: &str, outcome: &str| format!("{title:width$}  {time:>26}  {outcome}").trim_end().to_owned();
    for step in plan {
        lines.push(match entries.iter().find(|entry| entry.title == step.title) {
            Some(entry) => {
                let outcome = match entry.outcome {
                    Outcome::Passed => "passed",
                    Outcome::Failed(_) => "FAILED",
                    Outcome::LeftOut(reason) => reason,
                };
                line(entry.title, &beside_budget(entry.time, entry.budget), outcome)
            }
            None => line(step.title, "", "not run"),
        });
    }
    lines.push(line("total", &readable(total), ""));
    for entry in entries.iter().filter(|entry| has_grown(entry)) {
        let time = beside_budget(entry.time, entry.budget);
        lines.push(format!("\nGROWN: {}: it took {time}, more than a fifth over its budget", entry.title));
    }
    for entry in entries {
        if let Outcome::Failed(reason) = &entry.outcome {
            lines.push(format!("\nFAILED: {}: {reason}", entry.title));
        }
    }
    lines.join("\n")
}

fn readable(time: Duration) -> String {
    match time.as_secs() {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        seconds => format!("{} min {:02} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk<'a>(plan: &'a [&'static Step]) -> Walk<'a> {
        Walk { plan, has_budgets: true, is_stopped: AtomicBool::new(false) }
    }

    #[test]
    fn walk_stops_at_the_first_failure_and_names_it() {
        let plan = test_steps::plan(true, false);
        let mut seen = 0;
        let walk = walk(&plan);
        let entries = walk.steps(&plan, |_| {
            seen += 1;
            let outcome = match seen {
                2 => Outcome::LeftOut("no tool"),
                3 => Outcome::Failed("it broke".into()),
                _ => Outcome::Passed,
            };
            (outcome, Duration::ZERO)
        });
        assert_eq!((seen, entries.len()), (3, 3));
        assert!(walk.steps(&plan, |_| unreachable!()).is_empty(), "steps of the other thread do not begin either");
        let text = summary(&plan, &entries, Duration::from_secs(754));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with("passed"), "{text}");
        assert!(lines[1].ends_with("no tool"), "{text}");
        assert!(lines[2].ends_with("FAILED"), "{text}");
        assert!(lines[3].ends_with("not run"), "{text}");
        assert!(text.contains("12 min 34 s"), "{text}");
        assert!(text.ends_with(&format!("FAILED: {}: it broke", plan[2].title)), "{text}");
    }

    #[test]
    fn step_left_out_does_not_stop_the_walk() {
        let plan = test_steps::plan(false, false);
        let entries = walk(&plan).steps(&plan, |_| (Outcome::LeftOut("no tool"), Duration::ZERO));
        assert_eq!(entries.len(), plan.len());
    }

    /// Walks through a plan whose one step takes so long.
    fn walked(plan: &[&'static Step], name: &str, time: Duration) -> Vec<Entry> {
        let timed = |step: &Step| (Outcome::Passed, if step.name == name { time } else { Duration::ZERO });
        walk(plan).steps(plan, timed)
    }

    #[test]
    fn step_over_twice_its_budget_fails_and_others_follow() {
        let plan = test_steps::plan(true, false);
        let slow = plan.iter().find(|step| step.budget.is_some()).unwrap();
        let budget = slow.budget.unwrap();
        let entries = walked(&plan, slow.name, budget * 2);
        assert!(entries.iter().all(|entry| entry.outcome == Outcome::Passed));
        let entries = walked(&plan, slow.name, budget * 2 + Duration::from_secs(1));
        let failed: Vec<_> = entries.iter().filter(|entry| entry.outcome != Outcome::Passed).collect();
        assert_eq!((entries.len(), failed.len(), failed[0].title), (plan.len(), 1, slow.title));
        let text = summary(&plan, &entries, Duration::ZERO);
        assert!(text.contains(&format!(" of {}  FAILED", readable(budget))), "{text}");
        assert!(text.contains("make it faster"), "{text}");
    }

    #[test]
    fn step_a_fifth_over_its_budget_is_named() {
        let plan = test_steps::plan(true, false);
        let slow = plan.iter().find(|step| step.budget.is_some()).unwrap();
        let grown = slow.budget.unwrap() * 6 / 5;
        let text = |time| summary(&plan, &walked(&plan, slow.name, time), Duration::ZERO);
        assert!(!text(grown).contains("GROWN"));
        let named = text(grown + Duration::from_millis(1));
        assert!(named.contains(&format!("GROWN: {}: it took", slow.title)), "{named}");
    }

    #[test]
    fn step_without_a_budget_takes_any_time() {
        assert_eq!(in_time(Outcome::Passed, Duration::MAX, None), Outcome::Passed);
        assert_eq!(beside_budget(Duration::from_secs(5), None), "5.0 s");
    }

    #[test]
    fn times_are_readable() {
        assert_eq!(readable(Duration::from_millis(840)), "0.8 s");
        assert_eq!(readable(Duration::from_secs(61)), "1 min 01 s");
    }
}
