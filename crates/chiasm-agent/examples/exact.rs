//! Measures how long a new frontend takes until it knows everything that the engines of an agent
//! hold.
//!
//! `cargo run --release -p chiasm-agent --example exact [million blocks] [engines]`;
//! docs/many-machines.md has the numbers of one run. Agent and frontend are in one process, with a
//! connection over loopback between them, in plain text.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_agent::{AgentConnector, AgentLink, AgentServer, serve};
use chiasm_backend::fake::{FakeBackend, FakeConnector, fake_capabilities};
use chiasm_backend::{Capabilities, Connector, KvSource};
use chiasm_fleet::{Fleet, Patience};
use chiasm_kv::event::{BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_media::{ByteBudget, MediaConfig, MediaLoader};
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{MachineMedia, PipelineLimits};
use chiasm_router::RouterConfig;
use chiasm_types::{TokenId, WorkerId};
use tokio::net::TcpListener;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
const BLOCK_TOKENS: usize = 16;
const BLOCKS_PER_CONVERSATION: usize = 64;

#[tokio::main]
async fn main() {
    let argument = |index: usize, default: usize| {
        std::env::args().nth(index).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let millions = argument(1, 10);
    let engines = argument(2, 64);
    let agent_fleet = fleet(
        (0..engines).map(|_| Box::new(FakeConnector::new([Ok(engine())])) as Box<dyn Connector>),
    );
    assert!(agent_fleet.wait_ready(engines).await);
    let conversations = millions * 1_000_000 / engines / BLOCKS_PER_CONVERSATION;
    for worker in 0..engines {
        for conversation in 0..conversations {
            agent_fleet.router().apply(
                WorkerId(worker as u32),
                &stored((worker * conversations + conversation) as u32),
            );
        }
    }
    let held = agent_fleet.router().index_totals().entries;

    let model = Arc::new(ServedModel::load(Path::new(MODEL), "m", None).unwrap());
    let budget = ByteBudget::new(1 << 30);
    let loader = MediaLoader::new(MediaConfig::default(), budget.clone()).unwrap();
    let media = MachineMedia::new(
        model,
        loader,
        agent_fleet.clone(),
        &PipelineLimits::default(),
        None,
        None,
        false,
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(serve(
        AgentServer::new(agent_fleet.clone(), media, budget, engines as u32),
        listener,
        None,
        std::future::pending(),
    ));

    let start = Instant::now();
    let link = AgentLink::new(&address, None).unwrap();
    let processor = fake_capabilities().class.processor;
    let connector = |engine| {
        Box::new(AgentConnector::new(link.clone(), engine, processor.clone())) as Box<dyn Connector>
    };
    let frontend_fleet = fleet((0..engines as u32).map(connector));
    let mut known = 0;
    while known < held {
        tokio::time::sleep(Duration::from_millis(10)).await;
        known = frontend_fleet.router().index_totals().entries;
    }
    println!(
        "{engines} engines, {held} blocks: all known after {:.2} s",
        start.elapsed().as_secs_f64()
    );
}

fn fleet(connectors: impl Iterator<Item = Box<dyn Connector>>) -> Arc<Fleet> {
    Fleet::start(connectors.collect(), RouterConfig::default(), Patience::default()).unwrap()
}

/// Returns an engine whose backend reports its cache. Here its blocks are put into the agent's
/// index directly.
fn engine() -> FakeBackend {
    FakeBackend::with_capabilities(Capabilities {
        kv: KvSource::Backend,
        total_blocks: 1 << 20,
        ..fake_capabilities()
    })
}

fn stored(number: u32) -> KvEventBatch {
    let tokens = (0..(BLOCKS_PER_CONVERSATION * BLOCK_TOKENS) as u32)
        .map(|at| TokenId((number.wrapping_mul(2_654_435_761) ^ at) % 150_000));
    let hash = |block: usize| {
        ExternalHash::U64(number as u64 * BLOCKS_PER_CONVERSATION as u64 + block as u64)
    };
    let stored = BlockStored {
        block_hashes: (0..BLOCKS_PER_CONVERSATION).map(hash).collect(),
        token_ids: tokens.collect(),
        block_size: BLOCK_TOKENS as u32,
        ..Default::default()
    };
    KvEventBatch {
        timestamp: 0.0,
        events: vec![KvEvent::BlockStored(stored)],
        data_parallel_rank: None,
    }
}
