//! The table of steps of `cargo xtask test`, in order. A new check is a new line in the table.
//!
//! All steps use the dev profile and the whole workspace with one set of features, so dependencies
//! are compiled once and checked once (clippy and doc share the checks). `-p CRATE` would select
//! other features of the dependencies and compile many of them again. So would a feature for tests
//! with real engines; these are `#[ignore]`d instead.
//!
//! Steps that need vLLM run on a second thread: they mostly import Python modules on one core.
//!
//! A budget is the step's time in a full run on an idle machine with two cores. The run reports
//! each step that takes a fifth more, and fails a step that takes twice its budget. Steps that
//! compile or download have no budget, because their time depends on caches.

use std::time::Duration;

use crate::error::Error;

/// A check that has to pass.
#[derive(Debug)]
pub(crate) struct Step {
    /// The name for `cargo xtask test NAME`.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) action: Action,
    /// The environment variables of this step.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    pub(crate) needs: Needs,
    /// The time budget.
    pub(crate) budget: Option<Duration>,
}

/// The action of a step.
#[derive(Debug)]
pub(crate) enum Action {
    /// Runs cargo with these arguments, which are split at spaces.
    Cargo(&'static str),
    /// Measures lines per crate, cycles of files and the order of modules.
    Structure,
    /// Validates the manifests of `deploy/kubernetes` against Kubernetes' schemas.
    Manifests,
    /// Waits for the environments and models that are made in the background.
    AwaitEngines,
    /// Runs the tests of the vLLM plugin.
    PluginTests,
    /// Runs the tests of the processor processes.
    ProcessorTests,
    /// Installs the wheel beside vLLM and serves from there.
    Wheel,
    /// Compares vLLM with its manifest, and exchanges messages with its types.
    Drift,
}

/// The requirements of a step. Unless noted otherwise, a step without them is skipped with a line
/// that names the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// The Rust toolchain, which is always present.
    Toolchain,
    /// cargo-deny.
    CargoDeny,
    /// The standard library for 64-bit ARM, which rustup installs if needed.
    ArmTarget,
    /// etcd, which is unpacked if needed.
    Etcd,
    /// Dynamo's mocker and etcd.
    Dynamo,
    /// Chromium, which is unpacked if needed.
    Chromium,
    /// Prometheus, which is unpacked if needed.
    Prometheus,
    /// Python and a short list of packages.
    Python,
    /// Real vLLM and the tiny models. Required: a failed setup fails the step.
    RealEngines,
    /// Real vLLM and the tiny models, which are required, and Dynamo with etcd.
    RealEnginesAndDynamo,
    /// Real SGLang, whose environment is an overlay over vLLM's, and the tiny models. Required.
    RealSglang,
}

macro_rules! arm_target {
    () => {
        "aarch64-unknown-linux-gnu"
    };
}
/// The ARM target. Its vector code is compiled but not run.
pub(crate) const ARM_TARGET: &str = arm_target!();

/// Runs the `#[ignore]`d tests whose path contains a text, one at a time: engines are big, and
/// several that start at the same time slow each other down.
macro_rules! one_at_a_time {
    ($tests:literal) => {
        Action::Cargo(concat!(
            "test --workspace --test testsuite -- ",
            $tests,
            " --ignored --test-threads=1"
        ))
    };
}

const STEPS: &[Step] = &[
    step("format", "format", Action::Cargo("fmt --all --check")).budget(20),
    step("structure", "structure", Action::Structure).budget(10),
    step("build", "build", Action::Cargo("test --workspace --no-run")),
    step("lints", "lints", Action::Cargo("clippy --workspace --all-targets -- -Dwarnings")),
    step("docs", "docs", Action::Cargo("doc --workspace --no-deps"))
        .variables(&[("RUSTDOCFLAGS", "-Dwarnings")]),
    step(
        "licences",
        "licences, bans, sources",
        Action::Cargo("deny check --hide-inclusion-graph bans licenses sources"),
    )
    .needs(Needs::CargoDeny)
    .budget(60),
    step(
        "arm",
        "vector code for ARM compiles",
        Action::Cargo(concat!("check --package=chiasm-vision --target ", arm_target!())),
    )
    .variables(&[("RUSTFLAGS", "-Dwarnings")])
    .needs(Needs::ArmTarget),
    step("tests", "tests", Action::Cargo("test --workspace")).budget(720),
    step(
        "etcd",
        "discovery by etcd",
        Action::Cargo(
            "test --workspace --lib --test testsuite -- \
             etcd::tests::real agents::discovery --ignored",
        ),
    )
    .needs(Needs::Etcd)
    .budget(90),
    step("dynamo", "Dynamo workers", one_at_a_time!("dynamo::")).needs(Needs::Dynamo).budget(90),
    step("page", "live page in a browser", one_at_a_time!("page::"))
        .needs(Needs::Chromium)
        .budget(60),
    step(
        "prometheus",
        "dashboard and alerts in Prometheus",
        one_at_a_time!("operations::prometheus"),
    )
    .needs(Needs::Prometheus)
    .budget(40),
    step("manifests", "Kubernetes manifests", Action::Manifests).needs(Needs::Python),
    step("weather", "soak: random faults", Action::Cargo(crate::soak::ARGUMENTS))
        .variables(&[("CHIASM_SOAK_SECONDS", "120")])
        .budget(180),
    step("vllm", "vLLM and models ready", Action::AwaitEngines).needs(Needs::RealEngines),
    step("real-engines", "real engines: server", one_at_a_time!("real_vllm::")).real_engines(1200),
    step("processor", "vLLM's processor", Action::ProcessorTests).real_engines(90),
    step("real-processor", "vLLM's processor: server", one_at_a_time!("real_processor::"))
        .real_engines(300),
    step("clients", "third-party clients", one_at_a_time!("clients::")).real_engines(90),
    step("opencv", "cuts of videos in OpenCV", one_at_a_time!("real_opencv::")).real_engines(150),
    step("real-engine", "real engine: client", one_at_a_time!("real_engine::")).real_engines(120),
    step(
        "nixl",
        "tensors read by NIXL",
        Action::Cargo(
            "test --workspace --lib --test testsuite --test processes -- \
             by_nixl --ignored --test-threads=1",
        ),
    )
    .real_engines(90),
    step("plugin", "plugin for vLLM", Action::PluginTests).real_engines(60),
    step(
        "dynamo-tensors",
        "tensors for Dynamo workers",
        one_at_a_time!("dynamo::tensors::dynamo_tensors_match_vllm_processor"),
    )
    .real_engines(60)
    .needs(Needs::RealEnginesAndDynamo),
    step("wheel", "installed wheel", Action::Wheel).real_engines(90),
    step("drift", "drift", Action::Drift).real_engines(60),
    step("real-sglang", "real SGLang", one_at_a_time!("real_sglang::"))
        .needs(Needs::RealSglang)
        .budget(420),
];

const fn step(name: &'static str, title: &'static str, action: Action) -> Step {
    Step { name, title, action, variables: &[], needs: Needs::Toolchain, budget: None }
}

impl Step {
    const fn budget(mut self, seconds: u64) -> Self {
        self.budget = Some(Duration::from_secs(seconds));
        self
    }

    const fn variables(mut self, variables: &'static [(&'static str, &'static str)]) -> Self {
        self.variables = variables;
        self
    }

    const fn needs(mut self, needs: Needs) -> Self {
        self.needs = needs;
        self
    }

    const fn real_engines(self, budget: u64) -> Self {
        self.needs(Needs::RealEngines).variables(&crate::vllm_env::ENGINE_VARIABLES).budget(budget)
    }

    /// Returns `true` for a step that needs the environment with vLLM.
    pub(crate) fn needs_vllm(&self) -> bool {
        matches!(self.needs, Needs::RealEngines | Needs::RealEnginesAndDynamo)
    }

    /// Returns `true` for a step that runs on the second thread.
    pub(crate) fn runs_on_second_thread(&self) -> bool {
        self.needs_vllm() || self.needs == Needs::RealSglang
    }

    /// Returns `true` for a cargo step that compiles and does not run tests.
    pub(crate) fn compiles(&self) -> bool {
        match self.action {
            Action::Cargo(arguments) => {
                !arguments.starts_with("test ") || arguments.ends_with("--no-run")
            }
            _ => false,
        }
    }

    /// Returns `true` for a step that uses the build products of the step `build`.
    fn needs_build(&self) -> bool {
        match self.action {
            Action::Cargo(arguments) => self.name != "build" && arguments.starts_with("test "),
            Action::Wheel | Action::Drift => true,
            Action::Structure
            | Action::Manifests
            | Action::AwaitEngines
            | Action::PluginTests
            | Action::ProcessorTests => false,
        }
    }
}

/// Returns the steps of a run with or without real engines and real SGLang.
pub(crate) fn plan(real_engines: bool, sglang: bool) -> Vec<&'static Step> {
    let is_selected = |step: &&Step| match step.needs {
        Needs::RealEngines | Needs::RealEnginesAndDynamo => real_engines,
        Needs::RealSglang => sglang,
        _ => true,
    };
    STEPS.iter().filter(is_selected).collect()
}

/// Returns the steps with these names and the steps that they need, in the order of the table.
///
/// # Errors
/// `UnknownStep` for a name that no step has.
pub(crate) fn select(names: &[String]) -> Result<Vec<&'static Step>, Error> {
    for name in names {
        if !STEPS.iter().any(|step| step.name == name) {
            let known = STEPS.iter().map(|step| step.name).collect::<Vec<_>>().join(", ");
            return Err(Error::UnknownStep { name: name.clone(), known });
        }
    }
    let is_named = |step: &Step| names.iter().any(|name| name == step.name);
    let needs_build = STEPS.iter().any(|step| is_named(step) && step.needs_build());
    let needs_vllm = STEPS.iter().any(|step| is_named(step) && step.needs_vllm());
    let is_needed = |step: &Step| match step.name {
        "build" => needs_build,
        "vllm" => needs_vllm,
        _ => false,
    };
    Ok(STEPS.iter().filter(|step| is_named(step) || is_needed(step)).collect())
}

/// Returns the steps that need the environment with vLLM.
pub(crate) fn vllm_steps() -> Vec<&'static Step> {
    STEPS.iter().filter(|step| step.needs_vllm()).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::workspace::Workspace;

    fn arguments(step: &Step) -> Vec<&'static str> {
        match step.action {
            Action::Cargo(arguments) => arguments.split(' ').collect(),
            Action::Structure
            | Action::Manifests
            | Action::AwaitEngines
            | Action::PluginTests
            | Action::ProcessorTests
            | Action::Wheel
            | Action::Drift => Vec::new(),
        }
    }

    #[test]
    fn plan_without_engines_keeps_other_steps() {
        let full = plan(true, false);
        let reduced = plan(false, false);
        let with_engines = full.iter().filter(|step| step.needs_vllm()).count();
        assert_eq!(full.len() - reduced.len(), with_engines);
        assert!(with_engines >= 3);
        assert!(!reduced.iter().any(|step| step.needs_vllm() || step.needs == Needs::RealSglang));
        assert_eq!(plan(false, true).len(), reduced.len() + 1);
    }

    #[test]
    fn steps_are_selected_by_unique_names() {
        for step in STEPS {
            let found =
                STEPS.iter().filter(|other| other.name == step.name || other.title == step.title);
            assert_eq!(found.count(), 1, "{}", step.name);
        }
        let steps = |names: &[&str]| -> Vec<&str> {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            select(&names).unwrap().iter().map(|step| step.name).collect()
        };
        assert_eq!(steps(&["docs", "lints"]), ["lints", "docs"]);
        assert_eq!(steps(&["page"]), ["build", "page"]);
        assert_eq!(steps(&["plugin"]), ["vllm", "plugin"]);
        assert_eq!(steps(&["wheel"]), ["build", "vllm", "wheel"]);
        let error = select(&["pages".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("`pages`") && error.contains("real-engines"), "{error}");
    }

    #[test]
    fn compiling_steps_use_whole_workspace_in_dev_profile() {
        for step in plan(true, true) {
            let arguments = arguments(step);
            if let Some(&("clippy" | "doc" | "test")) = arguments.first() {
                assert!(!arguments.contains(&"--release"), "{}", step.title);
                assert!(arguments.contains(&"--workspace"), "{}", step.title);
            }
        }
    }

    /// Cargo passes if a filter matches no test.
    #[test]
    fn step_filters_match_tests() {
        let crates = Workspace::find().unwrap().root.join("crates");
        for step in STEPS {
            let arguments = arguments(step);
            let filters = arguments
                .iter()
                .skip_while(|word| **word != "--")
                .skip(1)
                .filter(|word| !word.starts_with('-'));
            for filter in filters {
                let path: Vec<&str> = filter.split("::").filter(|part| !part.is_empty()).collect();
                let exists_in = |folder: &str| {
                    let tests = crates.join(folder).join("tests");
                    tests.join(path.join("/")).with_extension("rs").is_file()
                        || has_test(
                            &tests.join(path[..path.len() - 1].join("/")).with_extension("rs"),
                            path[path.len() - 1],
                        )
                };
                // These filters also match unit tests.
                let is_known = ["etcd::tests::real", "by_nixl"].contains(filter);
                assert!(
                    is_known
                        || ["chiasm", "chiasm-engine", "chiasm-video"].into_iter().any(exists_in),
                    "{}: {filter}",
                    step.title
                );
            }
        }
    }

    fn has_test(file: &Path, name: &str) -> bool {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        text.lines().any(|line| line.contains(&format!("fn {name}")))
    }

    /// Cargo does not discover test files where `autotests` is off, so the tests of a file without
    /// a `mod` line would never run.
    #[test]
    fn test_files_are_modules_of_their_suite() {
        let crates = Workspace::find().unwrap().root.join("crates");
        let mut suites = 0;
        for folder in std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()) {
            let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
            if !manifest.contains("autotests = false") {
                continue;
            }
            suites += 1;
            let main = std::fs::read_to_string(folder.join("tests/main.rs")).unwrap();
            for file in
                std::fs::read_dir(folder.join("tests")).unwrap().map(|entry| entry.unwrap().path())
            {
                let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap();
                let is_target = manifest.contains(&format!("path = \"tests/{stem}.rs\""));
                let is_module = main.lines().any(|line| line == format!("mod {stem};"));
                let is_rust = file.extension().is_some_and(|extension| extension == "rs");
                assert!(
                    !is_rust || is_target || is_module,
                    "{} is in no test binary",
                    file.display()
                );
            }
        }
        assert!(suites >= 5);
    }

    #[test]
    fn vllm_steps_begin_with_waiting_for_engines() {
        let first = vllm_steps()[0];
        assert!(matches!(first.action, Action::AwaitEngines), "{}", first.title);
    }

    #[test]
    fn engine_tests_are_ignored_tests_under_lint() {
        let plan = plan(true, true);
        for step in &plan {
            let arguments = arguments(step);
            if step.needs_vllm() && !arguments.is_empty() {
                assert!(arguments.contains(&"--ignored"), "{}", step.title);
                assert!(step.variables.contains(&("VLLM_TARGET_DEVICE", "cpu")));
            }
        }
        let lints = plan.iter().find(|step| step.name == "lints").unwrap();
        assert!(arguments(lints).contains(&"--all-targets"));
    }

    #[test]
    fn test_steps_have_budget_after_build() {
        let plan = plan(true, true);
        let build = plan.iter().position(|step| arguments(step).contains(&"--no-run")).unwrap();
        for (index, step) in plan.iter().enumerate() {
            let runs_tests = arguments(step).first() == Some(&"test") && index != build;
            if runs_tests
                || matches!(
                    step.action,
                    Action::PluginTests | Action::ProcessorTests | Action::Wheel | Action::Drift
                )
            {
                assert!(step.budget.is_some() && index > build, "{}", step.title);
            }
        }
    }
}
