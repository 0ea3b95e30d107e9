//! Measures how long tensors take from a frontend to an engine of an agent in another process, and
//! the CPU time of both: as messages, and read by NIXL over the transports it finds and over TCP
//! alone.
//!
//! `cargo run --release -p chiasm-agent --example lend PATH_OF_LIBNIXL_CAPI [items]`;
//! docs/decisions/0013-nixl-is-optional.md has the numbers of one run. The connection is over
//! loopback, in plain text.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a measurement")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_agent::{AgentConnector, AgentLink, AgentServer, Lending, serve};
use chiasm_backend::fake::{FakeBackend, FakeConnector, fake_capabilities};
use chiasm_backend::{
    Connected, Connector, EncodedItem, FieldValue, Input, ItemField, Job, JobItem, MediaDelivery,
    MediaObserver, MediaSource, ReasoningHints, RequestId, Sampling, SourceError, Stage, Tensor,
    TensorBytes, TensorRequest,
};
use chiasm_fleet::{Fleet, Patience};
use chiasm_kv::KeySecret;
use chiasm_media::{ByteBudget, MediaConfig, MediaLoader};
use chiasm_nixl::{Lender, Reader, Settings};
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{MachineMedia, PipelineLimits};
use chiasm_router::RouterConfig;
use chiasm_types::{Dtype, MmHash, Modality, Placeholder, TensorField, TokenId, WorkerId};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::net::TcpListener;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
const MB: usize = 1_000_000;
const SIZES: [usize; 3] = [MB, 13 * MB, 50 * MB];
/// The number of rounds; each measures every way once.
const ROUNDS: usize = 2;

#[tokio::main]
async fn main() {
    // Both sides need the same secret.
    KeySecret::new([7; 32]).use_in_process().unwrap();
    let arguments: Vec<String> = std::env::args().collect();
    let items = arguments.get(2).and_then(|items| items.parse().ok()).unwrap_or(40);
    match &arguments[1..] {
        [library, way, ..] if way == "agent" => agent(Some(library)).await,
        [way] if way == "agent" => agent(None).await,
        [library, _, way] => frontend(library, items, way == "nixl").await,
        [library, ..] => {
            for _ in 0..ROUNDS {
                for (title, way, transports) in [
                    ("messages", "messages", None),
                    ("NIXL", "nixl", None),
                    ("NIXL over TCP", "nixl", Some("tcp")),
                ] {
                    println!("{title}");
                    let mut run = Command::new(std::env::current_exe().unwrap());
                    run.args([library, &items.to_string(), way]);
                    run.envs(transports.map(|transports| ("UCX_TLS", transports)));
                    assert!(run.status().unwrap().success());
                }
            }
        }
        [] => panic!("expected the path of libnixl_capi.so"),
    }
}

fn settings(library: &str) -> Settings {
    Settings {
        library: PathBuf::from(library),
        pool_bytes: 1 << 30,
        read_timeout: Duration::from_secs(10),
        devices: Some("lo".to_owned()),
    }
}

/// Runs the agent, in the other process.
async fn agent(library: Option<&str>) {
    let connector: Box<dyn Connector> = Box::new(FakeConnector::new([Ok(FakeBackend::new())]));
    let fleet =
        Fleet::start(vec![connector], RouterConfig::default(), Patience::default()).unwrap();
    assert!(fleet.wait_ready(1).await);
    let model = Arc::new(ServedModel::load(Path::new(MODEL), "m", None).unwrap());
    let budget = ByteBudget::new(1 << 30);
    let loader = MediaLoader::new(MediaConfig::default(), budget.clone()).unwrap();
    let media = MachineMedia::new(
        model,
        loader,
        fleet.clone(),
        &PipelineLimits::default(),
        Some(64 << 20),
        None,
        false,
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    let agent = AgentServer::new(fleet, media, budget, 1);
    let agent = match library {
        Some(library) => agent.with_reader(Reader::start(&settings(library)).unwrap()),
        None => agent,
    };
    serve(agent, listener, None, std::future::pending()).await.unwrap();
}

/// A process that is killed on drop.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn frontend(library: &str, items: usize, is_lent: bool) {
    let mut run = Command::new(std::env::current_exe().unwrap());
    run.args(is_lent.then_some(library)).arg("agent").stdout(Stdio::piped());
    let mut agent = Process(run.spawn().unwrap());
    let mut address = String::new();
    BufReader::new(agent.0.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let lending = if is_lent {
        Lending::new(Arc::new(Lender::start(&settings(library)).unwrap()))
    } else {
        Lending::default()
    };
    let link = AgentLink::new(address.trim(), None).unwrap().with_lending(&lending);
    let connector = AgentConnector::new(link, 0, fake_capabilities().class.processor);
    let Connected { backend, .. } =
        connector.connect(WorkerId(0), Arc::new(StrictObserver)).await.unwrap();
    for bytes in SIZES {
        // MadeTensors beforehand, as only the transfer is measured.
        let jobs: Vec<Arc<Job>> = (0..=items).map(|_| Arc::new(job(bytes))).collect();
        // A first job makes connections and touches memory for the first time.
        drop(backend.start(jobs[0].clone()).await.unwrap());
        let pids = [std::process::id(), agent.0.id()];
        let before = pids.map(cpu_ticks);
        let mut times = Vec::new();
        for job in &jobs[1..] {
            let start = Instant::now();
            drop(backend.start(job.clone()).await.unwrap());
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        let cpu: Vec<f64> =
            pids.into_iter().zip(before).map(|(pid, before)| cpu_ticks(pid) - before).collect();
        let [frontend, agent] = [0, 1].map(|side: usize| cpu[side] * 10.0 / items as f64);
        times.sort_by(f64::total_cmp);
        println!(
            "  {:>2} MB: median {:.2} ms ({:.2} to {:.2}); \
             CPU frontend {frontend:.2} ms, agent {agent:.2} ms",
            bytes / MB,
            times[items / 2],
            times[0],
            times[items - 1],
        );
    }
}

/// Returns the CPU time of a process, in hundredths of a second.
fn cpu_ticks(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let words: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    words[11].parse::<f64>().unwrap() + words[12].parse::<f64>().unwrap()
}

/// An observer that panics on any step down.
struct StrictObserver;

impl MediaObserver for StrictObserver {
    fn delivered(&self, _: MediaDelivery) {}

    fn missed(&self, _: usize) {}

    fn stepped_down(&self, cause: &'static str, why: &dyn std::fmt::Display) {
        panic!("{cause}: {why}");
    }
}

struct MadeTensors(Vec<ItemField>);

impl MediaSource for MadeTensors {
    fn tensors(
        &self,
        _: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        let fields = self.0.clone();
        async move { Ok(Some(fields)) }.boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

fn job(bytes: usize) -> Job {
    let tensor = Tensor {
        dtype: Dtype::U8,
        shape: vec![2, bytes / 2],
        bytes: TensorBytes::Here(vec![7; bytes].into()),
    };
    let field = TensorField::Flat { rows: 2, dim: 0, keep_on_cpu: false };
    let field = ItemField { name: "pixel_values".into(), field, value: FieldValue::Tensor(tensor) };
    let item = JobItem {
        modality: Modality::Video,
        // A new item, which the agent has not kept.
        hash: MmHash::new(rand::random()),
        placeholder: Placeholder { offset: 0, length: 4, is_embed: None },
        elements: bytes as u64,
        source: Arc::new(MadeTensors(vec![field])),
    };
    Job {
        id: RequestId::new("id").unwrap(),
        input: Input::Tokens(Arc::new(vec![TokenId(1); 8])),
        media: vec![item].into(),
        sampling: sampling(),
        adapter: None,
        cache_salt: None,
        priority: 0,
        trace: None,
        reasoning: ReasoningHints::default(),
        stage: Stage::Whole,
        embedded: Vec::new(),
    }
}

fn sampling() -> Sampling {
    Sampling { skip_reading_prefix_cache: true, ..Sampling::greedy(1) }
}
