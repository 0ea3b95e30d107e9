//! Benchmarks of Chiasm against its peers: `cargo xtask bench-peers BENCH`.
//!
//! A benchmark prepares its inputs and runs a measuring program, which prints rows. Each row gets
//! its target. The rows must be as complete as those of the last page. They are written to
//! `docs/benchmarks`, with a page made from them.
//!
//! | file | contents |
//! |---|---|
//! | `spec` | the properties of a benchmark |
//! | `runs` | the runs of measuring programs |
//! | `row` | rows, targets, and the check for missing rows |
//! | `page`, `templates` | pages made from templates and rows |
//! | `committed` | tests of the files in `docs/benchmarks` |
//! | `pixels` | image preprocessing |
//! | `handoff` | the transfer of tensors into the engine |
//! | `index` | the prefix index |
//! | `door` | the frontend, and streamed answers |
//! | `machines` | an agent between frontend and engine |
//! | `roles` | engines that prefill and engines that decode |
//! | `upstream` | routers in front of servers that are already running |
//! | `processor` | vLLM's processor |
//! | `video`, `captions` | videos that are planned from their containers; whole servers with them |
//! | `serve` | frontend and real engines together |
//! | `programs` | programs that cargo builds, and their output |
//! | `door_peers` | frontends and routers to measure against |
//! | `inputs` | models and pictures |

mod cached;
mod captions;
#[cfg(test)]
mod committed;
mod door;
pub(crate) mod door_peers;
mod handoff;
mod index;
mod inputs;
mod machines;
mod page;
mod pixels;
mod processor;
mod programs;
mod roles;
mod row;
mod runs;
mod serve;
mod spec;
mod upstream;
mod video;

use std::fs;

use crate::bench_peers::row::Row;
use crate::bench_peers::spec::Spec;
use crate::dist::Profile;
use crate::error::Error;
use crate::setup::Setup;

pub(crate) use runs::train;
pub(crate) use spec::Sides as DoorSides;

/// The number of rounds of a short run, which only tests that the benchmark works.
pub(crate) const SHORT_ROUNDS: u32 = 1;
const RESULTS: &str = "docs/benchmarks";

/// A benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bench {
    Pixels,
    Handoff,
    Index,
    Door,
    Stream,
    Processor,
    Serve,
    Machines,
    Roles,
    Upstream,
    Video,
}

impl Bench {
    const ALL: [Self; 11] = [
        Self::Pixels,
        Self::Handoff,
        Self::Index,
        Self::Door,
        Self::Stream,
        Self::Processor,
        Self::Serve,
        Self::Machines,
        Self::Roles,
        Self::Upstream,
        Self::Video,
    ];

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|bench| bench.spec().name == name)
    }

    fn spec(self) -> &'static Spec {
        match self {
            Self::Pixels => &pixels::SPEC,
            Self::Handoff => &handoff::SPEC,
            Self::Index => &index::SPEC,
            Self::Door => &door::DOOR,
            Self::Stream => &door::STREAM,
            Self::Processor => &processor::SPEC,
            Self::Serve => &serve::SPEC,
            Self::Machines => &machines::SPEC,
            Self::Roles => &roles::SPEC,
            Self::Upstream => &upstream::SPEC,
            Self::Video => &video::SPEC,
        }
    }

    /// Returns `true` if the benchmark has a run of [`SHORT_ROUNDS`], whose page is only printed.
    pub(crate) fn has_short_run(self) -> bool {
        self.spec().has_short_run
    }

    /// Returns `true` if the benchmark runs `chiasm` or an example of its crates. Its page then
    /// states the cargo profile.
    pub(crate) fn has_profile(self) -> bool {
        self.spec().template.contains("{{profile}}")
    }

    pub(crate) fn min_rounds(self) -> u32 {
        self.spec().min_rounds
    }
}

/// Runs a benchmark and writes its rows and its page. After a short run, without peers, or in
/// another profile than `dist`, only prints the page. With `json`, also prints the rows.
pub(crate) fn run(
    setup: &Setup,
    bench: Bench,
    rounds: u32,
    json: bool,
    sides: &DoorSides,
) -> Result<(), Error> {
    let spec = bench.spec();
    let mut measured = (spec.measure)(setup, rounds, sides)?;
    if bench.has_profile() {
        let data = programs::profile_data(setup, sides.profile)?;
        let name = sides.profile.name();
        let name = if data.is_some() { format!("{name} (PGO)") } else { name.to_owned() };
        measured.push(Row::new(row::RUN, row::PROFILE, &name, row::OURS));
    }
    let mut rows = with_targets(spec, &measured);
    if bench == Bench::Door {
        rows.extend(door::baseline_mean(&rows));
    }
    if json {
        for line in row::lines(&rows)? {
            println!("{line}");
        }
    }
    let results = setup.workspace.root.join(RESULTS);
    let json_path = results.join(format!("{}.json", spec.name));
    let expected = expected(spec, row::read(&json_path)?, &rows, sides);
    let missing = row::missing(&rows, &expected);
    if !missing.is_empty() {
        return Err(Error::MissingRows { bench: spec.name, rows: missing.join("; ") });
    }
    let page = page::write(spec, &rows)?;
    let is_shipped = sides.profile == Profile::Dist;
    if rounds == SHORT_ROUNDS || !sides.has_peers() || !is_shipped {
        setup.output.print_line(&page)?;
    } else {
        fs::create_dir_all(&results).map_err(Error::io("create", &results))?;
        row::write(&json_path, &rows)?;
        let path = results.join(format!("{}.md", spec.name));
        fs::write(&path, page).map_err(Error::io("write", &path))?;
        let reached = rows.iter().filter(|row| row.ok == Some(true)).count();
        let all = rows.iter().filter(|row| row.ok.is_some()).count();
        let line = format!("{reached} of {all} targets reached, see {}", path.display());
        setup.output.print_line(&line)?;
    }
    let unequal = rows.iter().filter(|row| row.equal == Some(false));
    for (case, peer) in page::distinct(unequal.map(|row| (&row.case, &row.peer_name))) {
        setup.output.print_line(&format!("!!! the outputs differ: {case}, {peer}"))?;
    }
    Ok(())
}

/// Returns the rows with targets.
fn with_targets(spec: &Spec, rows: &[Row]) -> Vec<Row> {
    let with_target = |row: &Row| row.clone().with_target(spec.name, (spec.target)(row, rows));
    rows.iter().map(with_target).collect()
}

/// Returns the rows that a run must have: those of the last page that are not optional. A run in
/// which a peer did not start or a case was skipped would otherwise leave a page that looks
/// complete.
fn expected(spec: &Spec, committed: Vec<Row>, rows: &[Row], sides: &DoorSides) -> Vec<Row> {
    let mut expected = committed;
    if sides.has_peers() {
        expected.retain(|row| !(spec.is_optional)(row, rows));
        expected
    } else {
        door::baseline_rows(&expected)
    }
}
