//! Walks the table of steps: a title and a time for each, a stop at the first failure, a summary at the end.
//!
//! Making the vLLM environment is mostly downloading, compiling is mostly the processor: the first starts in
//! the background before the second.

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::bench_peers::door_peers;
use crate::child::{self, Cancel, Output};
use crate::chromium;
use crate::clients_env::{self, ClientsEnv};
use crate::error::Error;
use crate::etcd;
use crate::manifests;
use crate::models;
use crate::plugin;
use crate::prometheus;
use crate::sglang_env;
use crate::test_steps::{self, ARM_TARGET, Action, Needs, Step};
use crate::versions_page::{self, Passed, Tested};
use crate::vllm_drift;
use crate::vllm_env::{self, Setup, VllmEnv};
use crate::vllm_overlay;
use crate::wheel;
use crate::workspace::Workspace;

const WITHOUT_ENGINES: &str = "\
!!!
!!!  --no-vllm: THE REAL ENGINES ARE NOT TESTED IN THIS RUN.
!!!  It does not show that a change is good; `cargo xtask test` does.
!!!";

/// How a step ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
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

/// What the real-engine tests are told.
#[derive(Clone, Debug)]
struct Engines {
    version: &'static str,
    env: VllmEnv,
    models: PathBuf,
    plugin: PathBuf,
    /// Another version, for tests of both together.
    other_version: &'static str,
    other: VllmEnv,
    /// Clients that other people use.
    clients: ClientsEnv,
}

impl Engines {
    fn variables(&self) -> [(&'static str, OsString); 11] {
        [
            ("CHIASM_TEST_OTHER_VLLM_VERSION", self.other_version.into()),
            ("CHIASM_TEST_OTHER_PYTHON", self.other.python().into()),
            ("CHIASM_TEST_VLLM_VERSION", self.version.into()),
            ("CHIASM_TEST_VLLM", self.env.vllm().into()),
            ("CHIASM_TEST_PYTHON", self.env.python().into()),
            // Another version's environment is over the one that has it.
            ("CHIASM_TEST_NIXL", self.env.nixl().or_else(|| self.other.nixl()).unwrap_or_default().into()),
            ("CHIASM_TEST_MODELS", self.models.clone().into()),
            ("CHIASM_TEST_PLUGIN", self.plugin.clone().into()),
            ("CHIASM_TEST_CLIENTS_PYTHON", self.clients.python().into()),
            ("CHIASM_TEST_NODE", self.clients.node().into()),
            ("CHIASM_TEST_NODE_PACKAGES", self.clients.packages().into()),
        ]
    }
}

/// Runs all steps, those with real engines for each of these versions; whether all passed. `record` keeps what passed, for
/// `docs/versions.md`. `sglang` runs those with real SGLang of a version too.
pub(crate) fn run(
    workspace: &Workspace,
    versions: &[&'static str],
    record: bool,
    sglang: Option<&'static str>,
) -> Result<bool, Error> {
    let Some((first, others)) = versions.split_first() else {
        println!("{WITHOUT_ENGINES}\n");
        let passed = run_plan(workspace, &test_steps::plan(false, sglang.is_some()), None, sglang)?.is_some();
        println!("\n{WITHOUT_ENGINES}");
        return Ok(passed);
    };
    let mut passed = Vec::new();
    let mut run = |plan: &[&'static Step], version| -> Result<(), Error> {
        passed.extend(run_plan(workspace, plan, Some(version), sglang)?.map(|entries| tested(version, entries)));
        Ok(())
    };
    run(&test_steps::plan(true, sglang.is_some()), first)?;
    for version in others {
        println!("\n==> vLLM {version}");
        run(&test_steps::engine_steps(), version)?;
    }
    let all = passed.len() == versions.len();
    if record {
        versions_page::record(workspace, versions, &passed)?;
    }
    Ok(all)
}

/// What of a run's steps is told of a version: the tests with real engines.
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

/// Runs steps, with real engines if they are to be of some `version`, and says how they ended. `None` unless all passed or were left
/// out.
fn run_plan(
    workspace: &Workspace,
    plan: &[&'static Step],
    version: Option<&'static str>,
    sglang: Option<&'static str>,
) -> Result<Option<Vec<Entry>>, Error> {
    let start = Instant::now();
    let mut background = version.map(|version| Background::start(workspace, version)).transpose()?;
    let entries = walk(plan, |step| {
        let start = Instant::now();
        (perform(step, workspace, background.as_mut(), sglang), start.elapsed())
    });
    let passed =
        entries.len() == plan.len() && !entries.iter().any(|entry| matches!(entry.outcome, Outcome::Failed(_)));
    drop(background);
    println!("\n{}", summary(plan, &entries, start.elapsed()));
    Ok(passed.then_some(entries))
}

/// Performs the steps in order until one fails. One that only takes too long does not stop it: what comes after may tell more.
fn walk(plan: &[&'static Step], mut perform: impl FnMut(&Step) -> (Outcome, Duration)) -> Vec<Entry> {
    let mut entries = Vec::new();
    for (index, step) in plan.iter().enumerate() {
        announce(index + 1, plan.len(), step);
        let (outcome, time) = perform(step);
        if let Outcome::LeftOut(reason) = outcome {
            println!("    left out: {reason}");
        }
        println!("    {}", beside_budget(time, step.budget));
        let stop = matches!(outcome, Outcome::Failed(_));
        entries.push(Entry {
            title: step.title,
            time,
            budget: step.budget,
            outcome: in_time(outcome, time, step.budget),
        });
        if stop {
            break;
        }
    }
    entries
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

fn beside_budget(time: Duration, budget: Option<Duration>) -> String {
    budget.map_or(readable(time), |budget| format!("{} of {}", readable(time), readable(budget)))
}

fn announce(number: usize, of: usize, step: &Step) {
    let detail = match step.action {
        Action::Cargo(arguments) => format!(": cargo {}", arguments.join(" ")),
        Action::Manifests
        | Action::AwaitEngines
        | Action::PluginTests
        | Action::ProcessorTests
        | Action::Wheel
        | Action::Drift => String::new(),
    };
    println!("\n==> {number}/{of} {}{detail}", step.title);
    // Children write to the same place; what is said before them must come out before them. A closed output is their affair.
    let _ = io::stdout().flush();
}

fn perform(
    step: &Step,
    workspace: &Workspace,
    background: Option<&mut Background>,
    sglang: Option<&'static str>,
) -> Outcome {
    let engines = match background {
        Some(background) if matches!(step.needs, Needs::RealEngines | Needs::RealEnginesAndDynamo) => {
            match background.wait() {
                Ok(engines) => Some(engines),
                Err(error) => return Outcome::Failed(error.to_string()),
            }
        }
        _ => None,
    };
    let arguments = match step.action {
        Action::Cargo(arguments) => arguments,
        Action::Manifests => {
            let setup = Setup { workspace: workspace.clone(), output: Output::Terminal, cancel: Cancel::default() };
            return match manifests::tests(&setup) {
                Ok(mut tests) => outcome(&mut tests, "the manifests' tests"),
                Err(error) => {
                    println!("    {error}");
                    Outcome::LeftOut("there is no Python for it, or its packages can't be fetched")
                }
            };
        }
        Action::AwaitEngines => {
            for (name, value) in engines.iter().flat_map(Engines::variables) {
                println!("    {name}={}", value.display());
            }
            return Outcome::Passed;
        }
        Action::PluginTests => {
            return match engines {
                Some(engines) => outcome(&mut plugin::tests(workspace, &engines.env), "the plugin's tests"),
                None => Outcome::LeftOut("there is no vLLM"),
            };
        }
        Action::ProcessorTests => {
            return match engines {
                Some(engines) => outcome(
                    plugin::processor_tests(workspace, &engines.env).env("CHIASM_TEST_MODELS", &engines.models),
                    "the processor's tests",
                ),
                None => Outcome::LeftOut("there is no vLLM"),
            };
        }
        Action::Wheel => {
            let Some(engines) = engines else { return Outcome::LeftOut("there is no vLLM") };
            return match wheel::tests(workspace, &engines.env, &engines.models) {
                Ok(mut tests) => outcome(&mut tests, "the wheel's tests"),
                Err(error) => Outcome::Failed(error.to_string()),
            };
        }
        Action::Drift => {
            let Some(engines) = engines else { return Outcome::LeftOut("there is no vLLM") };
            let setup = Setup { workspace: workspace.clone(), output: Output::Terminal, cancel: Cancel::default() };
            return match vllm_drift::run(&setup, engines.version, false) {
                Ok(true) => Outcome::Passed,
                Ok(false) => Outcome::Failed("what is relied on has changed, see above".to_owned()),
                Err(error) => Outcome::Failed(error.to_string()),
            };
        }
    };
    if step.needs == Needs::CargoDeny && !has_cargo_deny(workspace) {
        return Outcome::LeftOut("cargo-deny is not installed");
    }
    if step.needs == Needs::ArmTarget && !has_arm_target(workspace) {
        return Outcome::LeftOut("rustup can't fetch the ARM target's standard library");
    }
    let mut cargo = cargo(workspace);
    cargo.args(arguments).envs(step.variables.iter().copied());
    match found(step.needs, workspace) {
        Ok(program) => cargo.envs(program),
        Err(left_out) => return left_out,
    };
    if let (Needs::RealSglang, Some(version)) = (step.needs, sglang) {
        match sglang_variables(workspace, version) {
            Ok(variables) => cargo.envs(variables),
            Err(error) => return Outcome::Failed(error.to_string()),
        };
    }
    if let Some(engines) = engines {
        cargo.envs(engines.variables());
    }
    outcome(&mut cargo, &format!("`cargo {}`", arguments.join(" ")))
}

/// What the tests with real SGLang are told.
fn sglang_variables(workspace: &Workspace, version: &'static str) -> Result<[(&'static str, PathBuf); 2], Error> {
    let setup = Setup { workspace: workspace.clone(), output: Output::Terminal, cancel: Cancel::default() };
    let base = vllm_env::ensure(&setup)?;
    let (env, models) = (sglang_env::ensure(&setup, &base, version)?, models::ensure(&setup, &base)?);
    Ok([("CHIASM_TEST_SGLANG_PYTHON", env.python()), ("CHIASM_TEST_MODELS", models)])
}

/// What a step's tests are told of the programs that they need, if they need any.
fn found(needs: Needs, workspace: &Workspace) -> Result<Vec<(&'static str, PathBuf)>, Outcome> {
    let setup = Setup { workspace: workspace.clone(), output: Output::Terminal, cancel: Cancel::default() };
    let (variable, program, why) = match needs {
        Needs::Etcd => (etcd::VARIABLE, etcd::ensure(&setup), "there is no etcd, and its package can't be unpacked"),
        Needs::Dynamo | Needs::RealEnginesAndDynamo => {
            let mut programs = found(Needs::Etcd, workspace)?;
            let python = door_peers::ensure(&setup).map(|peers| peers.python());
            let dynamo = found_program(door_peers::VARIABLE, python, "Dynamo's packages can't be had")?;
            programs.extend(dynamo);
            return Ok(programs);
        }
        Needs::Chromium => {
            (chromium::VARIABLE, chromium::ensure(&setup), "there is no Chromium, and its package can't be unpacked")
        }
        Needs::Prometheus => {
            let why = "there is no Prometheus, and its package can't be unpacked";
            (prometheus::VARIABLE, prometheus::ensure(&setup), why)
        }
        _ => return Ok(Vec::new()),
    };
    found_program(variable, program, why)
}

fn found_program(
    variable: &'static str,
    program: Result<PathBuf, Error>,
    why: &'static str,
) -> Result<Vec<(&'static str, PathBuf)>, Outcome> {
    program.map(|program| vec![(variable, program)]).map_err(|error| {
        println!("    {error}");
        Outcome::LeftOut(why)
    })
}

fn outcome(command: &mut Command, what: &str) -> Outcome {
    match command.status() {
        Ok(status) if status.success() => Outcome::Passed,
        Ok(status) => Outcome::Failed(format!("{what}: {status}")),
        Err(error) => Outcome::Failed(format!("could not start {what}: {error}")),
    }
}

/// Whether the compiler has the target, by now: rustup is asked to fetch it if it is missing.
fn has_arm_target(workspace: &Workspace) -> bool {
    let mut ask = Command::new("rustc");
    ask.args(["--print", "target-libdir", "--target", ARM_TARGET]).current_dir(&workspace.root);
    if child::read(&mut ask, "rustc").is_ok_and(|folder| Path::new(&folder).is_dir()) {
        return true;
    }
    let mut add = Command::new("rustup");
    add.args(["target", "add", ARM_TARGET]).current_dir(&workspace.root).stdin(Stdio::null());
    add.status().is_ok_and(|status| status.success())
}

fn has_cargo_deny(workspace: &Workspace) -> bool {
    cargo(workspace)
        .args(["deny", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
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
    command.current_dir(&workspace.root).stdin(Stdio::null());
    command
}

/// The environment and the models, made on another thread; stopped when dropped before they are done.
struct Background {
    cancel: Cancel,
    thread: Option<JoinHandle<Result<Engines, Error>>>,
    engines: Option<Engines>,
}

impl Background {
    fn start(workspace: &Workspace, version: &'static str) -> Result<Self, Error> {
        std::fs::create_dir_all(&workspace.cache).map_err(Error::io("create", &workspace.cache))?;
        let log = workspace.cache.join("vllm-env.log");
        println!("making vLLM {version} and models ready in the background, log: {}", log.display());
        let cancel = Cancel::default();
        let setup = Setup { workspace: workspace.clone(), output: Output::Log(log), cancel: cancel.clone() };
        let thread = thread::spawn(move || {
            let result = vllm_env::ensure(&setup).and_then(|base| {
                let models = models::ensure(&setup, &base)?;
                let plugin = plugin::ensure(&setup, &base)?;
                let env = vllm_overlay::ensure_version(&setup, &base, version)?;
                let other_version = vllm_overlay::beside(version);
                let other = vllm_overlay::ensure_version(&setup, &base, other_version)?;
                let clients = clients_env::ensure(&setup)?;
                Ok(Engines { version, env, models, plugin, other_version, other, clients })
            });
            match &result {
                Ok(_) | Err(Error::Cancelled) => {}
                // Minutes before the step that needs it: whoever watches can start to mend it now.
                Err(error) => eprintln!("the real engines will fail: {error}"),
            }
            result
        });
        Ok(Self { cancel, thread: Some(thread), engines: None })
    }

    fn wait(&mut self) -> Result<Engines, Error> {
        if let Some(thread) = self.thread.take() {
            self.engines = Some(thread.join().map_err(|_| Error::Panicked)??);
        }
        // Empty only after a failure was returned, which ends the run.
        self.engines.clone().ok_or(Error::Panicked)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(thread) = self.thread.take() {
            // Its result no longer matters, only that it and its children are gone.
            let _ = thread.join();
        }
    }
}

/// A table of all steps, the failure if there was one, and the total.
fn summary(plan: &[&Step], entries: &[Entry], total: Duration) -> String {
    let mut lines = Vec::new();
    let width = plan.iter().map(|step| step.title.len()).max().unwrap_or(0);
    let line =
        |title: &str, time: &str, outcome: &str| format!("{title:width$}  {time:>26}  {outcome}").trim_end().to_owned();
    for (index, step) in plan.iter().enumerate() {
        lines.push(match entries.get(index) {
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

    #[test]
    fn the_walk_stops_at_the_first_failure_and_the_summary_names_it() {
        let plan = test_steps::plan(true, false);
        let mut seen = 0;
        let entries = walk(&plan, |_| {
            seen += 1;
            let outcome = match seen {
                2 => Outcome::LeftOut("no tool"),
                3 => Outcome::Failed("it broke".into()),
                _ => Outcome::Passed,
            };
            (outcome, Duration::ZERO)
        });
        assert_eq!((seen, entries.len()), (3, 3));
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
    fn a_step_left_out_does_not_stop_the_walk() {
        let plan = test_steps::plan(false, false);
        let entries = walk(&plan, |_| (Outcome::LeftOut("no tool"), Duration::ZERO));
        assert_eq!(entries.len(), plan.len());
    }

    #[test]
    fn a_step_that_takes_more_than_twice_its_budget_fails_and_the_others_follow() {
        let plan = test_steps::plan(true, false);
        let slow = plan.iter().position(|step| step.budget.is_some()).unwrap();
        let budget = plan[slow].budget.unwrap();
        let with = |first: Duration| {
            let times: Vec<_> =
                (0..plan.len()).map(|index| if index == slow { first } else { Duration::ZERO }).collect();
            let mut times = times.into_iter();
            walk(&plan, |_| (Outcome::Passed, times.next().unwrap()))
        };
        assert!(with(budget * 2).iter().all(|entry| entry.outcome == Outcome::Passed));
        let entries = with(budget * 2 + Duration::from_secs(1));
        let failed: Vec<_> = entries.iter().filter(|entry| entry.outcome != Outcome::Passed).collect();
        assert_eq!((entries.len(), failed.len(), failed[0].title), (plan.len(), 1, plan[slow].title));
        let text = summary(&plan, &entries, Duration::ZERO);
        assert!(text.contains(&format!(" of {}  FAILED", readable(budget))), "{text}");
        assert!(text.contains("make it faster"), "{text}");
    }

    #[test]
    fn a_step_without_a_budget_takes_what_it_takes() {
        assert_eq!(in_time(Outcome::Passed, Duration::MAX, None), Outcome::Passed);
        assert_eq!(beside_budget(Duration::from_secs(5), None), "5.0 s");
    }

    #[test]
    fn times_are_readable() {
        assert_eq!(readable(Duration::from_millis(840)), "0.8 s");
        assert_eq!(readable(Duration::from_secs(61)), "1 min 01 s");
    }

    #[test]
    fn a_failure_in_the_background_reaches_whoever_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = Workspace { root: dir.path().join("empty"), cache: dir.path().join("cache") };
        // No requirements there: the background work ends in an error that says so.
        let error = Background::start(&workspace, vllm_env::VLLM_VERSION).unwrap().wait().unwrap_err();
        assert!(error.to_string().contains("requirements.txt"), "{error}");
    }
}
