//! Runs steps of the table: a title and a time for each, a stop at the first failure, a summary at
//! the end.
//!
//! Once everything is compiled, steps with real engines run on a second thread. They print into
//! logs. The log of a step that fails is shown. When the main thread has performed its own steps,
//! it takes steps with real engines, too. Without real engines the second thread performs the steps
//! that follow `tests`.

use std::io::{self, Write};
use std::iter;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::child::{Cancel, Output};
use crate::error::Error;
use crate::outcome::Outcome;
use crate::real_engines::EngineSetup;
use crate::test_step_run::StepExecutor;
use crate::test_steps::{self, Action, Step};
use crate::versions_page::{self, Passed, Tested};
use crate::workspace::Workspace;

const WITHOUT_ENGINES: &str = "\
!!!
!!!  --no-vllm: THE REAL ENGINES ARE NOT TESTED IN THIS RUN.
!!!  It does not show that a change is good; `cargo xtask test` does.
!!!";

/// The options of `cargo xtask test`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TestOptions {
    /// The vLLM versions to test, one after the other.
    pub(crate) versions: Vec<&'static str>,
    /// Records what passed in `docs/versions.md`.
    pub(crate) record: bool,
    /// The SGLang version to test, if any.
    pub(crate) sglang: Option<&'static str>,
    /// The names of the only steps to run; all steps if there are none.
    pub(crate) steps: Vec<String>,
    /// A step that takes twice its budget fails.
    pub(crate) enforces_budgets: bool,
}

/// The result of one step.
#[derive(Debug)]
struct StepResult {
    title: &'static str,
    time: Duration,
    budget: Option<Duration>,
    outcome: Outcome,
    /// It failed, and not only for its time.
    has_broken: bool,
}

/// Runs the steps of `options`, those with real engines for each version. Returns `true` if all
/// passed.
pub(crate) fn run(workspace: &Workspace, options: &TestOptions) -> Result<bool, Error> {
    let TestOptions { versions, record, sglang, steps, .. } = options;
    let first_plan = if steps.is_empty() {
        test_steps::plan(!versions.is_empty(), sglang.is_some())
    } else {
        test_steps::named(steps)?
    };
    let Some((first, others)) = versions.split_first() else {
        println!("{WITHOUT_ENGINES}\n");
        let passed = run_plan(workspace, &first_plan, None, options)?.is_some();
        println!("\n{WITHOUT_ENGINES}");
        return Ok(passed);
    };
    let mut passed = Vec::new();
    let mut run = |plan: &[&'static Step], version| -> Result<(), Error> {
        let version_in_use = plan.iter().any(|step| step.needs_vllm()).then_some(version);
        let results = run_plan(workspace, plan, version_in_use, options)?;
        passed.extend(results.map(|results| tested(version, results)));
        Ok(())
    };
    run(&first_plan, first)?;
    let is_repeated =
        |step: &&&Step| test_steps::engine_steps().iter().any(|other| other.name == step.name);
    let repeated: Vec<&'static Step> = first_plan.iter().filter(is_repeated).copied().collect();
    for version in others {
        println!("\n==> vLLM {version}");
        run(&repeated, version)?;
    }
    let all = passed.len() == versions.len();
    if *record && steps.is_empty() {
        versions_page::record(workspace, versions, &passed)?;
    }
    Ok(all)
}

/// Returns the steps with real engines that passed.
fn tested(version: &str, results: Vec<StepResult>) -> Tested {
    let is_listed = |title: &str| {
        test_steps::engine_steps()
            .iter()
            .any(|step| step.title == title && !matches!(step.action, Action::AwaitEngines))
    };
    let steps = results
        .into_iter()
        .filter(|result| is_listed(result.title) && result.outcome == Outcome::Passed);
    let steps = steps
        .map(|result| Passed { title: result.title.to_owned(), seconds: result.time.as_secs() });
    Tested { version: version.to_owned(), steps: steps.collect() }
}

/// Runs `plan`, its steps with real engines against `version`. Returns `None` if a step failed or
/// did not run.
fn run_plan(
    workspace: &Workspace,
    plan: &[&'static Step],
    version: Option<&'static str>,
    options: &TestOptions,
) -> Result<Option<Vec<StepResult>>, Error> {
    let start = Instant::now();
    let setup = version.map(|version| EngineSetup::start(workspace, version)).transpose()?;
    let cancel = setup.as_ref().map(EngineSetup::canceller).unwrap_or_default();
    let mut beside: Vec<&'static Step> =
        plan.iter().copied().filter(|step| step.is_beside()).collect();
    let main: Vec<&'static Step> = plan.iter().copied().filter(|step| !step.is_beside()).collect();
    // Steps that compile hold cargo's lock, which the tests of the other thread would wait for.
    let compiled = main.iter().rposition(|step| step.compiles()).map_or(0, |last| last + 1);
    let (compiling, testing) = main.split_at(compiled);
    // Without real engines the second thread performs what follows the step `tests`.
    let leaves_others = beside.is_empty() && options.steps.is_empty();
    let (testing, others) =
        testing.split_at(if leaves_others { testing.len().min(1) } else { testing.len() });
    beside.extend(others);

    let run = Run {
        plan,
        enforces_budgets: options.enforces_budgets,
        has_failed: AtomicBool::new(false),
        cancel,
    };
    let executor = |setup| StepExecutor {
        workspace,
        setup,
        sglang: options.sglang,
        output: Output::Inherited,
    };
    let setup = setup.map(Mutex::new);
    let main_executor = executor(setup.as_ref());
    let mut beside_executor = executor(setup.as_ref());
    let logs = if testing.is_empty() { None } else { Some(workspace.root.join("target/xtask")) };
    let waiting = Mutex::new(beside.into_iter());
    let next_beside = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let mut results = run.main_thread(compiling, |step| main_executor.timed(step));
    let later = thread::scope(|scope| {
        let beside = scope.spawn(|| {
            run.steps(iter::from_fn(next_beside), |step| match &logs {
                Some(folder) => beside_executor.logged(step, folder),
                None => beside_executor.timed(step),
            })
        });
        let mut results = run.main_thread(testing, |step| main_executor.timed(step));
        if logs.is_some() {
            // Whichever thread is free takes the next step.
            results.extend(run.steps(iter::from_fn(next_beside), |step| main_executor.timed(step)));
        }
        results.extend(beside.join().map_err(|_| Error::Panicked)?);
        Ok::<_, Error>(results)
    })?;
    results.extend(later);
    println!("\n{}", summary(plan, &results, start.elapsed()));
    let has_failed = results.iter().any(|result| matches!(result.outcome, Outcome::Failed(_)));
    Ok((results.len() == plan.len() && !has_failed).then_some(results))
}

/// A run of a plan on two threads.
struct Run<'a> {
    plan: &'a [&'static Step],
    enforces_budgets: bool,
    /// Set by the first failure on the main thread. No further step begins.
    has_failed: AtomicBool,
    /// Cancels the setup of the engines.
    cancel: Cancel,
}

impl Run<'_> {
    /// Performs steps in order. The first failure ends the run, once the step of the other thread
    /// has ended.
    fn main_thread(
        &self,
        steps: &[&'static Step],
        perform: impl FnMut(&Step) -> (Outcome, Duration),
    ) -> Vec<StepResult> {
        let results = self.steps(steps.iter().copied(), perform);
        if results.len() < steps.len() || results.last().is_some_and(|last| last.has_broken) {
            self.has_failed.store(true, Ordering::Relaxed);
            self.cancel.cancel();
        }
        results
    }

    /// Performs steps in order until one fails, which lets the other thread go on. A step that only
    /// takes too long does not count as failed: later steps may tell more.
    fn steps(
        &self,
        steps: impl Iterator<Item = &'static Step>,
        mut perform: impl FnMut(&Step) -> (Outcome, Duration),
    ) -> Vec<StepResult> {
        let mut results = Vec::new();
        for step in steps {
            if self.has_failed.load(Ordering::Relaxed) {
                break;
            }
            let number =
                self.plan.iter().position(|other| other.name == step.name).map_or(0, |at| at + 1);
            announce(number, self.plan.len(), step);
            let (outcome, time) = perform(step);
            let ending = match &outcome {
                Outcome::Passed => String::new(),
                Outcome::Failed(_) => ", failed".to_owned(),
                Outcome::LeftOut(reason) => format!(", left out: {reason}"),
            };
            println!("    {}: {}{ending}", step.title, time_and_budget(time, step.budget));
            let has_broken = matches!(outcome, Outcome::Failed(_));
            let budget = step.budget;
            let outcome =
                if self.enforces_budgets { in_time(outcome, time, budget) } else { outcome };
            results.push(StepResult { title: step.title, time, budget, outcome, has_broken });
            if has_broken {
                break;
            }
        }
        results
    }
}

/// How much longer than its budget a step may take on a machine that others use too.
const NOISE: u32 = 2;

fn in_time(outcome: Outcome, time: Duration, budget: Option<Duration>) -> Outcome {
    match (outcome, budget) {
        (Outcome::Passed, Some(budget)) if time > budget * NOISE => Outcome::Failed(format!(
            "it took {}, more than {NOISE} times its budget: make it faster, or raise the budget in test_steps.rs and say why",
            time_and_budget(time, Some(budget)),
        )),
        (outcome, _) => outcome,
    }
}

/// Returns `true` if a step passed in more than its budget and a fifth.
fn has_grown(result: &StepResult) -> bool {
    !result.has_broken && result.budget.is_some_and(|budget| result.time * 5 > budget * 6)
}

fn time_and_budget(time: Duration, budget: Option<Duration>) -> String {
    budget.map_or(readable(time), |budget| format!("{} of {}", readable(time), readable(budget)))
}

fn announce(number: usize, total: usize, step: &Step) {
    let detail = match step.action {
        Action::Cargo(arguments) => format!(": cargo {arguments}"),
        _ => String::new(),
    };
    println!("\n==> {number}/{total} {}{detail}", step.title);
    // Before the output of the step itself. A closed output is the step's to report.
    let _ = io::stdout().flush();
}

/// A table of all steps, the steps that have grown, the failures if there were any, and the total.
fn summary(plan: &[&Step], results: &[StepResult], total: Duration) -> String {
    let mut lines = Vec::new();
    let width = plan.iter().map(|step| step.title.len()).max().unwrap_or(0);
    let line = |title: &str, time: &str, outcome: &str| {
        format!("{title:width$}  {time:>26}  {outcome}").trim_end().to_owned()
    };
    for step in plan {
        lines.push(match results.iter().find(|result| result.title == step.title) {
            Some(result) => {
                let outcome = match result.outcome {
                    Outcome::Passed => "passed",
                    Outcome::Failed(_) => "FAILED",
                    Outcome::LeftOut(reason) => reason,
                };
                line(result.title, &time_and_budget(result.time, result.budget), outcome)
            }
            None => line(step.title, "", "not run"),
        });
    }
    lines.push(line("total", &readable(total), ""));
    for result in results.iter().filter(|result| has_grown(result)) {
        let time = time_and_budget(result.time, result.budget);
        lines.push(format!(
            "\nSLOWER: {} took {time}, a fifth over its budget or more",
            result.title
        ));
    }
    for result in results {
        if let Outcome::Failed(reason) = &result.outcome {
            lines.push(format!("\nFAILED: {}: {reason}", result.title));
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

    fn run<'a>(plan: &'a [&'static Step]) -> Run<'a> {
        Run {
            plan,
            enforces_budgets: true,
            has_failed: AtomicBool::new(false),
            cancel: Cancel::default(),
        }
    }

    #[test]
    fn failure_on_the_main_thread_ends_the_run() {
        let plan = test_steps::plan(true, false);
        let mut seen = 0;
        let run = run(&plan);
        let results = run.main_thread(&plan, |_| {
            seen += 1;
            let outcome = match seen {
                2 => Outcome::LeftOut("no tool"),
                3 => Outcome::Failed("it broke".into()),
                _ => Outcome::Passed,
            };
            (outcome, Duration::ZERO)
        });
        assert_eq!((seen, results.len(), run.cancel.check().is_err()), (3, 3, true));
        assert!(run.steps(plan.iter().copied(), |_| unreachable!()).is_empty());
        let text = summary(&plan, &results, Duration::from_secs(754));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with("passed"), "{text}");
        assert!(lines[1].ends_with("no tool"), "{text}");
        assert!(lines[2].ends_with("FAILED"), "{text}");
        assert!(lines[3].ends_with("not run"), "{text}");
        assert!(text.contains("12 min 34 s"), "{text}");
        assert!(text.ends_with(&format!("FAILED: {}: it broke", plan[2].title)), "{text}");
    }

    #[test]
    fn failure_beside_lets_the_main_thread_go_on() {
        let plan = test_steps::plan(true, false);
        let run = run(&plan);
        let failed = run
            .steps(plan.iter().copied(), |_| (Outcome::Failed("it broke".into()), Duration::ZERO));
        assert_eq!(failed.len(), 1);
        assert_eq!(run.main_thread(&plan, |_| (Outcome::Passed, Duration::ZERO)).len(), plan.len());
    }

    #[test]
    fn step_left_out_does_not_end_the_run() {
        let plan = test_steps::plan(false, false);
        let results =
            run(&plan).main_thread(&plan, |_| (Outcome::LeftOut("no tool"), Duration::ZERO));
        assert_eq!(results.len(), plan.len());
    }

    /// Runs a plan in which one step takes this time.
    fn with_slow_step(plan: &[&'static Step], name: &str, time: Duration) -> Vec<StepResult> {
        let timed =
            |step: &Step| (Outcome::Passed, if step.name == name { time } else { Duration::ZERO });
        run(plan).main_thread(plan, timed)
    }

    #[test]
    fn step_over_twice_its_budget_fails_and_others_follow() {
        let plan = test_steps::plan(true, false);
        let slow = plan.iter().find(|step| step.budget.is_some()).unwrap();
        let budget = slow.budget.unwrap();
        let results = with_slow_step(&plan, slow.name, budget * 2);
        assert!(results.iter().all(|result| result.outcome == Outcome::Passed));
        let results = with_slow_step(&plan, slow.name, budget * 2 + Duration::from_secs(1));
        let failed: Vec<_> =
            results.iter().filter(|result| result.outcome != Outcome::Passed).collect();
        assert_eq!((results.len(), failed.len(), failed[0].title), (plan.len(), 1, slow.title));
        let text = summary(&plan, &results, Duration::ZERO);
        assert!(text.contains(&format!(" of {}  FAILED", readable(budget))), "{text}");
        assert!(text.contains("make it faster"), "{text}");
    }

    #[test]
    fn step_a_fifth_over_its_budget_is_named() {
        let plan = test_steps::plan(true, false);
        let slow = plan.iter().find(|step| step.budget.is_some()).unwrap();
        let grown = slow.budget.unwrap() * 6 / 5;
        let text = |time| summary(&plan, &with_slow_step(&plan, slow.name, time), Duration::ZERO);
        assert!(!text(grown).contains("SLOWER"));
        let named = text(grown + Duration::from_millis(1));
        assert!(named.contains(&format!("SLOWER: {} took", slow.title)), "{named}");
    }

    #[test]
    fn step_without_a_budget_takes_any_time() {
        assert_eq!(in_time(Outcome::Passed, Duration::MAX, None), Outcome::Passed);
        assert_eq!(time_and_budget(Duration::from_secs(5), None), "5.0 s");
    }

    #[test]
    fn times_are_readable() {
        assert_eq!(readable(Duration::from_millis(840)), "0.8 s");
        assert_eq!(readable(Duration::from_secs(61)), "1 min 01 s");
    }
}
