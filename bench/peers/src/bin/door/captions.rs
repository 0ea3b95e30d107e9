//! Captions of many different clips at once, by whole servers in front of simulated engines, one
//! server after the other.
//!
//! | file | contents |
//! |---|---|
//! | `frontends` | the servers |
//! | `clips` | the clips, and requests about them |
//! | `answer` | the parts of an answer that are compared |
//! | `rows` | the rows of two servers |

mod answer;
mod clips;
mod frontends;
mod rows;

use std::error::Error;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use peers::clock::thread_cpu;
use peers::flags::Flags;
use peers::row::{OURS, neutral};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::client::Connection;
use crate::load::SETTLE;
use crate::memory::PeakMemory;
use crate::side::Side;

use answer::{Answer, Unanswered};
use clips::Clips;
use frontends::Inputs;

/// The name of the case in rows.
const CASE: &str = "captions, servers";
/// The timeout of all answers.
const TIMEOUT: Duration = Duration::from_secs(1_800);

/// The results of a server.
struct Outcome {
    name: String,
    /// The answers to the requests before the measurement, whose pixels are compared.
    before: Vec<Result<Answer, Unanswered>>,
    /// The answers to all requests of the measurement.
    answers: Vec<Result<Answer, Unanswered>>,
    /// The seconds from the first request to the last answer.
    wall: f64,
    /// The seconds of CPU time of the frontend with its processes, of its engine and of the
    /// clients.
    cpu: Cpu,
    peak_bytes: f64,
}

/// Seconds of CPU time.
#[derive(Clone, Copy, Default)]
struct Cpu {
    frontend: f64,
    engine: f64,
    clients: f64,
}

/// Measures all servers and prints the rows.
pub(crate) async fn run(flags: &Flags, scratch: PathBuf) -> Result<(), Box<dyn Error>> {
    raise_file_limit()?;
    let inputs = Inputs::new(flags, scratch)?;
    let clips = Clips::read(&flags.path("--clips")?, flags.parse("--count")?)?;
    neutral("clips at once", "clips")
        .row(CASE, OURS, clips.measured().len() as f64, f64::NAN)
        .print()?;
    neutral("file", "kB").row(CASE, "mean", clips.mean_bytes() / 1e3, f64::NAN).print()?;
    let mut outcomes = Vec::new();
    for start in [frontends::chiasm, frontends::vllm_serve, frontends::vllm_rs] {
        let mut side = start(&inputs)?;
        side.wait_until_ready().await?;
        let outcome = measure(&side, &clips).await?;
        outcome.report();
        outcomes.push(outcome);
    }
    let [ours, peers @ ..] = &*outcomes else { return Ok(()) };
    peers.iter().flat_map(|peer| rows::rows(ours, peer)).try_for_each(|row| row.print())
}

/// Raises the limit of open files, which processes inherit, to the highest that the system allows:
/// hundreds of connections, and as many decoders with pipes.
fn raise_file_limit() -> Result<(), Box<dyn Error>> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

async fn measure(side: &Side, clips: &Clips) -> Result<Outcome, Box<dyn Error>> {
    // Starts processes and fills caches.
    let before = send(side, clips, clips.before(), clips::DESCRIPTION_TOKENS).await?;
    let memory = PeakMemory::start(side.frontend.id());
    let cpu_before = cpu(side)?;
    let start = Instant::now();
    let answers = send(side, clips, clips.measured(), clips::ANSWER_TOKENS).await?;
    let wall = start.elapsed().as_secs_f64();
    tokio::time::sleep(SETTLE).await;
    let cpu_after = cpu(side)?;
    let peak_bytes = memory.stop()? as f64;
    let cpu = Cpu {
        frontend: cpu_after.frontend - cpu_before.frontend,
        engine: cpu_after.engine - cpu_before.engine,
        clients: cpu_after.clients - cpu_before.clients,
    };
    Ok(Outcome { name: side.name.clone(), before, answers, wall, cpu, peak_bytes })
}

/// Returns the CPU time so far. An engine is a process of its frontend or one beside it.
fn cpu(side: &Side) -> Result<Cpu, Box<dyn Error>> {
    let group = side.frontend.group_cpu()?;
    let mut engine = group.engines;
    for program in &side.engines {
        engine += program.group_cpu()?.engines;
    }
    Ok(Cpu { frontend: group.frontend, engine, clients: thread_cpu().as_secs_f64() })
}

/// Sends the requests about these clips, all at once, each over a connection of its own.
async fn send(
    side: &Side,
    clips: &Clips,
    numbers: Range<usize>,
    tokens: u64,
) -> Result<Vec<Result<Answer, Unanswered>>, Box<dyn Error>> {
    let mut connections = Vec::new();
    for number in numbers {
        connections.push((Connection::open(side.address).await?, clips.request(number, tokens)));
    }
    let requests = connections.into_iter().map(async |(mut connection, body)| {
        let answer = connection.chat(body).await;
        let (usage, response) = answer.map_err(|error| Unanswered(error.to_string()))?;
        Answer::parse(usage, &response.text)
    });
    let answers = tokio::time::timeout(TIMEOUT, join_all(requests)).await;
    answers.map_err(|_| side.frontend.failed("has not answered in time"))
}

impl Outcome {
    /// Returns the number of answered requests of the measurement.
    fn answered(&self) -> f64 {
        self.answers.iter().flatten().count() as f64
    }

    /// Prints the first error and the rate, for whoever watches.
    fn report(&self) {
        let all = self.before.iter().chain(&self.answers);
        if let Some(error) = all.filter_map(|answer| answer.as_ref().err()).next() {
            eprintln!("  an error of {}: {error}", self.name);
        }
        let Self { name, wall, cpu, peak_bytes, .. } = self;
        eprintln!(
            "  {name}: {} clips in {wall:.1} s, with {:.1} s of CPU time and {:.2} GB",
            self.answered(),
            cpu.frontend,
            peak_bytes / 1e9,
        );
    }
}
