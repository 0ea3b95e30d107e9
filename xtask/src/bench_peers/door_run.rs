//! One run of the benchmarks `door` and `stream`: what they need is made ready, the program `door` measures, its results are told.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::bench_peers::door::{self, BASELINE};
use crate::bench_peers::load::Load;
use crate::bench_peers::{
    Bench, built, door_inputs, door_note, door_peers, peers, row, stream, stream_note, turbojpeg, write,
};
use crate::error::Error;
use crate::vllm_env::Setup;

/// The frontends to measure, and the number of engines behind ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sides {
    /// A `chiasm` of another commit.
    pub(crate) baseline: Option<PathBuf>,
    /// Whether peers are measured although there is a baseline.
    pub(crate) with_peers: bool,
    /// Simulated engines of each `chiasm`, where they wait for nothing.
    pub(crate) engines: u32,
}

impl Default for Sides {
    fn default() -> Self {
        // One is busier with small requests than our frontend, which would wait for it; two cores have room for three.
        Self { baseline: None, with_peers: false, engines: 3 }
    }
}

impl Sides {
    fn has_peers(&self) -> bool {
        self.with_peers || self.baseline.is_none()
    }

    /// How the names of those that we are compared with begin.
    fn others(&self) -> Vec<&'static str> {
        let peers = self.has_peers().then_some(door::PEERS);
        peers.into_iter().flatten().chain(self.baseline.is_some().then_some(BASELINE)).collect()
    }
}

/// What the program `door` measures when it is asked for this, and the machine's load before, if that can be told.
pub(crate) fn measured(
    setup: &Setup,
    what: &str,
    flags: impl IntoIterator<Item = (&'static str, PathBuf)>,
) -> Result<(Vec<door::Measurement>, Option<Load>), Error> {
    let mut measure = Command::new(peers::build(setup, door::BENCH)?);
    measure.arg(what).stdin(Stdio::null());
    for (flag, value) in flags {
        measure.arg(flag).arg(value);
    }
    let load = Load::now();
    Ok((door::parse(&peers::lines(&mut measure, "the program door")?)?, load))
}

/// Runs it. The note is written if peers were measured; a comparison with a baseline is told and not kept.
pub(crate) fn run(setup: &Setup, bench: Bench, rounds: u32, json: bool, sides: &Sides) -> Result<(), Error> {
    if let Some(path) = sides.baseline.as_ref().filter(|path| !path.is_file()) {
        return Err(Error::MissingFile { path: path.clone() });
    }
    let mut flags: Vec<(&str, PathBuf)> = Vec::new();
    if sides.has_peers() {
        let others = door_peers::ensure(setup)?;
        flags.extend([
            ("--vllm-rs", others.vllm_rs()),
            ("--vllm", door_peers::VLLM.into()),
            // Without it vllm-rs would decode JPEG files with something slower.
            ("--libraries", turbojpeg::ensure(setup)?),
            ("--python", others.python()),
            ("--dynamo", door_peers::DYNAMO.into()),
        ]);
    }
    flags.extend(sides.baseline.iter().map(|path| ("--baseline", path.clone())));
    let inputs = door_inputs::ensure(setup)?;
    let program = peers::build(setup, door::BENCH)?;
    flags.extend([
        ("--chiasm", built::chiasm(setup)?),
        ("--engines", sides.engines.to_string().into()),
        ("--model", inputs.join("model")),
        ("--pictures", inputs.join("pictures")),
        ("--rounds", rounds.to_string().into()),
    ]);
    let mut measure = Command::new(program);
    measure.arg(if bench == Bench::Stream { "streams" } else { "run" }).stdin(Stdio::null());
    for (flag, value) in flags {
        measure.arg(flag).arg(value);
    }
    let load = Load::now();
    let measurements = door::parse(&peers::lines(&mut measure, "the program door")?)?;
    if bench == Bench::Stream {
        let rows = stream::rows(&measurements, rounds, load);
        let note = stream_note::write(&rows);
        if sides.has_peers() {
            return setup.output.say(&write(setup, bench, &rows, &note, json)?);
        }
        return setup.output.say(&note);
    }
    let rows = door::rows(&measurements, rounds, sides.engines, load);
    door::complete(&rows, &sides.others())?;
    if sides.baseline.is_some() {
        setup.output.say(&door_note::baseline(&rows))?;
    }
    if sides.has_peers() {
        let written = write(setup, Bench::Door, &rows, &door_note::write(&rows), json)?;
        return setup.output.say(&written);
    }
    for line in row::lines(&rows).into_iter().flatten().filter(|_| json) {
        println!("{line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_a_baseline_peers_take_part_when_told() {
        assert_eq!(Sides::default().others(), ["vllm-rs", "Dynamo"]);
        let sides = Sides { baseline: Some("other".into()), ..Sides::default() };
        assert_eq!(sides.others(), [BASELINE]);
        assert_eq!(Sides { with_peers: true, ..sides }.others(), ["vllm-rs", "Dynamo", BASELINE]);
    }
}
