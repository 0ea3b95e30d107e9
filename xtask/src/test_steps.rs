//! What `cargo xtask test` does, in its order. A new check is a new line in the table.
//!
//! All steps use the dev profile, and the whole workspace with one set of features: so dependencies
//! are checked once (clippy and doc share that) and compiled once. `-p CRATE` instead would pick
//! other features of the dependencies and compile many of them a second time. So would a feature
//! for tests that need real engines: these are `#[ignore]`d.
//!
//! Steps that need vLLM run on a second thread: they mostly import Python modules on one core.
//!
//! A budget is the step's time in a full run on an idle machine with two cores. The run names each
//! step that takes a fifth more; twice the budget is a failure. Steps that compile or download have
//! no budget, as they depend on what is in caches.

use std::time::Duration;

use crate::error::Error;

/// One thing that has to pass.
#[derive(Debug)]
pub(crate) struct Step {
    /// The name for `cargo xtask test NAME`.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) action: Action,
    /// Variables set for this step.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    pub(crate) needs: Needs,
    /// Its time budget.
    pub(crate) budget: Option<Duration>,
}

/// How a step is done.
#[derive(Debug)]
pub(crate) enum Action {
    /// A command line of cargo, split at spaces.
    Cargo(&'static str),
    /// Measuring lines per crate, circles of files and the order of modules.
    Structure,
    /// Holding the manifests of `deploy/kubernetes` against Kubernetes' schemas.
    Manifests,
    /// Waiting for the environment and the models that are being made in the background.
    AwaitEngines,
    /// The tests of vLLM's plugin, in that environment.
    PluginTests,
    /// The tests of the processor beside the frontend, in that environment.
    ProcessorTests,
    /// Installing the wheel into an environment that has that vLLM, and serving from there.
    Wheel,
    /// Whether that vLLM is what its manifest says, and messages to and from its own types.
    Drift,
}

/// What a step can't do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Only the Rust toolchain.
    Toolchain,
    /// cargo-deny; where it is not installed the step is left out, with a line that says so.
    CargoDeny,
    /// The standard library for 64-bit ARM; where rustup can't fetch it the step is left out, with
    /// a line that says so.
    ArmTarget,
    /// etcd; where it is not there and can't be unpacked the step is left out, with a line that
    /// says so.
    Etcd,
    /// Dynamo's mocker and etcd; where they can't be had the step is left out, with a line that
    /// says so.
    Dynamo,
    /// Chromium; where it is not there and can't be unpacked the step is left out, with a line that
    /// says so.
    Chromium,
    /// Prometheus; where it is not there and can't be unpacked the step is left out, with a line
    /// that says so.
    Prometheus,
    /// Python and a small list of its packages; where they can't be had the step is left out, with
    /// a line that says so.
    Python,
    /// The real vLLM and the tiny models.
    RealEngines,
    /// The same and Dynamo with etcd; where these can't be had the step is left out, with a line
    /// that says so.
    RealEnginesAndDynamo,
    /// Real SGLang, its environment, which is made over vLLM's, and the tiny models.
    RealSglang,
}

/// The ARM target whose vector code is compiled, though not run.
macro_rules! arm_target {
    () => {
        "aarch64-unknown-linux-gnu"
    };
}
pub(crate) const ARM_TARGET: &str = arm_target!();

/// The `#[ignore]`d tests whose path contains a text, one at a time: engines are big, and several
/// that start at once slow each other down.
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
    step("docs", "docs", Action::Cargo("doc --workspace --no-deps")).variables(&[("RUSTDOCFLAGS", "-Dwarnings")]),
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
        Action::Cargo("test --workspace --lib --test testsuite -- etcd::tests::real agents::discovery --ignored"),
    )
    .needs(Needs::Etcd)
    .budget(90),
    step("dynamo", "workers of Dynamo", one_at_a_time!("dynamo::")).needs(Needs::Dynamo).budget(90),
    step("page", "live page in a browser", one_at_a_time!("page::")).needs(Needs::Chromium).budget(60),
    step("prometheus", "dashboard and alerts in Prometheus", one_at_a_time!("operations::prometheus"))
        .needs(Needs::Prometheus)
        .budget(40),
    step("manifests", "Kubernetes manifests", Action::Manifests).needs(Needs::Python),
    step("weather", "any weather", Action::Cargo(crate::soak::ARGUMENTS))
        .variables(&[("CHIASM_SOAK_SECONDS", "120")])
        .budget(180),
    step("vllm", "vLLM and models ready", Action::AwaitEngines).needs(Needs::RealEngines),
    step("real-engines", "real engines: server", one_at_a_time!("real_vllm::")).real_engines(1000),
    step("processor", "vLLM's processor", Action::ProcessorTests).real_engines(90),
    step("real-processor", "vLLM's processor: server", one_at_a_time!("real_processor::")).real_engines(180),
    step("clients", "clients of others", one_at_a_time!("clients::")).real_engines(90),
    step("real-engine", "real engine: client", one_at_a_time!("real_engine::")).real_engines(120),
    step(
        "nixl",
        "tensors read by NIXL",
        Action::Cargo("test --workspace --lib --test testsuite --test processes -- by_nixl --ignored --test-threads=1"),
    )
    .real_engines(90),
    step("plugin", "plugin for vLLM", Action::PluginTests).real_engines(60),
    step(
        "dynamo-tensors",
        "tensors for workers of Dynamo",
        one_at_a_time!("dynamo::tensors::dynamo_reads_what_vllm_s_own_processor_makes"),
    )
    .real_engines(60)
    .needs(Needs::RealEnginesAndDynamo),
    step("wheel", "installed wheel", Action::Wheel).real_engines(90),
    step("drift", "drift", Action::Drift).real_engines(60),
    step("real-sglang", "real SGLang", one_at_a_time!("real_sglang::")).needs(Needs::RealSglang).budget(420),
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

    /// Returns `true` for a step of the second thread.
    pub(crate) fn is_beside(&self) -> bool {
        self.needs_vllm() || self.needs == Needs::RealSglang
    }

    /// Returns `true` for a step of cargo that does not run tests.
    pub(crate) fn compiles(&self) -> bool {
        match self.action {
            Action::Cargo(arguments) => {
                !arguments.starts_with("test ") || arguments.ends_with("--no-run")
            }
            _ => false,
        }
    }

    /// Returns `true` for a step that runs what the step `build` compiles.
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

/// The steps of a run with or without the real engines, and real SGLang.
pub(crate) fn plan(real_engines: bool, sglang: bool) -> Vec<&'static Step> {
    let is_selected = |step: &&Step| match step.needs {
        Needs::RealEngines | Needs::RealEnginesAndDynamo => real_engines,
        Needs::RealSglang => sglang,
        _ => true,
    };
    STEPS.iter().filter(is_selected).collect()
}

/// The steps with these names and those that they need, in the order of the table.
///
/// # Errors
/// A name that no step has.
pub(crate) fn named(names: &[String]) -> Result<Vec<&'static Step>, Error> {
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

/// The steps with real engines alone.
pub(crate) fn engine_steps() -> Vec<&'static Step> {
    STEPS.iter().filter(|step| step.needs == Needs::RealEngines).collect()
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
    fn without_engines_every_other_step_stays() {
        let all = plan(true, false);
        let some = plan(false, false);
        let with_engines = all.iter().filter(|step| step.needs_vllm()).count();
        assert_eq!(all.len() - some.len(), with_engines);
        assert!(with_engines >= 3);
        assert!(!some.iter().any(|step| step.needs_vllm() || step.needs == Needs::RealSglang));
        assert_eq!(plan(false, true).len(), some.len() + 1);
    }

    #[test]
    fn steps_are_found_by_unique_names() {
        for step in STEPS {
            let found =
                STEPS.iter().filter(|other| other.name == step.name || other.title == step.title);
            assert_eq!(found.count(), 1, "{}", step.name);
        }
        let steps = |names: &[&str]| -> Vec<&str> {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            named(&names).unwrap().iter().map(|step| step.name).collect()
        };
        assert_eq!(steps(&["docs", "lints"]), ["lints", "docs"]);
        assert_eq!(steps(&["page"]), ["build", "page"]);
        assert_eq!(steps(&["plugin"]), ["vllm", "plugin"]);
        assert_eq!(steps(&["wheel"]), ["build", "vllm", "wheel"]);
        let error = named(&["pages".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("`pages`") && error.contains("real-engines"), "{error}");
    }

    #[test]
    fn steps_that_compile_share_profile_and_packages() {
        for step in plan(true, true) {
            let arguments = arguments(step);
            if let Some(&("clippy" | "doc" | "test")) = arguments.first() {
                assert!(!arguments.contains(&"--release"), "{}", step.title);
                assert!(arguments.contains(&"--workspace"), "{}", step.title);
            }
        }
    }

    /// A filter that matches nothing would pass.
    #[test]
    fn filters_of_steps_match_tests() {
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
                let is_there = |folder: &str| {
                    let tests = crates.join(folder).join("tests");
                    tests.join(path.join("/")).with_extension("rs").is_file()
                        || has_test(
                            &tests.join(path[..path.len() - 1].join("/")).with_extension("rs"),
                            path[path.len() - 1],
                        )
                };
                // The two filters of unit tests, too.
                let is_known = ["etcd::tests::real", "by_nixl"].contains(filter);
                assert!(
                    is_known || ["chiasm", "chiasm-engine"].into_iter().any(is_there),
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

    /// Cargo finds no tests by itself where `autotests` is off: a file without a `mod` line would
    /// never run.
    #[test]
    fn files_of_test_suites_are_modules_of_them() {
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
    fn engines_are_awaited_before_tests_use_them() {
        let first = engine_steps()[0];
        assert!(matches!(first.action, Action::AwaitEngines), "{}", first.title);
    }

    #[test]
    fn tests_with_real_engines_are_asked_for_and_linted() {
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
    fn tests_have_budgets_and_are_built_before() {
        let plan = plan(true, true);
        let build = plan.iter().position(|step| arguments(step).contains(&"--no-run")).unwrap();
        for (index, step) in plan.iter().enumerate() {
            let runs = arguments(step).first() == Some(&"test") && index != build;
            if runs
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
