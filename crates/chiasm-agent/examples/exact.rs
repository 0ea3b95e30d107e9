//! How long a frontend that has just started takes until it knows all that the engines of an agent
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
use chiasm_media::{ByteBudget, MediaConfig, MediaDoor};
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{MachineMedia, PipelineLimits};
use chiasm_router::RouterConfig;
use chiasm_types::{TokenId, WorkerId};
use tokio::net::TcpListener;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
const BLOCK: usize = 16;
/// Blocks of a conversation.
const TURNS: usize = 64;

#[tokio::main]
async fn main() {
    let number = |at: usize, usual: usize| {
        std::env::args().nth(at).and_then(|text| text.parse().ok()).unwrap_or(usual)
    };
    let (millions, engines) = (number(1, 10), number(2, 64));
    let of_agent = fleet(
        (0..engines).map(|_| Box::new(FakeConnector::new([Ok(engine())])) as Box<dyn Connector>),
    );
    assert!(of_agent.wait_ready(engines).await);
    let conversations = millions * 1_000_000 / engines / TURNS;
    for worker in 0..engines {
        for conversation in 0..conversations {
            of_agent.router().apply(
                WorkerId(worker as u32),
                &stored((worker * conversations + conversation) as u32),
            );
        }
    }
    let held = of_agent.router().index_totals().entries;

    let model = Arc::new(ServedModel::load(Path::new(MODEL), "m", None).unwrap());
    let budget = ByteBudget::new(1 << 30);
    let door = MediaDoor::new(MediaConfig::default(), budget.clone()).unwrap();
    let media =
        MachineMedia::new(model, door, of_agent.clone(), &PipelineLimits::default(), None, false);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(serve(
        AgentServer::new(of_agent.clone(), media, budget, engines as u32),
        listener,
        None,
        std::future::pending(),
    ));

    let started = Instant::now();
    let link = AgentLink::new(&address, None).unwrap();
    let processor = fake_capabilities().class.processor;
    let connector = |engine| {
        Box::new(AgentConnector::new(link.clone(), engine, processor.clone())) as Box<dyn Connector>
    };
    let of_frontend = fleet((0..engines as u32).map(connector));
    let mut known = 0;
    while known < held {
        tokio::time::sleep(Duration::from_millis(10)).await;
        known = of_frontend.router().index_totals().entries;
    }
    println!(
        "{engines} engines, {held} blocks: all known after {:.2} s",
        started.elapsed().as_secs_f64()
    );
}

fn fleet(connectors: impl Iterator<Item = Box<dyn Connector>>) -> Arc<Fleet> {
    Fleet::start(connectors.collect(), RouterConfig::default(), Patience::default()).unwrap()
}

/// One that tells itself what it holds. Here that is put into the agent's index directly.
fn engine() -> FakeBackend {
    FakeBackend::with(Capabilities {
        kv: KvSource::Backend,
        total_blocks: 1 << 20,
        ..fake_capabilities()
    })
}

fn stored(number: u32) -> KvEventBatch {
    let tokens = (0..(TURNS * BLOCK) as u32)
        .map(|at| TokenId((number.wrapping_mul(2_654_435_761) ^ at) % 150_000));
    let hash = |block: usize| ExternalHash::U64(number as u64 * TURNS as u64 + block as u64);
    let stored = BlockStored {
        block_hashes: (0..TURNS).map(hash).collect(),
        token_ids: tokens.collect(),
        block_size: BLOCK as u32,
        ..Default::default()
    };
    KvEventBatch {
        timestamp: 0.0,
        events: vec![KvEvent::BlockStored(stored)],
        data_parallel_rank: None,
    }
}
