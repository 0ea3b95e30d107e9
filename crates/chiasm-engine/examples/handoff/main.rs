//! Measures the time to hand over the pixels of an image from the frontend's memory to the engine,
//! with several methods. `cargo xtask bench-peers handoff` runs this and makes rows of its output.
//!
//! ```text
//! handoff --python FILE --scripts DIR --plugin DIR --rounds N
//! ```
//!
//! The first line of output has versions, each other line a [`Measurement`]. In a round each method
//! hands over each image once, in an order that is shuffled per round. The first rounds warm up and
//! do not count. Right before each image a tiny one is handed over with the same method, so that
//! the code is in the caches, as it is while an engine is busy.
//!
//! | file | is |
//! |---|---|
//! | `images` | the images |
//! | `hashing` | the hashing of image files, measured last |
//! | `frontend` | Chiasm's methods: `EngineClient`, and an engine that is real up to its receiver cache |
//! | `peers` | other methods, and one copy |
//! | `python` | child processes; their scripts are in `bench/handoff` |
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a measurement")]

mod frontend;
mod hashing;
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
use crate::hashing::FILE_SIZES;
use crate::images::{Image, PRIMER, SIZES, splitmix64};
use crate::peers::{Peers, Ring, memcpy};

type Failure = Box<dyn Error + Send + Sync>;

/// The number of warm-up rounds. After them the arena has grown to its size, and the caches are
/// full, so that slots are reused.
const WARM_UP_ROUNDS: usize = 6;
/// The timeout of a step, longer than any step takes on a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// A method of handing over an image, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Method {
    /// A slot of the arena is reserved and written, and its handle is sent.
    Shm,
    /// The engine has the image already.
    Cached,
    /// The prompt is sent without an image.
    Text,
    /// Chiasm's client sends the tensor as a frame of the message.
    Inline,
    /// vLLM's own encoder and pyzmq send the tensor as a frame of the message.
    Aux,
    /// A new segment of shared memory per image, pickled.
    Pickle,
    /// A new segment of shared memory per image, in vLLM's encoding.
    Msgpack,
    /// One copy within this process.
    Memcpy,
    /// One copy into memory that is used in turn, as slots are, so that the target is not in the
    /// caches.
    MemcpyInTurn,
    /// A slot of an unused arena is reserved and written. Nothing is sent.
    FirstUse,
}

const METHODS: [Method; 10] = [
    Method::Shm,
    Method::Cached,
    Method::Text,
    Method::Inline,
    Method::Aux,
    Method::Pickle,
    Method::Msgpack,
    Method::Memcpy,
    Method::MemcpyInTurn,
    Method::FirstUse,
];

impl Method {
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

/// One image handed over with one method.
struct Handoff {
    /// The time in milliseconds from the pixels in the frontend to the tensor in the engine.
    ms: f64,
    /// The part of the time in which the frontend writes the tensor, for methods with such a step.
    write_ms: Option<f64>,
    /// `true` if the engine has the image's bytes.
    equal: bool,
}

/// All rounds of one image with one method.
#[derive(Default)]
struct Measurement {
    ms: Vec<f64>,
    write_ms: Vec<f64>,
    /// `true` if the engine had the image's bytes in every round, including the warm-up.
    equal: bool,
}

impl Measurement {
    fn print(&self, case: &str, way: &str) {
        let Self { ms, write_ms, equal } = self;
        println!(
            "{}",
            json!({"case": case, "way": way, "ms": ms, "write_ms": write_ms, "equal": equal})
        );
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    // A spawned task runs on a thread of the runtime, as the requests of `chiasm serve` do.
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
    let starting = Peers::start(&scripts, &sockets)?;
    let frontend = Frontend::start(&scripts, &sockets, starting.engine_input()).await?;
    let peers = starting.ready().await?;
    println!("{}", peers.versions());

    let images: Vec<[Image; 2]> =
        SIZES.iter().map(|size| [Image::new(size, 1), Image::new(size, 2)]).collect();
    let primer = Image::new(&PRIMER, 3);
    let longest = images.iter().map(|[image, _]| image.pixels.len()).max().unwrap_or(0);
    // The buffer is filled with ones, so that its pages are allocated.
    let mut methods = Methods { frontend, peers, buffer: vec![1_u8; longest], ring: Ring::new() };
    for image in images.iter().flatten().chain([&primer]) {
        methods.frontend.shm(image, format!("first-{}-{}", image.patches(), image.seed)).await?;
    }
    let mut measurements: BTreeMap<(usize, Method), Measurement> = BTreeMap::new();
    for round in 0..WARM_UP_ROUNDS + rounds {
        for index in shuffled(SIZES.len() * METHODS.len(), round as u64) {
            let case = index % SIZES.len();
            let method = METHODS[index / SIZES.len()];
            let image = &images[case][round % 2];
            let id = format!("{}-{round}-{case}", method.name().replace(' ', "-"));
            let failed =
                |error: Failure| format!("{}, {}: {error}", SIZES[case].name, method.name());
            methods.hand_over(method, &primer, format!("{id}-primer")).await.map_err(failed)?;
            let handoff = methods.hand_over(method, image, id).await.map_err(failed)?;
            let measurement = measurements
                .entry((case, method))
                .or_insert(Measurement { equal: true, ..Default::default() });
            measurement.equal &= handoff.equal;
            if round >= WARM_UP_ROUNDS {
                measurement.ms.push(handoff.ms);
                measurement.write_ms.extend(handoff.write_ms);
            }
        }
    }
    for ((case, method), measurement) in measurements {
        measurement.print(SIZES[case].name, method.name());
    }
    methods.measure_hashing(rounds).await
}

/// Returns the numbers below `n` in a pseudorandom order. Each handoff influences the caches of the
/// next one, so the order must vary.
fn shuffled(n: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by_key(|&index| splitmix64((seed << 32) + index as u64));
    order
}

/// The implementations of all methods.
struct Methods {
    frontend: Frontend,
    peers: Peers,
    /// The target of [`Method::Memcpy`], as long as the longest image.
    buffer: Vec<u8>,
    ring: Ring,
}

impl Methods {
    /// Measures the hashing of files, by Chiasm and by vLLM in turn.
    async fn measure_hashing(&mut self, rounds: usize) -> Result<(), Failure> {
        for size in &FILE_SIZES {
            let file = hashing::file(size);
            let [mut ours, mut vllm] =
                [(); 2].map(|()| Measurement { equal: true, ..Default::default() });
            for round in 0..WARM_UP_ROUNDS + rounds {
                let times = [hashing::hash(&file), self.peers.hash(size.bytes).await?];
                if round >= WARM_UP_ROUNDS {
                    ours.ms.push(times[0]);
                    vllm.ms.push(times[1]);
                }
            }
            ours.print(size.name, "hash");
            vllm.print(size.name, "hash, vLLM");
        }
        Ok(())
    }

    async fn hand_over(
        &mut self,
        method: Method,
        image: &Image,
        id: String,
    ) -> Result<Handoff, Failure> {
        let Self { frontend, peers, buffer, ring } = self;
        match method {
            Method::Shm => frontend.shm(image, id).await,
            Method::Cached => frontend.cached(image, id).await,
            Method::Text => frontend.text(id).await,
            Method::Inline => frontend.inline(image, id).await,
            Method::Aux => peers.aux(image, id, frontend).await,
            Method::Pickle | Method::Msgpack => peers.segment(method.name(), image, id).await,
            Method::Memcpy => Ok(memcpy(image, &mut buffer[..image.pixels.len()])),
            Method::MemcpyInTurn => Ok(memcpy(image, ring.next(image.pixels.len()))),
            Method::FirstUse => frontend::first_use(image),
        }
    }
}

/// Returns the time in nanoseconds on the clock that all processes of the machine share (Python:
/// `time.monotonic_ns`).
fn now() -> i64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn milliseconds(start: i64, end: i64) -> f64 {
    (end - start) as f64 / 1e6
}
