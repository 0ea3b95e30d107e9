//! Runs steps of the table: prints a title and a time for each, stops at the first failure, and
//! prints a summary.
//!
//! Steps that compile run first, on the main thread. Then steps with real engines run on a second
//! thread, which writes their output to logs and prints the log of a step that fails. When the main
//! thread has run its own steps, it takes steps with real engines too. Without real engines the
//! second thread runs the steps after `tests`.

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
use crate::versions_page::{self, PassedStep, VersionResult};
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
    /// Records the results in `docs/versions.md`.
    pub(crate) record: bool,
    /// The SGLang version to test, if any.
    pub(crate) sglang: Option<&'static str>,
    /// The names of the steps to run; empty for all steps.
    pub(crate) steps: Vec<String>,
    /// Fails a step that takes more than [`MAX_BUDGET_FACTOR`] times its budget.
    pub(crate) enforces_budgets: bool,
}

/// The result of one step.
#[derive(Debug)]
struct StepResult {
    title: &'static str,
    time: Duration,
    budget: Option<Duration>,
    outcome: Outcome,
    /// `true` if the step failed for another reason than its time.
    is_broken: bool,
}

/// Runs the steps of `options`; those with real engines run for each version. Returns `true` if all
/// steps passed.
pub(crate) fn run(workspace: &Workspace, options: &TestOptions) -> Result<bool, Error> {
    let TestOptions { versions, record, sglang, steps, .. } = options;
    let first_plan = if steps.is_empty() {
        test_steps::plan(!versions.is_empty(), sglang.is_some())
    } else {
        test_steps::select(steps)?
    };
    let Some((first, other_versions)) = versions.split_first() else {
        println!("{WITHOUT_ENGINES}\n");
        let passed = run_plan(workspace, &first_plan, None, options)?.is_some();
        println!("\n{WITHOUT_ENGINES}");
        return Ok(passed);
    };
    let mut passed = Vec::new();
    let mut run = |plan: &[&'static Step], version| -> Result<(), Error> {
        let used_version = plan.iter().any(|step| step.needs_vllm()).then_some(version);
        let results = run_plan(workspace, plan, used_version, options)?;
        passed.extend(results.map(|results| version_result(version, results)));
        Ok(())
    };
    run(&first_plan, first)?;
    let is_repeated =
        |step: &&&Step| test_steps::vllm_steps().iter().any(|other| other.name == step.name);
    let repeated: Vec<&'static Step> = first_plan.iter().filter(is_repeated).copied().collect();
    for version in other_versions {
        println!("\n==> vLLM {version}");
        run(&repeated, version)?;
    }
    let all_passed = passed.len() == versions.len();
    if *record && steps.is_empty() {
        versions_page::record(workspace, versions, &passed)?;
    }
    Ok(all_passed)
}

/// Returns the steps with real engines that passed with a version.
fn version_result(version: &str, results: Vec<StepResult>) -> VersionResult {
    let is_listed = |title: &str| {
        test_steps::vllm_steps()
            .iter()
            .any(|step| step.title == title && !matches!(step.action, Action::AwaitEngines))
    };
    let steps = results
        .into_iter()
        .filter(|result| is_listed(result.title) && result.outcome == Outcome::Passed);
    let steps = steps.map(|result| PassedStep {
        title: result.title.to_owned(),
        seconds: result.time.as_secs(),
    });
    VersionResult { version: version.to_owned(), steps: steps.collect() }
}

/// Runs `plan` with the real engines of `version`. Returns `None` if a step failed or was not
/// reached.
fn run_plan(
    workspace: &Workspace,
    plan: &[&'static Step],
    version: Option<&'static str>,
    options: &TestOptions,
) -> Result<Option<Vec<StepResult>>, Error> {
    let start = Instant::now();
    let setup = version.map(|version| EngineSetup::start(workspace, version)).transpose()?;
    let cancel = setup.as_ref().map(EngineSetup::canceller).unwrap_or_default();
    let (mut second_thread_steps, main_steps): (Vec<&'static Step>, Vec<&'static Step>) =
        plan.iter().copied().partition(|step| step.runs_on_second_thread());
    // Steps that compile hold cargo's lock. Tests on the other thread would wait for it.
    let compiling_steps =
        main_steps.iter().rposition(|step| step.compiles()).map_or(0, |last| last + 1);
    let (compiling, testing) = main_steps.split_at(compiling_steps);
    // Without real engines the second thread runs the steps after `tests`.
    let is_shared = second_thread_steps.is_empty() && options.steps.is_empty();
    let (testing, after_tests) =
        testing.split_at(if is_shared { testing.len().min(1) } else { testing.len() });
    second_thread_steps.extend(after_tests);

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
    let mut second_executor = executor(setup.as_ref());
    let logs = if testing.is_empty() { None } else { Some(workspace.root.join("target/xtask")) };
    let waiting = Mutex::new(second_thread_steps.into_iter());
    let next_waiting = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let mut results = run.main_thread(compiling, |step| main_executor.timed(step));
    let later = thread::scope(|scope| {
        let second_thread = scope.spawn(|| {
            run.steps(iter::from_fn(next_waiting), |step| match &logs {
                Some(folder) => second_executor.logged(step, folder),
                None => second_executor.timed(step),
            })
        });
        let mut results = run.main_thread(testing, |step| main_executor.timed(step));
        if logs.is_some() {
            // Both threads take steps until none is left.
            results
                .extend(run.steps(iter::from_fn(next_waiting), |step| main_executor.timed(step)));
        }
        results.extend(second_thread.join().map_err(|_| Error::Panicked)?);
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
    /// `true` after the first failure on the main thread; no further step begins.
    has_failed: AtomicBool,
    /// Cancels the setup of the engines.
    cancel: Cancel,
}

impl Run<'_> {
    /// Runs steps in order on the main thread. A failure ends the run after the step of the other
    /// thread.
    fn main_thread(
        &self,
        steps: &[&'static Step],
        perform: impl FnMut(&Step) -> (Outcome, Duration),
    ) -> Vec<StepResult> {
        let results = self.steps(steps.iter().copied(), perform);
        if results.len() < steps.len() || results.last().is_some_and(|last| last.is_broken) {
            self.has_failed.store(true, Ordering::Relaxed);
            self.cancel.cancel();
        }
        results
    }

    /// Runs steps in order until one fails. The other thread continues. A step that only takes too
    /// long does not stop the steps after it, because their results may explain more.
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
                Outcome::Skipped(reason) => format!(", skipped: {reason}"),
            };
            println!("    {}: {}{ending}", step.title, time_and_budget(time, step.budget));
            let is_broken = matches!(outcome, Outcome::Failed(_));
            let budget = step.budget;
            let outcome =
                if self.enforces_budgets { check_time(outcome, time, budget) } else { outcome };
            results.push(StepResult { title: step.title, time, budget, outcome, is_broken });
            if is_broken {
                break;
            }
        }
        results
    }
}

/// The maximum time of a step as a multiple of its budget, on a machine that is used by others too.
const MAX_BUDGET_FACTOR: u32 = 2;

/// Fails a passed step that took more than [`MAX_BUDGET_FACTOR`] times its budget.
fn check_time(outcome: Outcome, time: Duration, budget: Option<Duration>) -> Outcome {
    match (outcome, budget) {
        (Outcome::Passed, Some(budget)) if time > budget * MAX_BUDGET_FACTOR => {
            Outcome::Failed(format!(
                "it took {}, more than {MAX_BUDGET_FACTOR} times its budget: make it faster, \
             or raise the budget in test_steps.rs and say why",
                time_and_budget(time, Some(budget)),
            ))
        }
        (outcome, _) => outcome,
    }
}

/// Returns `true` if a step took more than its budget and a fifth, and did not fail otherwise.
fn is_slow(result: &StepResult) -> bool {
    !result.is_broken && result.budget.is_some_and(|budget| result.time * 5 > budget * 6)
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
    // The title is printed before the output of the step. The step reports a closed output.
    let _ = io::stdout().flush();
}

/// Returns a table of the steps that ran with the total time, then the steps that did not run, the
/// slow steps and the failures.
fn summary(plan: &[&Step], results: &[StepResult], total: Duration) -> String {
    let mut lines = Vec::new();
    let width = plan.iter().map(|step| step.title.len()).max().unwrap_or(0);
    let line = |title: &str, time: &str, outcome: &str| {
        format!("{title:width$}  {time:>26}  {outcome}").trim_end().to_owned()
    };
    let mut not_run = Vec::new();
    for step in plan {
        let Some(result) = results.iter().find(|result| result.title == step.title) else {
            not_run.push(step.title);
            continue;
        };
        let outcome = match result.outcome {
            Outcome::Passed => "passed",
            Outcome::Failed(_) => "FAILED",
            Outcome::Skipped(reason) => reason,
        };
        lines.push(line(result.title, &time_and_budget(result.time, result.budget), outcome));
    }
    lines.push(line("total", &readable(total), ""));
    if !not_run.is_empty() {
        // One line: a log of which only the end is kept must still show why the step failed.
        lines.push(format!("not run: {}", not_run.join(", ")));
    }
    for result in results.iter().filter(|result| is_slow(result)) {
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
    fn failure_on_main_thread_ends_run() {
        let plan = test_steps::plan(true, false);
        let mut seen = 0;
        let run = run(&plan);
        let results = run.main_thread(&plan, |_| {
            seen += 1;
            let outcome = match seen {
                2 => Outcome::Skipped("no tool"),
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
        assert!(lines[3].contains("12 min 34 s"), "{text}");
        assert!(lines[4].starts_with(&format!("not run: {}, ", plan[3].title)), "{text}");
        assert!(text.ends_with(&format!("FAILED: {}: it broke", plan[2].title)), "{text}");
    }

    #[test]
    fn failure_on_second_thread_lets_main_thread_continue() {
        let plan = test_steps::plan(true, false);
        let run = run(&plan);
        let failed = run
            .steps(plan.iter().copied(), |_| (Outcome::Failed("it broke".into()), Duration::ZERO));
        assert_eq!(failed.len(), 1);
        assert_eq!(run.main_thread(&plan, |_| (Outcome::Passed, Duration::ZERO)).len(), plan.len());
    }

    #[test]
    fn skipped_step_does_not_end_run() {
        let plan = test_steps::plan(false, false);
        let results =
            run(&plan).main_thread(&plan, |_| (Outcome::Skipped("no tool"), Duration::ZERO));
        assert_eq!(results.len(), plan.len());
    }

    /// Runs a plan in which the step `name` takes `time` and all others none.
    fn with_slow_step(plan: &[&'static Step], name: &str, time: Duration) -> Vec<StepResult> {
        let timed =
            |step: &Step| (Outcome::Passed, if step.name == name { time } else { Duration::ZERO });
        run(plan).main_thread(plan, timed)
    }

    #[test]
    fn step_over_twice_its_budget_fails_without_ending_run() {
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
    fn step_over_budget_by_a_fifth_is_reported() {
        let plan = test_steps::plan(true, false);
        let slow = plan.iter().find(|step| step.budget.is_some()).unwrap();
        let limit = slow.budget.unwrap() * 6 / 5;
        let text = |time| summary(&plan, &with_slow_step(&plan, slow.name, time), Duration::ZERO);
        assert!(!text(limit).contains("SLOWER"));
        let over = text(limit + Duration::from_millis(1));
        assert!(over.contains(&format!("SLOWER: {} took", slow.title)), "{over}");
    }

    #[test]
    fn step_without_budget_may_take_any_time() {
        assert_eq!(check_time(Outcome::Passed, Duration::MAX, None), Outcome::Passed);
        assert_eq!(time_and_budget(Duration::from_secs(5), None), "5.0 s");
    }

    #[test]
    fn times_have_readable_units() {
        assert_eq!(readable(Duration::from_millis(840)), "0.8 s");
        assert_eq!(readable(Duration::from_secs(61)), "1 min 01 s");
    }
}
