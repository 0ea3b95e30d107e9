//! What `cargo xtask test` does, in its order. A new check is a new line in the table.
//!
//! All steps use the release profile, and the whole workspace with one set of features: so dependencies are checked
//! once (clippy and doc share that) and compiled once. `-p CRATE` instead would pick other features of the dependencies
//! and compile many of them a second time.

/// One thing that has to pass.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) title: &'static str,
    pub(crate) action: Action,
    /// Variables set for this step.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    pub(crate) needs: Needs,
}

/// How a step is done.
#[derive(Debug)]
pub(crate) enum Action {
    /// cargo with these arguments.
    Cargo(&'static [&'static str]),
    /// Waiting for the environment and the models that are being made in the background.
    AwaitEngines,
    /// The tests of vLLM's plugin, in that environment.
    PluginTests,
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
    /// The real vLLM and the tiny models.
    RealEngines,
}

/// The ARM target whose vector code is compiled, though not run.
pub(crate) const ARM_TARGET: &str = "aarch64-unknown-linux-gnu";

/// Turns on the tests that start real engines. Lints see them too, so they can't rot.
macro_rules! real_engine_features {
    () => {
        "--features=chiasm-engine/real-engines,chiasm/real-engines"
    };
}

const STEPS: &[Step] = &[
    Step {
        title: "format",
        action: Action::Cargo(&["fmt", "--all", "--check"]),
        variables: &[],
        needs: Needs::Toolchain,
    },
    Step {
        title: "lints",
        action: Action::Cargo(&[
            "clippy",
            "--release",
            "--workspace",
            "--all-targets",
            real_engine_features!(),
            "--",
            "-Dwarnings",
        ]),
        variables: &[],
        needs: Needs::Toolchain,
    },
    Step {
        title: "docs",
        action: Action::Cargo(&["doc", "--release", "--workspace", "--no-deps"]),
        variables: &[("RUSTDOCFLAGS", "-Dwarnings")],
        needs: Needs::Toolchain,
    },
    Step {
        title: "licences, bans, sources",
        action: Action::Cargo(&["deny", "check", "--hide-inclusion-graph", "bans", "licenses", "sources"]),
        variables: &[],
        needs: Needs::CargoDeny,
    },
    Step {
        title: "vector code for ARM compiles",
        action: Action::Cargo(&["check", "--release", "--package=chiasm-vision", "--target", ARM_TARGET]),
        variables: &[("RUSTFLAGS", "-Dwarnings")],
        needs: Needs::ArmTarget,
    },
    Step {
        title: "tests",
        action: Action::Cargo(&["test", "--release", "--workspace"]),
        variables: &[],
        needs: Needs::Toolchain,
    },
    Step { title: "vLLM and models ready", action: Action::AwaitEngines, variables: &[], needs: Needs::RealEngines },
    Step { title: "plugin for vLLM", action: Action::PluginTests, variables: &[], needs: Needs::RealEngines },
    real_engine_test("real engine: client", REAL_ENGINE),
    real_engine_test("real engines: server", REAL_VLLM),
];

const REAL_ENGINE: &[&str] = &real_engine_arguments("real_engine");
const REAL_VLLM: &[&str] = &real_engine_arguments("real_vllm");

/// One test at a time: engines are big, and slow to start when several do at once.
const fn real_engine_arguments(target: &'static str) -> [&'static str; 8] {
    ["test", "--release", "--workspace", real_engine_features!(), "--test", target, "--", "--test-threads=1"]
}

const fn real_engine_test(title: &'static str, arguments: &'static [&'static str]) -> Step {
    Step {
        title,
        action: Action::Cargo(arguments),
        variables: &crate::vllm_env::ENGINE_VARIABLES,
        needs: Needs::RealEngines,
    }
}

/// The steps of a run with or without the real engines.
pub(crate) fn plan(real_engines: bool) -> Vec<&'static Step> {
    STEPS.iter().filter(|step| real_engines || step.needs != Needs::RealEngines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(step: &Step) -> &'static [&'static str] {
        match step.action {
            Action::Cargo(arguments) => arguments,
            Action::AwaitEngines | Action::PluginTests => &[],
        }
    }

    #[test]
    fn without_engines_every_other_step_stays() {
        let (all, some) = (plan(true), plan(false));
        let left_out = all.len() - some.len();
        let engine_steps = all.iter().filter(|step| step.needs == Needs::RealEngines).count();
        assert_eq!(left_out, engine_steps);
        assert!(engine_steps >= 3);
        assert!(some.iter().all(|step| step.needs != Needs::RealEngines));
    }

    #[test]
    fn what_compiles_shares_profile_and_package_set() {
        for step in plan(true) {
            let arguments = arguments(step);
            if let Some("clippy" | "doc" | "test") = arguments.first().copied() {
                assert!(arguments.contains(&"--release"), "{}", step.title);
                assert!(arguments.contains(&"--workspace"), "{}", step.title);
            }
        }
    }

    #[test]
    fn engines_are_awaited_before_the_first_test_that_uses_them() {
        let plan = plan(true);
        let await_at = plan.iter().position(|step| matches!(step.action, Action::AwaitEngines));
        let first_use =
            plan.iter().position(|step| step.needs == Needs::RealEngines && matches!(step.action, Action::Cargo(_)));
        assert!(await_at.unwrap() < first_use.unwrap());
    }

    #[test]
    fn every_test_with_real_engines_turns_their_feature_on_and_is_linted_with_it() {
        let plan = plan(true);
        for step in &plan {
            let arguments = arguments(step);
            if step.needs == Needs::RealEngines && !arguments.is_empty() {
                assert!(arguments.contains(&real_engine_features!()), "{}", step.title);
                assert!(step.variables.contains(&("VLLM_TARGET_DEVICE", "cpu")));
            }
        }
        let lints = plan.iter().find(|step| step.title == "lints").unwrap();
        assert!(arguments(lints).contains(&real_engine_features!()));
    }
}
