//! Replays recorded jobs to engines without a frontend. `cargo xtask bench-peers serve` measures
//! the limit of the engines with it.
//!
//! ```text
//! replay --vllm PROGRAM --model DIR --served-model-name NAME --engines N \
//!     --receiver-cache-gb GB --arena-gb GB -- FLAGS OF THE ENGINE
//! ```
//!
//! launches engines as `chiasm serve` does, prints `{"address": "127.0.0.1:PORT"}` and listens
//! there with the same frontend as `chiasm serve`. The frontend does everything for a request
//! except the last step: instead of handing a job to an engine, it records the job and answers with
//! one token. Each line on standard input,
//!
//! ```text
//! {"clients": N, "workers": [N, …]}
//! ```
//!
//! then sends the jobs recorded since the last line to the engines, in their order and `clients` at
//! a time, and prints a [`ReplayReport`]. The n-th job goes to the n-th worker of the list. Jobs
//! beyond the list go to the worker with the fewest jobs in flight. The process and its engines end
//! with its input.

#![forbid(unsafe_code)]

mod kept;

use std::collections::BTreeMap;
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use chiasm_backend::{Backend, Content, Job, LargestItem};
use chiasm_engine::{
    ArenaPolicy, ClientOptions, CountedRows, EngineConnector, EngineOptions, FormatPolicy,
    LaunchHost,
};
use chiasm_fleet::{Fleet, Patience};
use chiasm_media::{ByteBudget, MediaConfig, MediaLoader};
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{Pipeline, PipelineLimits};
use chiasm_router::RouterConfig;
use chiasm_server::{Server, ServerSettings};
use futures_util::future::try_join_all;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::kept::{Recorder, RecordingConnector};

const USAGE: &str = "usage: see the head of crates/chiasm/examples/replay/main.rs";
/// The deadline for the engines' start; they start one after the other on a small machine.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(300);
/// The memory for encoded images, including those of recorded jobs.
const MEDIA_BYTES: u64 = 4 << 30;

/// A line of standard input: how to replay the recorded jobs.
#[derive(Debug, Deserialize)]
struct ReplayOrder {
    clients: usize,
    workers: Vec<usize>,
}

/// The result of a replay.
#[derive(Debug, Default, Serialize)]
struct ReplayReport {
    /// Milliseconds from sending each job to its first tokens, in the order of the jobs.
    ttft: Vec<f64>,
    /// Seconds from the first job to the last token.
    wall: f64,
    /// The tokens of all prompts.
    prompt_tokens: usize,
    /// The prompt tokens that engines found in their caches.
    cached_tokens: usize,
    /// The tokens of all answers.
    tokens: usize,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let outcome = runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(&arguments)));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let (own_args, engine_args) = match arguments.iter().position(|argument| argument == "--") {
        Some(at) => (&arguments[..at], &arguments[at + 1..]),
        None => (arguments, &[][..]),
    };
    let flags: BTreeMap<&str, &str> =
        own_args.chunks(2).filter_map(|pair| Some((&*pair[0], &**pair.get(1)?))).collect();
    let flag =
        |name: &str| flags.get(name).copied().ok_or_else(|| format!("{name} is missing; {USAGE}"));
    let model = Path::new(flag("--model")?);
    let served = Arc::new(ServedModel::load(model, flag("--served-model-name")?, None)?);
    let receiver_cache_gb: f64 = flag("--receiver-cache-gb")?.parse()?;
    let options = options(&served, receiver_cache_gb, flag("--arena-gb")?.parse()?);
    let host = LaunchHost {
        vllm: flag("--vllm")?.into(),
        model: model.into(),
        extra_args: engine_args.to_vec(),
        gpus: None,
        receiver_cache_gb,
        handshake_port: 0,
        keep: None,
        role: chiasm_types::Role::Aggregated,
        embeddings: None,
        kv_connector: chiasm_engine::KvConnector::Nixl,
        side_channel: None,
        place: None,
    };
    host.check()?;
    let recorder = Arc::new(Recorder::default());
    let engines: usize = flag("--engines")?.parse()?;
    let connectors = (0..engines).map(|_| {
        let connector = EngineConnector::new(host.clone(), options.clone());
        Box::new(RecordingConnector::new(connector, recorder.clone())) as _
    });
    let fleet = Fleet::start(connectors.collect(), RouterConfig::default(), Patience::default())?;
    let loader = MediaLoader::new(MediaConfig::default(), ByteBudget::new(MEDIA_BYTES))?;
    let pipeline =
        Arc::new(Pipeline::new(served, loader, fleet.clone(), PipelineLimits::default()));
    let server = Server::new(pipeline, ServerSettings::default());
    let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
    let address = listener.local_addr()?;
    let served = tokio::select! {
        () = server.serve(listener, None, std::future::pending()) => Ok(()),
        ended = run_orders(&fleet, engines, address, &recorder) => ended,
        signal = ended_by_signal() => signal,
    };
    fleet.shutdown().await;
    served
}

/// Returns the default engine options of `chiasm serve`.
fn options(model: &ServedModel, receiver_cache_gb: f64, arena_gb: f64) -> EngineOptions {
    let gib = |gib: f64| (gib * (1_u64 << 30) as f64) as u64;
    let vision = model.vision.as_ref();
    let counted = vision.map_or(&[][..], |vision| vision.counted_rows());
    let rows = counted
        .iter()
        .map(|&(rows_of, grid)| CountedRows { rows_of: rows_of.into(), grid: grid.into() });
    EngineOptions {
        startup_timeout: STARTUP_TIMEOUT,
        client: ClientOptions {
            vocab_size: model.last_token().0.checked_add(1),
            counted_rows: rows.collect(),
            receiver_cache_bytes: Some(gib(receiver_cache_gb)),
            ..ClientOptions::default()
        },
        format: vision
            .and_then(|vision| vision.engine_normalizes_since())
            .map_or(FormatPolicy::Float, FormatPolicy::RawSince),
        arena: ArenaPolicy::Required { bytes: gib(arena_gb) },
        processor: model.processor(),
        largest_item: LargestItem::unknown(),
        role: chiasm_types::Role::Aggregated,
        embeddings: None,
        private_network: None,
        starts: None,
    }
}

/// Runs the replays of standard input until its end.
async fn run_orders(
    fleet: &Fleet,
    engines: usize,
    address: SocketAddr,
    recorder: &Recorder,
) -> Result<(), Box<dyn Error>> {
    fleet.wait_ready(engines).await;
    println!("{}", serde_json::json!({ "address": address }));
    let (sender, mut orders) = mpsc::channel(1);
    // Ends with the input, or with this process.
    std::thread::spawn(move || {
        let lines = std::io::stdin().lines().map_while(Result::ok);
        lines.map(|line| sender.blocking_send(line)).take_while(Result::is_ok).count()
    });
    while let Some(line) = orders.recv().await {
        let order: ReplayOrder = serde_json::from_str(&line)?;
        let report = replay(&recorder.backends(), &recorder.take_jobs(), &order).await?;
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(())
}

async fn replay(
    backends: &[Arc<dyn Backend>],
    jobs: &[Arc<Job>],
    order: &ReplayOrder,
) -> Result<ReplayReport, Box<dyn Error>> {
    if order.workers.iter().any(|&worker| worker >= backends.len()) || backends.is_empty() {
        return Err(format!("there are {} workers", backends.len()).into());
    }
    let in_flight: Vec<AtomicUsize> = backends.iter().map(|_| AtomicUsize::new(0)).collect();
    let least_loaded = || {
        (0..backends.len())
            .min_by_key(|&worker| in_flight[worker].load(Ordering::Relaxed))
            .unwrap_or(0)
    };
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    let client = async |_| {
        let mut answers = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(number) else { return Ok::<_, Box<dyn Error>>(answers) };
            let worker = order.workers.get(number).copied().unwrap_or_else(least_loaded);
            in_flight[worker].fetch_add(1, Ordering::Relaxed);
            answers.push((number, Answer::measure(&*backends[worker], job.clone()).await?));
            in_flight[worker].fetch_sub(1, Ordering::Relaxed);
        }
    };
    let mut answers = try_join_all((0..order.clients).map(client)).await?.concat();
    let wall = start.elapsed().as_secs_f64();
    answers.sort_by_key(|&(number, _)| number);
    let sum = |value: fn(&Answer) -> usize| answers.iter().map(|(_, answer)| value(answer)).sum();
    Ok(ReplayReport {
        ttft: answers.iter().map(|(_, answer)| answer.ttft.as_secs_f64() * 1e3).collect(),
        wall,
        prompt_tokens: sum(|answer| answer.prompt_tokens),
        cached_tokens: sum(|answer| answer.cached_tokens),
        tokens: sum(|answer| answer.tokens),
    })
}

/// The measured answer to one job.
#[derive(Clone, Copy, Debug)]
struct Answer {
    ttft: Duration,
    prompt_tokens: usize,
    cached_tokens: usize,
    tokens: usize,
}

impl Answer {
    /// Runs a job and measures its answer.
    async fn measure(backend: &dyn Backend, job: Arc<Job>) -> Result<Self, Box<dyn Error>> {
        let prompt_tokens = match &job.input {
            chiasm_backend::Input::Tokens(tokens)
            | chiasm_backend::Input::Marked { expanded: tokens, .. } => tokens.len(),
            chiasm_backend::Input::Messages(_) => 0,
        };
        let start = Instant::now();
        let mut running = backend.start(job).await?;
        let mut ttft = None;
        let mut tokens = 0;
        let mut cached_tokens = 0;
        while let Some(output) = running.next().await {
            let output = output?;
            if let Content::Tokens { tokens: new, .. } = &output.content
                && !new.is_empty()
            {
                ttft.get_or_insert_with(|| start.elapsed());
                tokens += new.len();
            }
            cached_tokens += output.prefill.map_or(0, |prefill| prefill.cached_tokens);
        }
        Ok(Self {
            ttft: ttft.ok_or("an answer has no tokens")?,
            prompt_tokens,
            cached_tokens,
            tokens,
        })
    }
}

/// Returns an error on SIGTERM or Ctrl-C, which ends the process.
async fn ended_by_signal() -> Result<(), Box<dyn Error>> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        pressed = tokio::signal::ctrl_c() => pressed?,
    }
    Err("ended by a signal".into())
}
