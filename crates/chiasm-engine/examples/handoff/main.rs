//! How long the pixels of an image take from the frontend's memory into the engine, in the ways
//! that there are: the measuring half of `cargo xtask bench-peers handoff`, which turns what this
//! prints into rows.
//!
//! ```text
//! handoff --python FILE --scripts DIR --plugin DIR --rounds N
//! ```
//!
//! The first line out names versions, each other one is a [`Measurement`]. In a round each way
//! hands each image over once, in an order that is shuffled for each round; the first rounds warm
//! up and do not count. Right before each image a tiny one goes the same way, so that all code that
//! has a part in it is in the caches, as it is while an engine is busy.
//!
//! | file | is |
//! |---|---|
//! | `images` | what is handed over |
//! | `frontend` | our ways: `EngineClient` to an engine that is all real up to its receiver cache |
//! | `peers` | other ways, and one copy |
//! | `python` | child processes; their scripts are in `bench/handoff` |
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a measurement")]

mod frontend;
mod images;
mod peers;
mod python;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use chiasm_engine::SocketDir;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use crate::frontend::Frontend;
use crate::images::{Image, PRIMER, SIZES, splitmix64};
use crate::peers::{Peers, Ring, memcpy};

type Failure = Box<dyn Error + Send + Sync>;

/// Enough for the arena to be grown, and for caches to be full so that slots come back.
const WARM_UP: usize = 6;
/// Longer than any way takes, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(30);

/// A way to hand an image over, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// A slot of the arena is taken and written, its handle is sent.
    Shm,
    /// The engine has the image already.
    Cached,
    /// There is no image, only the prompt.
    Text,
    /// Our client sends the tensor as a frame of the message.
    Inline,
    /// vLLM's own encoder and pyzmq send the tensor as a frame of the message.
    Aux,
    /// A segment of its own, pickled.
    Pickle,
    /// A segment of its own, in vLLM's encoding.
    Msgpack,
    /// One copy within this process.
    Memcpy,
    /// The same into memory that is used in turn, as slots are: none of it is in the caches any
    /// more.
    MemcpyInTurn,
    /// A slot of an arena that was never used is taken and written. Nothing is sent.
    FirstUse,
}

const WAYS: [Way; 10] = [
    Way::Shm,
    Way::Cached,
    Way::Text,
    Way::Inline,
    Way::Aux,
    Way::Pickle,
    Way::Msgpack,
    Way::Memcpy,
    Way::MemcpyInTurn,
    Way::FirstUse,
];

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Cached => "cached",
            Self::Text => "text",
            Self::Inline => "inline",
            Self::Aux => "aux",
            Self::Pickle => "pickle",
            Self::Msgpack => "msgpack",
            Self::Memcpy => "memcpy",
            Self::MemcpyInTurn => "memcpy in turn",
            Self::FirstUse => "first use",
        }
    }
}

/// One image handed over in one way.
struct Handoff {
    /// Milliseconds between the frontend's having the pixels and the engine's having the tensor.
    ms: f64,
    /// The part of it in which the frontend writes the tensor, for ways that do so apart.
    write_ms: Option<f64>,
    /// Whether the engine has the image's bytes.
    equal: bool,
}

/// All rounds of one image in one way.
#[derive(Default)]
struct Measurement {
    ms: Vec<f64>,
    write_ms: Vec<f64>,
    /// Whether the engine had the image's bytes in every round, warm-up included.
    equal: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    // A task runs on one of the runtime's threads, as requests do when `chiasm serve` submits them.
    match tokio::spawn(run()).await {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let flags: BTreeMap<&str, &str> =
        arguments.chunks(2).filter_map(|pair| Some((&*pair[0], &**pair.get(1)?))).collect();
    let flag = |name: &str| flags.get(name).copied().ok_or_else(|| format!("{name} is missing"));
    let rounds: usize = flag("--rounds")?.parse()?;
    let scripts = python::Scripts {
        python: PathBuf::from(flag("--python")?),
        folder: PathBuf::from(flag("--scripts")?),
        plugin: PathBuf::from(flag("--plugin")?),
    };

    let sockets = SocketDir::new()?;
    let waiting = Peers::start(&scripts, &sockets)?;
    let frontend = Frontend::start(&scripts, &sockets, waiting.engine_input()).await?;
    let peers = waiting.ready().await?;
    println!("{}", peers.versions());

    let images: Vec<[Image; 2]> =
        SIZES.iter().map(|size| [Image::new(size, 1), Image::new(size, 2)]).collect();
    let primer = Image::new(&PRIMER, 3);
    let longest = images.iter().map(|[image, _]| image.pixels.len()).max().unwrap_or(0);
    // Written to, so that its pages are there.
    let mut ways = Ways { frontend, peers, buffer: vec![1_u8; longest], ring: Ring::new() };
    for image in images.iter().flatten().chain([&primer]) {
        ways.frontend.shm(image, format!("first-{}-{}", image.patches(), image.seed)).await?;
    }
    let mut measurements: BTreeMap<(usize, Way), Measurement> = BTreeMap::new();
    for round in 0..WARM_UP + rounds {
        for turn in shuffled(SIZES.len() * WAYS.len(), round as u64) {
            let (case, way) = (turn % SIZES.len(), WAYS[turn / SIZES.len()]);
            let image = &images[case][round % 2];
            let id = format!("{}-{round}-{case}", way.name().replace(' ', "-"));
            let failed = |error: Failure| format!("{}, {}: {error}", SIZES[case].name, way.name());
            ways.hand_over(way, &primer, format!("{id}-primer")).await.map_err(failed)?;
            let handoff = ways.hand_over(way, image, id).await.map_err(failed)?;
            let measurement = measurements
                .entry((case, way))
                .or_insert(Measurement { equal: true, ..Default::default() });
            measurement.equal &= handoff.equal;
            if round >= WARM_UP {
                measurement.ms.push(handoff.ms);
                measurement.write_ms.extend(handoff.write_ms);
            }
        }
    }
    for ((case, way), Measurement { ms, write_ms, equal }) in measurements {
        let case = SIZES[case].name;
        println!(
            "{}",
            json!({"case": case, "way": way.name(), "ms": ms, "write_ms": write_ms, "equal": equal})
        );
    }
    Ok(())
}

/// The numbers below `n`, in an order that the seed decides: what comes right before something
/// leaves its traces in caches.
fn shuffled(n: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by_key(|&turn| splitmix64((seed << 32) + turn as u64));
    order
}

/// Everything that can hand images over.
struct Ways {
    frontend: Frontend,
    peers: Peers,
    /// The target of one copy, as long as the longest image.
    buffer: Vec<u8>,
    ring: Ring,
}

impl Ways {
    async fn hand_over(&mut self, way: Way, image: &Image, id: String) -> Result<Handoff, Failure> {
        let Self { frontend, peers, buffer, ring } = self;
        match way {
            Way::Shm => frontend.shm(image, id).await,
            Way::Cached => frontend.cached(image, id).await,
            Way::Text => frontend.text(id).await,
            Way::Inline => frontend.inline(image, id).await,
            Way::Aux => peers.aux(image, id, frontend).await,
            Way::Pickle | Way::Msgpack => peers.segment(way.name(), image, id).await,
            Way::Memcpy => Ok(memcpy(image, &mut buffer[..image.pixels.len()])),
            Way::MemcpyInTurn => Ok(memcpy(image, ring.next(image.pixels.len()))),
            Way::FirstUse => frontend::first_use(image),
        }
    }
}

/// Nanoseconds on the clock that all processes of the machine share (Python: `time.monotonic_ns`).
fn now() -> i64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn milliseconds(start: i64, end: i64) -> f64 {
    (end - start) as f64 / 1e6
}
