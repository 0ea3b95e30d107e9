//! What `cargo xtask test` does, in its order. A new check is a new line in the table.
//!
//! All steps use the release profile, and the whole workspace with one set of features: so dependencies are checked
//! once (clippy and doc share that) and compiled once. `-p CRATE` instead would pick other features of the dependencies
//! and compile many of them a second time. So would a feature for tests that need real engines: these are `#[ignore]`d.
//!
//! Budgets are what a step may take on two idle cores, with room for a third more. Machines that run this are seldom idle: twice
//! the budget is a failure. Steps that compile or download have none, as they depend on what is in caches.

use std::time::Duration;

/// One thing that has to pass.
#[derive(Debug)]
pub(crate) struct Step {
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
    /// cargo with these arguments.
    Cargo(&'static [&'static str]),
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

const fn seconds(seconds: u64) -> Option<Duration> {
    Some(Duration::from_secs(seconds))
}

const STEPS: &[Step] = &[
    Step {
        title: "format",
        action: Action::Cargo(&["fmt", "--all", "--check"]),
        variables: &[],
        needs: Needs::Toolchain,
        budget: seconds(20),
    },
    Step {
        title: "lints",
        action: Action::Cargo(&["clippy", "--release", "--workspace", "--all-targets", "--", "-Dwarnings"]),
        variables: &[],
        needs: Needs::Toolchain,
        budget: None,
    },
    Step {
        title: "docs",
        action: Action::Cargo(&["doc", "--release", "--workspace", "--no-deps"]),
        variables: &[("RUSTDOCFLAGS", "-Dwarnings")],
        needs: Needs::Toolchain,
        budget: None,
    },
    Step {
        title: "licences, bans, sources",
        action: Action::Cargo(&["deny", "check", "--hide-inclusion-graph", "bans", "licenses", "sources"]),
        variables: &[],
        needs: Needs::CargoDeny,
        budget: seconds(60),
    },
    Step {
        title: "vector code for ARM compiles",
        action: Action::Cargo(&["check", "--release", "--package=chiasm-vision", "--target", ARM_TARGET]),
        variables: &[("RUSTFLAGS", "-Dwarnings")],
        needs: Needs::ArmTarget,
        budget: None,
    },
    Step {
        title: "build",
        action: Action::Cargo(&["test", "--release", "--workspace", "--no-run"]),
        variables: &[],
        needs: Needs::Toolchain,
        budget: None,
    },
    Step {
        title: "tests",
        action: Action::Cargo(&["test", "--release", "--workspace"]),
        variables: &[],
        needs: Needs::Toolchain,
        budget: seconds(360),
    },
    Step {
        title: "discovery by etcd",
        action: Action::Cargo(&[
            "test",
            "--release",
            "--workspace",
            "--lib",
            "--test",
            "agents",
            "--",
            "etcd",
            "--ignored",
        ]),
        variables: &[],
        needs: Needs::Etcd,
        budget: seconds(90),
    },
    Step {
        title: "workers of Dynamo",
        action: Action::Cargo(&[
            "test",
            "--release",
            "--workspace",
            "--test",
            "dynamo",
            "--",
            "--ignored",
            "--test-threads=1",
        ]),
        variables: &[],
        needs: Needs::Dynamo,
        budget: seconds(90),
    },
    Step {
        title: "live page in a browser",
        action: Action::Cargo(&[
            "test",
            "--release",
            "--workspace",
            "--test",
            "page",
            "--",
            "--ignored",
            "--test-threads=1",
        ]),
        variables: &[],
        needs: Needs::Chromium,
        budget: seconds(60),
    },
    Step {
        title: "dashboard and alerts in Prometheus",
        action: Action::Cargo(&[
            "test",
            "--release",
            "--workspace",
            "--test",
            "operations",
            "--",
            "prometheus",
            "--ignored",
        ]),
        variables: &[],
        needs: Needs::Prometheus,
        budget: seconds(40),
    },
    Step {
        title: "Kubernetes manifests",
        action: Action::Manifests,
        variables: &[],
        needs: Needs::Python,
        budget: None,
    },
    Step {
        title: "any weather",
        action: Action::Cargo(crate::soak::ARGUMENTS),
        variables: &[("CHIASM_SOAK_SECONDS", "120")],
        needs: Needs::Toolchain,
        budget: seconds(180),
    },
    Step {
        title: "vLLM and models ready",
        action: Action::AwaitEngines,
        variables: &[],
        needs: Needs::RealEngines,
        budget: None,
    },
    Step {
        title: "tensors read by NIXL",
        action: Action::Cargo(&[
            "test",
            "--release",
            "--workspace",
            "--lib",
            "--test",
            "processes",
            "--test",
            "agents",
            "--",
            "by_nixl",
            "--ignored",
            "--test-threads=1",
        ]),
        variables: &crate::vllm_env::ENGINE_VARIABLES,
        needs: Needs::RealEngines,
        budget: seconds(90),
    },
    Step {
        title: "plugin for vLLM",
        action: Action::PluginTests,
        variables: &[],
        needs: Needs::RealEngines,
        budget: seconds(60),
    },
    Step {
        title: "vLLM's processor",
        action: Action::ProcessorTests,
        variables: &[],
        needs: Needs::RealEngines,
        budget: seconds(90),
    },
    Step {
        title: "tensors for workers of Dynamo",
        action: Action::Cargo(&[
            "test",
            "--release",
            "--workspace",
            "--test",
            "dynamo",
            "--",
            "dynamo_reads_what_vllm_s_own_processor_makes",
            "--ignored",
        ]),
        variables: &[],
        needs: Needs::RealEnginesAndDynamo,
        budget: seconds(60),
    },
    Step {
        title: "installed wheel",
        action: Action::Wheel,
        variables: &[],
        needs: Needs::RealEngines,
        budget: seconds(90),
    },
    Step { title: "drift", action: Action::Drift, variables: &[], needs: Needs::RealEngines, budget: seconds(60) },
    real_engine_test("vLLM's processor: server", REAL_PROCESSOR, seconds(180)),
    real_engine_test("clients of others", CLIENTS, seconds(90)),
    real_engine_test("real engine: client", REAL_ENGINE, seconds(120)),
    real_engine_test("real engines: server", REAL_VLLM, seconds(720)),
    Step {
        title: "real SGLang",
        action: Action::Cargo(REAL_SGLANG),
        variables: &[],
        needs: Needs::RealSglang,
        budget: seconds(420),
    },
];

const CLIENTS: &[&str] = &real_engine_arguments("clients");
const REAL_ENGINE: &[&str] = &real_engine_arguments("real_engine");
const REAL_PROCESSOR: &[&str] = &real_engine_arguments("real_processor");
const REAL_VLLM: &[&str] = &real_engine_arguments("real_vllm");
const REAL_SGLANG: &[&str] = &real_engine_arguments("real_sglang");

/// One test at a time: engines are big, and slow to start when several do at once.
const fn real_engine_arguments(target: &'static str) -> [&'static str; 8] {
    ["test", "--release", "--workspace", "--test", target, "--", "--ignored", "--test-threads=1"]
}

const fn real_engine_test(title: &'static str, arguments: &'static [&'static str], budget: Option<Duration>) -> Step {
    Step {
        title,
        action: Action::Cargo(arguments),
        variables: &crate::vllm_env::ENGINE_VARIABLES,
        needs: Needs::RealEngines,
        budget,
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

/// The steps with real engines alone.
pub(crate) fn engine_steps() -> Vec<&'static Step> {
    STEPS.iter().filter(|step| step.needs == Needs::RealEngines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(step: &Step) -> &'static [&'static str] {
        match step.action {
            Action::Cargo(arguments) => arguments,
            Action::Manifests
            | Action::AwaitEngines
            | Action::PluginTests
            | Action::ProcessorTests
            | Action::Wheel
            | Action::Drift => &[],
        }
    }

    #[test]
    fn without_engines_every_other_step_stays() {
        let (all, some) = (plan(true, false), plan(false, false));
        let left_out = all.len() - some.len();
        let needs_engines = |step: &&&Step| matches!(step.needs, Needs::RealEngines | Needs::RealEnginesAndDynamo);
        let engine_steps = all.iter().filter(needs_engines).count();
        assert_eq!(left_out, engine_steps);
        assert!(engine_steps >= 3);
        assert!(some.iter().all(|step| ![Needs::RealEngines, Needs::RealSglang].contains(&step.needs)));
        assert_eq!(plan(false, true).len(), some.len() + 1);
    }

    #[test]
    fn what_compiles_shares_profile_and_package_set() {
        for step in plan(true, true) {
            let arguments = arguments(step);
            if let Some("clippy" | "doc" | "test") = arguments.first().copied() {
                assert!(arguments.contains(&"--release"), "{}", step.title);
                assert!(arguments.contains(&"--workspace"), "{}", step.title);
            }
        }
    }

    #[test]
    fn engines_are_awaited_before_the_first_test_that_uses_them() {
        let plan = plan(true, true);
        let await_at = plan.iter().position(|step| matches!(step.action, Action::AwaitEngines));
        let first_use =
            plan.iter().position(|step| step.needs == Needs::RealEngines && matches!(step.action, Action::Cargo(_)));
        assert!(await_at.unwrap() < first_use.unwrap());
    }

    #[test]
    fn every_test_with_real_engines_is_asked_for_and_linted() {
        let plan = plan(true, true);
        for step in &plan {
            let arguments = arguments(step);
            if step.needs == Needs::RealEngines && !arguments.is_empty() {
                assert!(arguments.contains(&"--ignored"), "{}", step.title);
                assert!(step.variables.contains(&("VLLM_TARGET_DEVICE", "cpu")));
            }
        }
        let lints = plan.iter().find(|step| step.title == "lints").unwrap();
        assert!(arguments(lints).contains(&"--all-targets"));
    }

    #[test]
    fn what_runs_tests_has_a_budget_and_finds_them_built() {
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
