//! The soak test of `crates/chiasm/tests/soak.rs`, for a chosen number of minutes.

use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;

/// The cargo arguments of the soak test, which `cargo xtask test` runs too.
pub(crate) const ARGUMENTS: &str =
    "test --workspace --test testsuite -- soak::random_faults --ignored --nocapture";

/// Runs the soak test. Without `seed` the test draws one.
pub(crate) fn run(setup: &Setup, minutes: u32, seed: Option<u64>) -> Result<(), Error> {
    let mut cargo = cargo(&setup.workspace);
    cargo
        .args(ARGUMENTS.split(' '))
        .env("CHIASM_SOAK_SECONDS", (u64::from(minutes) * 60).to_string());
    if let Some(seed) = seed {
        cargo.env("CHIASM_TEST_SEED", seed.to_string());
    }
    child::run(&mut cargo, "the soak", &setup.output, &setup.cancel)
}
