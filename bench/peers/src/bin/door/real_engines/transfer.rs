//! The modes in which images reach engines: shared memory on and off, by our frontend and by
//! vLLM's. In each round all pictures are new, so each has a first request and repeated ones.

use std::collections::BTreeSet;
use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;

use peers::flags::Flags;
use peers::numbers::{median, quantile};
use peers::row::{Metric, OURS, Row, less, more};

use crate::load::SETTLE;
use crate::pieces::Pieces;
use crate::program::GroupCpu;

use super::side::{self, ENGINES, Inputs, Side};
use super::{ANSWER_TOKENS, CLIENTS, Workload, send};

/// The additional flags of all engines: the second one of [`CASES`](super::CASES).
const ENGINE_FLAGS: &[&str] = super::CASES[1].1;

type TimesFn = fn(&Times) -> Vec<f64>;

const QUANTILES: [f64; 3] = [0.5, 0.9, 0.99];
/// The times of a request, with the names of their [`QUANTILES`].
const METRICS: [([&str; 3], TimesFn); 3] = [
    (["TTFT p50", "TTFT p90", "TTFT p99"], Times::ttft),
    (["TPOT p50", "TPOT p90", "TPOT p99"], Times::tpot),
    (["ITL p50", "ITL p90", "ITL p99"], Times::itl),
];

/// A mode of transfer. vLLM has its shared memory only without data parallelism, so its modes are
/// several frontends, each with an engine.
struct Mode {
    name: String,
    sides: Vec<Side>,
    rounds: Vec<ModeRound>,
}

/// A round of a mode.
struct ModeRound {
    /// The texts of each request, and whether it was the first with its picture at its frontend.
    requests: Vec<(Times, bool)>,
    /// The seconds from the first request to the last token.
    wall: f64,
    cpu: GroupCpu,
}

/// The milliseconds from sending a request to each text.
struct Times(Vec<f64>);

impl Times {
    fn ttft(&self) -> Vec<f64> {
        self.0.iter().take(1).copied().collect()
    }

    /// Returns the time per token after the first.
    fn tpot(&self) -> Vec<f64> {
        let ends = self.0.first().zip(self.0.last());
        ends.map(|(first, last)| (last - first) / (ANSWER_TOKENS - 1) as f64).into_iter().collect()
    }

    fn itl(&self) -> Vec<f64> {
        self.0.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

/// Measures all modes and prints the rows.
pub(super) async fn run(
    flags: &Flags,
    scratch: &Path,
    rounds: usize,
) -> Result<(), Box<dyn Error>> {
    eprintln!("transfer of images");
    let inputs = Inputs::new(flags, ENGINE_FLAGS, scratch.join("transfer"))?;
    let mut workload = Workload::new(&flags.path("--pictures")?)?;
    let mut modes = Vec::new();
    for (name, transfer) in [(OURS, "shm"), ("chiasm, in messages", "inline")] {
        let side = side::chiasm_with(&inputs, name, &["--mm-transfer", transfer])?;
        modes.push(Mode::start(name.to_owned(), vec![side]).await?);
    }
    for (name, extra_flags) in [
        ("vllm serve, in messages", &[][..]),
        ("vllm serve, shared memory cache", &["--mm-processor-cache-type", "shm"]),
        ("vllm serve, tensor IPC", &["--mm-tensor-ipc", "torch_shm"]),
    ] {
        let sides = (0..ENGINES).map(|engine| {
            side::vllm_serve_alone(&inputs, &format!("{name}, engine {engine}"), extra_flags)
        });
        let sides: Result<Vec<Side>, _> = sides.collect();
        modes.push(Mode::start(name.to_owned(), sides?).await?);
    }
    // The first round warms up.
    for round in 0..=rounds {
        eprintln!("round {round} of {rounds}");
        workload.renew_pictures();
        let requests = workload.draw();
        let count = modes.len();
        for turn in 0..count {
            modes[(turn + round) % count].measure(&requests).await?;
        }
    }
    for mode in &mut modes {
        mode.rounds.remove(0);
    }
    let [ours, others @ ..] = &*modes else { return Ok(()) };
    others.iter().flat_map(|other| rows(ours, other)).try_for_each(|row| row.print())
}

impl Mode {
    /// Waits until all frontends and engines are ready.
    async fn start(name: String, mut sides: Vec<Side>) -> Result<Self, Box<dyn Error>> {
        for side in &mut sides {
            side.wait().await?;
        }
        Ok(Self { name, sides, rounds: Vec::new() })
    }

    /// Sends the requests, each of which has the number of its picture.
    async fn measure(&mut self, requests: &[(usize, Pieces)]) -> Result<(), Box<dyn Error>> {
        let addresses: Vec<SocketAddr> = self.sides.iter().map(|side| side.address).collect();
        let (pictures, bodies): (Vec<usize>, Vec<Pieces>) = requests.iter().cloned().unzip();
        let before = self.cpu()?;
        let answered = send(&addresses, &bodies, CLIENTS).await;
        let answered =
            answered.map_err(|error| self.sides[0].program.failed(&format!("failed: {error}")))?;
        tokio::time::sleep(SETTLE).await;
        let after = self.cpu()?;
        let is_wrong = |tokens| tokens != ANSWER_TOKENS;
        if answered.results.iter().any(|reply| is_wrong(reply.usage.completion_tokens)) {
            return Err(format!("{}: an answer has another length", self.name).into());
        }
        // Frontends know the pictures of their own requests only.
        let mut seen = BTreeSet::new();
        let requests = answered.results.into_iter().zip(pictures).map(|(reply, picture)| {
            let is_first = seen.insert((reply.client % addresses.len(), picture));
            (Times(reply.times_ms), is_first)
        });
        let requests = requests.collect();
        let cpu = GroupCpu {
            frontend: after.frontend - before.frontend,
            engines: after.engines - before.engines,
        };
        let round = ModeRound { requests, wall: answered.wall.as_secs_f64(), cpu };
        eprintln!("  {}: {:.1} requests per second", self.name, round.rate());
        self.rounds.push(round);
        Ok(())
    }

    fn cpu(&self) -> Result<GroupCpu, Box<dyn Error>> {
        let mut sum = GroupCpu::default();
        for side in &self.sides {
            let cpu = side.program.group_cpu()?;
            sum.frontend += cpu.frontend;
            sum.engines += cpu.engines;
        }
        Ok(sum)
    }

    /// Returns the sorted times of all requests that are the first with their picture, or of all
    /// others.
    fn times(&self, is_first: bool, times: TimesFn) -> Vec<f64> {
        let requests = self.rounds.iter().flat_map(|round| &round.requests);
        let requests = requests.filter(|(_, first)| *first == is_first);
        let mut times: Vec<f64> = requests.flat_map(|(request, _)| times(request)).collect();
        times.sort_by(f64::total_cmp);
        times
    }

    fn total(&self) -> [(Metric, f64); 3] {
        let requests = self.rounds.iter().map(|round| round.requests.len()).sum::<usize>() as f64;
        let per_request = |cpu: fn(&GroupCpu) -> f64| {
            1e3 * self.rounds.iter().map(|round| cpu(&round.cpu)).sum::<f64>() / requests
        };
        [
            (
                more("requests per second", "requests/s"),
                median(self.rounds.iter().map(ModeRound::rate).collect()),
            ),
            (less("frontend's CPU per request", "ms"), per_request(|cpu| cpu.frontend)),
            (less("engines' CPU per request", "ms"), per_request(|cpu| cpu.engines)),
        ]
    }
}

impl ModeRound {
    fn rate(&self) -> f64 {
        self.requests.len() as f64 / self.wall
    }
}

/// Returns the rows of our mode in comparison with another one.
fn rows(ours: &Mode, other: &Mode) -> Vec<Row> {
    let totals = ours.total().into_iter().zip(other.total());
    let mut rows: Vec<Row> = totals
        .map(|((metric, ours), (_, theirs))| {
            metric.row("transfer, all requests", &other.name, ours, theirs)
        })
        .collect();
    for (case, is_first) in [("transfer, first request", true), ("transfer, repeated", false)] {
        for (names, times) in METRICS {
            let [ours, theirs] = [ours, other].map(|mode| mode.times(is_first, times));
            rows.extend(names.into_iter().zip(QUANTILES).map(|(name, part)| {
                let [ours, theirs] = [&ours, &theirs].map(|times| quantile(times, part));
                less(name, "ms").row(case, &other.name, ours, theirs)
            }));
        }
    }
    rows
}
