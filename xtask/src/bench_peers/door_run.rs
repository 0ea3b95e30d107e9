//! A run of the benchmarks that the program `door` measures: inputs are made, it measures, its
//! results become rows.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::bench_peers::door::{self, BASELINE};
use crate::bench_peers::load::Load;
use crate::bench_peers::measured::Measurement;
use crate::bench_peers::{
    Bench, SHORT, built, door_inputs, door_note, door_peers, finish, machines, peers, roles,
    router_peers, row, stream, turbojpeg, upstream, write,
};
use crate::error::Error;
use crate::setup::Setup;
use crate::{etcd, nginx};

/// Conversations about shared images, and those of a short run.
const CONVERSATIONS: u32 = 1_000;
const SHORT_CONVERSATIONS: u32 = 200;

type Flags = Vec<(&'static str, PathBuf)>;

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
        // One is busier with small requests than our frontend, which would wait for it; two cores
        // have room for three.
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

/// Has the program `door` measure `what`. Returns its results, and the machine's load before.
fn measure(
    setup: &Setup,
    what: &str,
    flags: Flags,
) -> Result<(Vec<Measurement>, Option<Load>), Error> {
    let mut measure = Command::new(peers::build(setup, door::BENCH)?);
    measure.arg(what).stdin(Stdio::null());
    for (flag, value) in flags {
        measure.arg(flag).arg(value);
    }
    let load = Load::now();
    Ok((peers::results(&mut measure, "the program door")?, load))
}

/// Returns the flags that all its benchmarks have.
fn flags(setup: &Setup, rounds: u32) -> Result<Flags, Error> {
    let inputs = door_inputs::ensure(setup)?;
    Ok(vec![
        ("--chiasm", built::chiasm(setup)?),
        ("--model", inputs.join("model")),
        ("--pictures", inputs.join("pictures")),
        ("--rounds", rounds.to_string().into()),
    ])
}

/// Measures frontends. The page is written if peers were measured; a comparison with a baseline is
/// only printed.
pub(crate) fn run(
    setup: &Setup,
    bench: Bench,
    rounds: u32,
    json: bool,
    sides: &Sides,
) -> Result<(), Error> {
    if let Some(path) = sides.baseline.as_ref().filter(|path| !path.is_file()) {
        return Err(Error::MissingFile { path: path.clone() });
    }
    let mut flags = flags(setup, rounds)?;
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
    flags.push(("--engines", sides.engines.to_string().into()));
    let (measurements, load) =
        measure(setup, if bench == Bench::Stream { "streams" } else { "run" }, flags)?;
    if bench == Bench::Stream {
        let rows = stream::rows(&measurements, rounds, load);
        let said = if sides.has_peers() {
            write(setup, bench, &rows, json)?
        } else {
            bench.page(&rows)?
        };
        return setup.output.say(&said);
    }
    let rows = door::rows(&measurements, rounds, sides.engines, load);
    door::complete(&rows, &sides.others())?;
    if sides.baseline.is_some() {
        setup.output.say(&door_note::baseline(&rows))?;
    }
    if sides.has_peers() {
        return setup.output.say(&write(setup, bench, &rows, json)?);
    }
    for line in row::lines(&rows).into_iter().flatten().filter(|_| json) {
        println!("{line}");
    }
    Ok(())
}

/// Measures fleets: agents, roles or routers. The page of a short run is printed and not kept.
pub(crate) fn run_fleets(
    setup: &Setup,
    bench: Bench,
    rounds: u32,
    json: bool,
) -> Result<(), Error> {
    let conversations = if rounds == SHORT { SHORT_CONVERSATIONS } else { CONVERSATIONS };
    let mut flags = flags(setup, rounds)?;
    flags.extend([
        ("--python", door_peers::ensure(setup)?.python()),
        ("--dynamo", door_peers::DYNAMO.into()),
    ]);
    let what = match bench {
        Bench::Machines => {
            flags.push(("--etcd", etcd::ensure(setup)?));
            "machines"
        }
        Bench::Upstream => {
            let routers = router_peers::ensure(setup)?;
            flags.extend([
                ("--smg", versioned(routers.smg)),
                ("--envoy", versioned(routers.envoy)),
                ("--nginx", versioned(nginx::ensure(setup)?)),
                ("--conversations", conversations.to_string().into()),
            ]);
            "routers"
        }
        _ => "roles",
    };
    let (measurements, load) = measure(setup, what, flags)?;
    let rows = match bench {
        Bench::Machines => machines::rows(&measurements, rounds, load),
        Bench::Upstream => upstream::rows(&measurements, rounds, conversations, load),
        _ => roles::rows(&measurements, rounds, load),
    };
    if bench == Bench::Machines {
        let missing = if rounds == SHORT { Vec::new() } else { machines::missing_on_shaped(&rows) };
        if !missing.is_empty() {
            return Err(Error::MissingRows { bench: machines::BENCH, rows: missing.join("; ") });
        }
    } else {
        row::complete(bench.name(), &rows, bench.mandatory())?;
    }
    finish(setup, bench, &rows, rounds, json)
}

fn versioned((program, version): (PathBuf, String)) -> PathBuf {
    let mut text = OsString::from(program);
    text.push(format!(",{version}"));
    PathBuf::from(text)
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
