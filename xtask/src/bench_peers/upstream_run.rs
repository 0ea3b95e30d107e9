//! A run of the bench of routers: what it needs is made ready, the program `door` measures, its results are told.

use crate::bench_peers::{
    Bench, built, door_inputs, door_peers, door_run, router_peers, row, upstream, upstream_note, write,
};
use crate::error::Error;
use crate::nginx;
use crate::vllm_env::Setup;
use std::ffi::OsString;
use std::path::PathBuf;

/// Rounds of a run that is only to see whether all of it works.
pub(crate) const SHORT: u32 = 1;
/// Conversations about shared images, and those of a short run.
const CONVERSATIONS: u32 = 1_000;
const SHORT_CONVERSATIONS: u32 = 200;

/// Runs it. The note of a short run is printed and not kept.
pub(crate) fn run(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let inputs = door_inputs::ensure(setup)?;
    let routers = router_peers::ensure(setup)?;
    let versioned = |(program, version): (PathBuf, String)| {
        let mut text = OsString::from(program);
        text.push(format!(",{version}"));
        PathBuf::from(text)
    };
    let conversations = if rounds == SHORT { SHORT_CONVERSATIONS } else { CONVERSATIONS };
    let flags = [
        ("--python", door_peers::ensure(setup)?.python()),
        ("--dynamo", door_peers::DYNAMO.into()),
        ("--smg", versioned(routers.smg)),
        ("--envoy", versioned(routers.envoy)),
        ("--nginx", versioned(nginx::ensure(setup)?)),
        ("--model", inputs.join("model")),
        ("--pictures", inputs.join("pictures")),
        ("--rounds", rounds.to_string().into()),
        ("--conversations", conversations.to_string().into()),
        ("--chiasm", built::chiasm(setup)?),
    ];
    let (measurements, load) = door_run::measured(setup, "routers", flags)?;
    let rows = upstream::rows(&measurements, rounds, conversations, load);
    let note = upstream_note::write(&rows);
    if rounds == SHORT {
        row::complete(upstream::BENCH, &rows, &upstream::MANDATORY)?;
        return setup.output.say(&note);
    }
    setup.output.say(&write(setup, Bench::Upstream, &rows, &note, json)?)
}
