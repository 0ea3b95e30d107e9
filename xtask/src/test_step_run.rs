//! Executes one step: runs cargo or a program of a Python environment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::bench_peers::door_peers;
use crate::cargo::cargo;
use crate::child::{self, Cancel, Output};
use crate::chromium;
use crate::error::Error;
use crate::etcd;
use crate::manifests;
use crate::models;
use crate::outcome::Outcome;
use crate::plugin;
use crate::prometheus;
use crate::real_engines::{EngineSetup, Engines};
use crate::setup::Setup;
use crate::sglang_env;
use crate::structure;
use crate::test_steps::{ARM_TARGET, Action, Needs, Step};
use crate::vllm_drift;
use crate::vllm_env;
use crate::wheel;
use crate::workspace::Workspace;

/// Executes steps on one thread.
pub(crate) struct StepExecutor<'a> {
    pub(crate) workspace: &'a Workspace,
    /// The setup of the real engines, shared by the threads; `None` if no step needs them.
    pub(crate) setup: Option<&'a Mutex<EngineSetup>>,
    /// The version of SGLang to test with.
    pub(crate) sglang: Option<&'static str>,
    /// The destination of the output of steps.
    pub(crate) output: Output,
}

/// The reason why a step did not pass.
enum NotPassed {
    Skipped(&'static str),
    Failed(Error),
}

impl From<Error> for NotPassed {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl StepExecutor<'_> {
    /// Executes a step and measures its time.
    pub(crate) fn timed(&self, step: &Step) -> (Outcome, Duration) {
        let start = Instant::now();
        let outcome = match self.execute(step) {
            Ok(()) => Outcome::Passed,
            Err(NotPassed::Skipped(reason)) => Outcome::Skipped(reason),
            Err(NotPassed::Failed(Error::Cancelled)) => Outcome::Skipped("another step has failed"),
            Err(NotPassed::Failed(error)) => Outcome::Failed(error.to_string()),
        };
        (outcome, start.elapsed())
    }

    /// Executes a step that writes its output to a log in `folder`. Prints the log if the step
    /// fails.
    pub(crate) fn logged(&mut self, step: &Step, folder: &Path) -> (Outcome, Duration) {
        let log = folder.join(step.name).with_extension("log");
        if let Err(error) = fs::create_dir_all(folder).and_then(|()| fs::write(&log, "")) {
            return (Outcome::Failed(Error::io("write", &log)(error).to_string()), Duration::ZERO);
        }
        println!("    {} runs on the second thread, log: {}", step.title, log.display());
        self.output = Output::Log(log.clone());
        let (outcome, time) = self.timed(step);
        if matches!(outcome, Outcome::Failed(_)) {
            match fs::read(&log) {
                Ok(printed) => println!(
                    "\n--- output of {}\n{}",
                    step.title,
                    String::from_utf8_lossy(&printed)
                ),
                Err(error) => println!("{}", Error::io("read", &log)(error)),
            }
        }
        (outcome, time)
    }

    fn execute(&self, step: &Step) -> Result<(), NotPassed> {
        let engines = if step.needs_vllm() { Some(self.engines()?) } else { None };
        match (&step.action, engines) {
            (Action::Cargo(arguments), engines) => self.cargo(step, arguments, engines),
            (Action::Structure, _) => self.structure(),
            (Action::Manifests, _) => match manifests::tests(&self.tool_setup()) {
                Ok(mut tests) => self.run(&mut tests, "the manifests' tests"),
                Err(error) => {
                    self.output.print_line(&format!("    {error}"))?;
                    Err(NotPassed::Skipped("Python is missing, or the packages can't be fetched"))
                }
            },
            (_, None) => Err(NotPassed::Skipped("vLLM is missing")),
            (Action::AwaitEngines, Some(engines)) => {
                for (name, value) in engines.variables() {
                    self.output.print_line(&format!("    {name}={}", value.display()))?;
                }
                Ok(())
            }
            (Action::PluginTests, Some(engines)) => {
                self.run(&mut plugin::tests(self.workspace, &engines.env), "the plugin's tests")
            }
            (Action::ProcessorTests, Some(engines)) => self.run(
                plugin::processor_tests(self.workspace, &engines.env)
                    .env("CHIASM_TEST_MODELS", &engines.models),
                "the processor's tests",
            ),
            (Action::Wheel, Some(engines)) => {
                let mut tests = wheel::tests(self.workspace, &engines.env, &engines.models)?;
                self.run(&mut tests, "the wheel's tests")
            }
            (Action::Drift, Some(engines)) => {
                if vllm_drift::run(&self.tool_setup(), engines.version, false)? {
                    Ok(())
                } else {
                    Err(Error::Drifted.into())
                }
            }
        }
    }

    /// Runs a cargo step, or skips it if its requirements are missing.
    fn cargo(
        &self,
        step: &Step,
        arguments: &str,
        engines: Option<Engines>,
    ) -> Result<(), NotPassed> {
        if step.needs == Needs::CargoDeny && !self.has_cargo_deny() {
            return Err(NotPassed::Skipped("cargo-deny is not installed"));
        }
        if step.needs == Needs::ArmTarget && !self.has_arm_target() {
            return Err(NotPassed::Skipped("rustup can't fetch the ARM target's standard library"));
        }
        let mut cargo = cargo(self.workspace);
        cargo
            .args(arguments.split(' '))
            .envs(step.variables.iter().copied())
            .envs(self.programs(step.needs)?);
        if step.needs == Needs::RealSglang {
            cargo.envs(self.sglang_variables(self.sglang.unwrap_or(sglang_env::NEWEST))?);
        }
        if let Some(engines) = engines {
            cargo.envs(engines.variables());
        }
        self.run(&mut cargo, &format!("`cargo {arguments}`"))
    }

    /// Measures the structure of the code; prints the report only if a limit is exceeded.
    fn structure(&self) -> Result<(), NotPassed> {
        let report = structure::measure(&self.workspace.root).map_err(Error::from)?;
        if report.problems.is_empty() {
            return Ok(());
        }
        self.output.print_line(&report.text)?;
        Err(Error::StructureLimits { problems: report.problems.join("; ") }.into())
    }

    fn run(&self, command: &mut Command, what: &str) -> Result<(), NotPassed> {
        Ok(child::run(command, what, &self.output, &Cancel::default())?)
    }

    /// Waits for the setup of the real engines.
    fn engines(&self) -> Result<Engines, NotPassed> {
        match self.setup {
            Some(setup) => Ok(setup.lock().map_err(|_| Error::Panicked)?.wait()?),
            None => Err(NotPassed::Skipped("vLLM is missing")),
        }
    }

    fn tool_setup(&self) -> Setup {
        Setup {
            workspace: self.workspace.clone(),
            output: self.output.clone(),
            cancel: Cancel::default(),
        }
    }

    /// Returns the environment variables of the tests with real SGLang.
    fn sglang_variables(
        &self,
        version: &'static str,
    ) -> Result<[(&'static str, PathBuf); 2], Error> {
        let setup = self.tool_setup();
        let base = vllm_env::ensure(&setup)?;
        let env = sglang_env::ensure(&setup, &base, version)?;
        let models = models::ensure(&setup, &base)?;
        Ok([("CHIASM_TEST_SGLANG_PYTHON", env.python()), ("CHIASM_TEST_MODELS", models)])
    }

    /// Returns the environment variables that pass a step the programs that it needs.
    fn programs(&self, needs: Needs) -> Result<Vec<(&'static str, PathBuf)>, NotPassed> {
        let setup = self.tool_setup();
        let variable = |name, program: Result<PathBuf, Error>, reason| match program {
            Ok(program) => Ok(vec![(name, program)]),
            Err(error) => {
                self.output.print_line(&format!("    {error}"))?;
                Err(NotPassed::Skipped(reason))
            }
        };
        match needs {
            Needs::Etcd => variable(
                etcd::VARIABLE,
                etcd::ensure(&setup),
                "etcd is missing, and its package can't be unpacked",
            ),
            Needs::Dynamo | Needs::RealEnginesAndDynamo => {
                let mut programs = self.programs(Needs::Etcd)?;
                let python = door_peers::ensure(&setup).map(|peers| peers.python());
                programs.extend(variable(
                    door_peers::VARIABLE,
                    python,
                    "Dynamo's packages can't be fetched",
                )?);
                Ok(programs)
            }
            Needs::Chromium => {
                let reason = "Chromium is missing, and its package can't be unpacked";
                variable(chromium::VARIABLE, chromium::ensure(&setup), reason)
            }
            Needs::Prometheus => {
                let reason = "Prometheus is missing, and its package can't be unpacked";
                variable(prometheus::VARIABLE, prometheus::ensure(&setup), reason)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Returns `true` if the ARM target is installed, or rustup has installed it now.
    fn has_arm_target(&self) -> bool {
        let mut print_folder = Command::new("rustc");
        print_folder
            .args(["--print", "target-libdir", "--target", ARM_TARGET])
            .current_dir(&self.workspace.root);
        if child::read(&mut print_folder, "rustc").is_ok_and(|folder| Path::new(&folder).is_dir()) {
            return true;
        }
        let mut add = Command::new("rustup");
        add.args(["target", "add", ARM_TARGET])
            .current_dir(&self.workspace.root)
            .stdin(Stdio::null());
        add.status().is_ok_and(|status| status.success())
    }

    fn has_cargo_deny(&self) -> bool {
        let mut version = cargo(self.workspace);
        version.args(["deny", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
        version.status().is_ok_and(|status| status.success())
    }
}
