//! What `cargo xtask test` does, in its order. A new check is a new line in the table.
//!
//! All steps use the dev profile, and the whole workspace with one set of features: so dependencies are checked
//! once (clippy and doc share that) and compiled once. `-p CRATE` instead would pick other features of the dependencies
//! and compile many of them a second time. So would a feature for tests that need real engines: these are `#[ignore]`d.
//!
//! Steps with real engines run beside the others: most of their time is one core's, which imports Python modules.
//!
//! Budgets are what a step took on two cores with nothing else to do, beside the other steps. The run names every step
//! that takes a fifth more. Twice the budget is a failure. Steps that compile or download have no budget, as they
//! depend on what is in caches.

use std::time::Duration;

use crate::error::Error;

/// One thing that has to pass.
#[derive(Debug)]
pub(crate) struct Step {
    /// What `cargo xtask test NAME` calls it.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) action: Action,
    /// Variables set for this step.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    pub(crate) needs: Needs,
    /// What it may take.
    pub(crate) budget: Option<Duration>,
}

/// How a step is done.
#[derive(Debug)]
pub(crate) enum Action {
    /// cargo with these arguments, which spaces divide.
    Cargo(&'static str),
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
    /// The standard library for 64-bit ARM; where rustup can't fetch it the step is left out, with a line that says so.
    ArmTarget,
    /// etcd; where it is not there and can't be unpacked the step is left out, with a line that says so.
    Etcd,
    /// Dynamo's mocker and etcd; where they can't be had the step is left out, with a line that says so.
    Dynamo,
    /// Chromium; where it is not there and can't be unpacked the step is left out, with a line that says so.
    Chromium,
    /// Prometheus; where it is not there and can't be unpacked the step is left out, with a line that says so.
    Prometheus,
    /// Python and a small list of its packages; where they can't be had the step is left out, with a line that says so.
    Python,
    /// The real vLLM and the tiny models.
    RealEngines,
    /// The same and Dynamo with etcd; where these can't be had the step is left out, with a line that says so.
    RealEnginesAndDynamo,
    /// Real SGLang, its environment, which is made over vLLM's, and the tiny models.
    RealSglang,
}

/// The ARM target whose vector code is compiled, though not run.
pub(crate) const ARM_TARGET: &str = "aarch64-unknown-linux-gnu";

/// Tests that need more than the toolchain, by the beginning of their paths. They run one at a time: engines are big, and
/// several that start at once slow each other down.
macro_rules! in_turn {
    ($tests:literal) => {
        Action::Cargo(concat!("test --workspace --test testsuite -- ", $tests, " --ignored --test-threads=1"))
    };
}

const STEPS: &[Step] = &[
    step("format", "format", Action::Cargo("fmt --all --check")).budget(20),
    step("build", "build", Action::Cargo("test --workspace --no-run")),
    step("tests", "tests", Action::Cargo("test --workspace")).budget(360),
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
        Action::Cargo("check --package=chiasm-vision --target aarch64-unknown-linux-gnu"),
    )
    .variables(&[("RUSTFLAGS", "-Dwarnings")])
    .needs(Needs::ArmTarget),
    step(
        "etcd",
        "discovery by etcd",
        Action::Cargo("test --workspace --lib --test testsuite -- etcd::tests::real agents::discovery --ignored"),
    )
    .needs(Needs::Etcd)
    .budget(90),
    step("dynamo", "workers of Dynamo", in_turn!("dynamo::")).needs(Needs::Dynamo).budget(90),
    step("page", "live page in a browser", in_turn!("page::")).needs(Needs::Chromium).budget(60),
    step("prometheus", "dashboard and alerts in Prometheus", in_turn!("operations::prometheus"))
        .needs(Needs::Prometheus)
        .budget(40),
    step("manifests", "Kubernetes manifests", Action::Manifests).needs(Needs::Python),
    step("weather", "any weather", Action::Cargo(crate::soak::ARGUMENTS))
        .variables(&[("CHIASM_SOAK_SECONDS", "120")])
        .budget(180),
    step("vllm", "vLLM and models ready", Action::AwaitEngines).needs(Needs::RealEngines),
    step("real-engines", "real engines: server", in_turn!("real_vllm::")).real_engines(720),
    step("processor", "vLLM's processor", Action::ProcessorTests).real_engines(90),
    step("real-processor", "vLLM's processor: server", in_turn!("real_processor::")).real_engines(180),
    step("clients", "clients of others", in_turn!("clients::")).real_engines(90),
    step("real-engine", "real engine: client", in_turn!("real_engine::")).real_engines(120),
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
        in_turn!("dynamo::tensors::dynamo_reads_what_vllm_s_own_processor_makes"),
    )
    .real_engines(60)
    .needs(Needs::RealEnginesAndDynamo),
    step("wheel", "installed wheel", Action::Wheel).real_engines(90),
    step("drift", "drift", Action::Drift).real_engines(60),
    step("real-sglang", "real SGLang", in_turn!("real_sglang::")).needs(Needs::RealSglang).budget(420),
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

    /// Returns `true` for a step that needs the environment with vLLM. Such steps run beside the others.
    pub(crate) fn has_engines(&self) -> bool {
        matches!(self.needs, Needs::RealEngines | Needs::RealEnginesAndDynamo)
    }
}

/// The steps of a run with or without the real engines, and real SGLang.
pub(crate) fn plan(real_engines: bool, sglang: bool) -> Vec<&'static Step> {
    let is_asked = |step: &&Step| match step.needs {
        Needs::RealEngines | Needs::RealEnginesAndDynamo => real_engines,
        Needs::RealSglang => sglang,
        _ => true,
    };
    STEPS.iter().filter(is_asked).collect()
}

/// The steps with these names, in the order of the table.
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
    Ok(STEPS.iter().filter(|step| names.iter().any(|name| name == step.name)).collect())
}

/// The steps with real engines alone.
pub(crate) fn engine_steps() -> Vec<&'static Step> {
    STEPS.iter().filter(|step| step.needs == Needs::RealEngines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(step: &Step) -> Vec<&'static str> {
        match step.action {
            Action::Cargo(arguments) => arguments.split(' ').collect(),
            Action::Manifests
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
        let with_engines = all.iter().filter(|step| step.has_engines()).count();
        assert_eq!(all.len() - some.len(), with_engines);
        assert!(with_engines >= 3);
        assert!(!some.iter().any(|step| step.has_engines() || step.needs == Needs::RealSglang));
        assert_eq!(plan(false, true).len(), some.len() + 1);
    }

    #[test]
    fn steps_are_found_by_unique_names() {
        for step in STEPS {
            let found = named(&[step.name.to_owned()]).unwrap();
            assert_eq!(found.iter().map(|step| step.title).collect::<Vec<_>>(), [step.title]);
        }
        let names = ["page", "lints"].map(str::to_owned);
        let titles: Vec<_> = named(&names).unwrap().iter().map(|step| step.name).collect();
        assert_eq!(titles, ["lints", "page"]);
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
            if step.has_engines() && !arguments.is_empty() {
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
                || matches!(step.action, Action::PluginTests | Action::ProcessorTests | Action::Wheel | Action::Drift)
            {
                assert!(step.budget.is_some() && index > build, "{}", step.title);
            }
        }
    }
}
