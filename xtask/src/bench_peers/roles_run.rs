//! A run of the bench of roles: what it needs is made ready, the program `door` measures, its results are told.

use crate::bench_peers::{Bench, built, door_inputs, door_peers, door_run, roles, roles_note, row, write};
use crate::error::Error;
use crate::vllm_env::Setup;

/// Rounds of a run that is only to see whether all of it works.
pub(crate) const SHORT: u32 = 1;

/// Runs it. The note of a short run is printed and not kept.
pub(crate) fn run(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let inputs = door_inputs::ensure(setup)?;
    let flags = [
        ("--python", door_peers::ensure(setup)?.python()),
        ("--dynamo", door_peers::DYNAMO.into()),
        ("--model", inputs.join("model")),
        ("--pictures", inputs.join("pictures")),
        ("--rounds", rounds.to_string().into()),
        ("--chiasm", built::chiasm(setup)?),
    ];
    let (measurements, load) = door_run::measured(setup, "roles", flags)?;
    let rows = roles::rows(&measurements, rounds, load);
    let note = roles_note::write(&rows);
    if rounds == SHORT {
        row::complete(roles::BENCH, &rows, &roles::MANDATORY)?;
        return setup.output.say(&note);
    }
    setup.output.say(&write(setup, Bench::Roles, &rows, &note, json)?)
}
