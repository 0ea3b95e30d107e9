//! Runs the benchmarks of the program `door`: prepares the inputs, measures, and writes rows and
//! pages.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::bench_peers::door::{self, BASELINE};
use crate::bench_peers::load::Load;
use crate::bench_peers::measured::Measurement;
use crate::bench_peers::{
    Bench, SHORT_ROUNDS, built, door_inputs, door_note, door_peers, finish, machines, peers, roles,
    router_peers, row, stream, turbojpeg, upstream, write,
};
use crate::error::Error;
use crate::setup::Setup;
use crate::{etcd, nginx};

/// The number of conversations about shared images.
const CONVERSATIONS: u32 = 1_000;
/// The number of such conversations in a short run.
const SHORT_CONVERSATIONS: u32 = 200;

type Flags = Vec<(&'static str, PathBuf)>;

/// The frontends to measure, and the number of engines of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sides {
    /// A `chiasm` of another commit.
    pub(crate) baseline: Option<PathBuf>,
    /// Measures the peers even if there is a baseline.
    pub(crate) with_peers: bool,
    /// The number of simulated engines of each `chiasm`, in cases in which engines do not wait.
    pub(crate) engines: u32,
}

impl Default for Sides {
    fn default() -> Self {
        // With small requests one engine is busier than our frontend, which would wait for it. Two
        // cores are enough for three engines.
        Self { baseline: None, with_peers: false, engines: 3 }
    }
}

impl Sides {
    fn has_peers(&self) -> bool {
        self.with_peers || self.baseline.is_none()
    }

    /// Returns the beginnings of the names of the other sides.
    fn others(&self) -> Vec<&'static str> {
        let peers = self.has_peers().then_some(door::PEERS);
        peers.into_iter().flatten().chain(self.baseline.is_some().then_some(BASELINE)).collect()
    }
}

/// Runs the program `door` with the command `what`. Returns its results and the load before the
/// run.
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

/// Returns the flags that all benchmarks of `door` have in common.
fn flags(setup: &Setup, rounds: u32) -> Result<Flags, Error> {
    let inputs = door_inputs::ensure(setup)?;
    Ok(vec![
        ("--chiasm", built::chiasm(setup)?),
        ("--model", inputs.join("model")),
        ("--pictures", inputs.join("pictures")),
        ("--rounds", rounds.to_string().into()),
    ])
}

/// Measures frontends. Writes the page if peers were measured; a comparison with a baseline is only
/// printed.
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
        let peers = door_peers::ensure(setup)?;
        flags.extend([
            ("--vllm-rs", peers.vllm_rs()),
            ("--vllm", door_peers::VLLM.into()),
            // Without libturbojpeg vllm-rs would use a slower JPEG decoder.
            ("--libraries", turbojpeg::ensure(setup)?),
            ("--python", peers.python()),
            ("--dynamo", door_peers::DYNAMO.into()),
        ]);
    }
    flags.extend(sides.baseline.iter().map(|path| ("--baseline", path.clone())));
    flags.push(("--engines", sides.engines.to_string().into()));
    let (measurements, load) =
        measure(setup, if bench == Bench::Stream { "streams" } else { "run" }, flags)?;
    if bench == Bench::Stream {
        let rows = stream::rows(&measurements, rounds, load);
        let text = if sides.has_peers() {
            write(setup, bench, &rows, json)?
        } else {
            bench.page(&rows)?
        };
        return setup.output.print_line(&text);
    }
    let rows = door::rows(&measurements, rounds, sides.engines, load);
    door::check_complete(&rows, &sides.others())?;
    if sides.baseline.is_some() {
        setup.output.print_line(&door_note::baseline(&rows))?;
    }
    if sides.has_peers() {
        return setup.output.print_line(&write(setup, bench, &rows, json)?);
    }
    for line in row::lines(&rows).into_iter().flatten().filter(|_| json) {
        println!("{line}");
    }
    Ok(())
}

/// Measures fleets: agents, roles or routers. The page of a short run is only printed.
pub(crate) fn run_fleets(
    setup: &Setup,
    bench: Bench,
    rounds: u32,
    json: bool,
) -> Result<(), Error> {
    let conversations = if rounds == SHORT_ROUNDS { SHORT_CONVERSATIONS } else { CONVERSATIONS };
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
        let missing =
            if rounds == SHORT_ROUNDS { Vec::new() } else { machines::missing_on_shaped(&rows) };
        if !missing.is_empty() {
            return Err(Error::MissingRows { bench: machines::BENCH, rows: missing.join("; ") });
        }
    } else {
        row::check_complete(bench.name(), &rows, bench.mandatory())?;
    }
    finish(setup, bench, &rows, rounds, json)
}

/// Returns a program and its version as a value `PROGRAM,VERSION` of a flag.
fn versioned((program, version): (PathBuf, String)) -> PathBuf {
    let mut text = OsString::from(program);
    text.push(format!(",{version}"));
    PathBuf::from(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_join_baseline_only_with_flag() {
        assert_eq!(Sides::default().others(), ["vllm-rs", "Dynamo"]);
        let sides = Sides { baseline: Some("other".into()), ..Sides::default() };
        assert_eq!(sides.others(), [BASELINE]);
        assert_eq!(Sides { with_peers: true, ..sides }.others(), ["vllm-rs", "Dynamo", BASELINE]);
    }
}
