//! A run of the bench of other machines: what it needs is made ready, the program `door` measures, its results are told.

use crate::bench_peers::{Bench, built, door_inputs, door_peers, door_run, machines, machines_note, write};
use crate::error::Error;
use crate::etcd;
use crate::vllm_env::Setup;

/// Rounds of a run that is only to see whether all of it works.
pub(crate) const SHORT: u32 = 1;

/// Runs it. The note of a short run is printed and not kept.
pub(crate) fn run(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let inputs = door_inputs::ensure(setup)?;
    let flags = [
        ("--python", door_peers::ensure(setup)?.python()),
        ("--dynamo", door_peers::DYNAMO.into()),
        ("--etcd", etcd::ensure(setup)?),
        ("--model", inputs.join("model")),
        ("--pictures", inputs.join("pictures")),
        ("--rounds", rounds.to_string().into()),
        ("--chiasm", built::chiasm(setup)?),
    ];
    let (measurements, load) = door_run::measured(setup, "machines", flags)?;
    let rows = machines::rows(&measurements, rounds, load);
    let note = machines_note::write(&rows);
    if rounds == SHORT {
        return setup.output.say(&note);
    }
    let missing = machines::missing_on_shaped(&rows);
    if !missing.is_empty() {
        return Err(Error::MissingRows { bench: machines::BENCH, rows: missing.join("; ") });
    }
    setup.output.say(&write(setup, Bench::Machines, &rows, &note, json)?)
}
