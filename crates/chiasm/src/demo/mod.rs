//! `chiasm demo`: a frontend, two simulated engines and ten small conversations over real HTTP, in
//! one process.

mod bundle;
mod origin;
mod player;
mod report;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use chiasm_engine::{ArenaPolicy, ClientOptions, EngineOptions, FormatPolicy};
use chiasm_fleet::{Fleet, Patience};
use chiasm_media::{ByteBudget, MediaConfig, MediaDoor};
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{Pipeline, PipelineLimits};
use chiasm_router::{Policy, RouterConfig};
use chiasm_server::{Page, PageOptions, Server, ServerSettings};
use chiasm_types::Role;
use chiasm_vision::TakenKinds;

use crate::cli::{DemoArgs, SimArgs};
use crate::error::CliError;
use crate::scenarios;
use crate::serve::{Drain, client_options, connector, listen, serve};
use crate::signals;
use crate::sim_host::{SimHost, sim_config};

use bundle::Bundle;
use origin::Origin;
use player::Player;
use report::{Report, Totals};

const ENGINES: usize = 2;

/// Shared memory for each engine: plenty for the demo's few small pictures.
const ARENA_BYTES: u64 = 64 << 20;
/// Memory for encoded images, a cache of a GiB included, and request bodies.
const DEMO_BYTES: u64 = 2 << 30;

/// An engine that is fast enough not to bore anybody, and slow enough that a cached prompt is seen
/// in the time to first token.
const ENGINE: SimArgs = SimArgs {
    sim_vllm_version: None,
    sim_block_size: 16,
    sim_blocks: 16_384,
    sim_max_model_len: 131_072,
    sim_max_num_seqs: 128,
    sim_answer: None,
    sim_step_log: None,
    sim_request_log: None,
    sim_prefill_rate: 4000.0,
    sim_decode_rate: 400.0,
    sim_image_ms: 25.0,
    sim_speedup: 1.0,
    sim_no_plugin: false,
    sim_kv_connector: false,
    sim_embeddings: None,
    sim_encodes: false,
    sim_prompt_lease: Duration::from_secs(30),
    sim_no_kv_events: false,
    sim_lose_kv_batches: 0..0,
    sim_lora: false,
    sim_replay_batches: 10_000,
};

/// Runs the command.
pub(crate) async fn run(args: DemoArgs) -> Result<(), CliError> {
    let bundle = Bundle::unpack()?;
    let model = Arc::new(ServedModel::load(bundle.model_dir(), "chiasm-demo", None)?);
    let origin = Origin::start().await?;
    let report = Report::new(args.json);

    report.opening(ENGINES, &model.name);
    let with_kv = Stand::start(&model, Policy::Kv, args.port).await?;
    let kv = play(&with_kv, &origin, |scenario, shot| report.request(scenario, shot)).await?;

    let without = Stand::start(&model, Policy::RoundRobin, 0).await?;
    let round_robin = play(&without, &origin, |_, _| ()).await?;
    without.stop().await?;

    report.summary(&kv, &round_robin);
    if args.keep {
        report.how_to_go_on(with_kv.address, &model.name, bundle.picture());
        signals::terminated().await;
    } else {
        report.how_to_keep();
    }
    with_kv.stop().await
}

/// Plays all scenarios; stops at a request that fails or does not go where it should.
async fn play(
    stand: &Stand,
    origin: &Origin,
    each: impl Fn(&str, &player::Shot),
) -> Result<Totals, CliError> {
    let player = Player::new(stand.address)?;
    let mut totals = Totals::default();
    for scenario in scenarios::all() {
        let mut observed = Vec::new();
        for (index, turn) in scenario.turns.iter().enumerate() {
            let shot = player.play(turn, index, &stand.model, &origin.url()).await?;
            each(scenario.name, &shot);
            totals.add(&shot);
            observed.push(shot.observed());
            if stand.policy == Policy::Kv {
                turn.expect.check(&observed).map_err(|wrong| {
                    CliError::Demo(format!("{}, request {}: {wrong}", scenario.name, index + 1))
                })?;
            }
        }
    }
    totals.images = player.images().await?;
    Ok(totals)
}

/// A frontend with its simulated engines.
struct Stand {
    address: SocketAddr,
    model: String,
    policy: Policy,
    fleet: Arc<Fleet>,
    stop: tokio::sync::oneshot::Sender<()>,
    server: tokio::task::JoinHandle<()>,
}

impl Stand {
    async fn start(model: &Arc<ServedModel>, policy: Policy, port: u16) -> Result<Self, CliError> {
        let format = FormatPolicy::Raw;
        let config = sim_config(&ENGINE, Some(model), Some(format));
        let options = EngineOptions {
            startup_timeout: Duration::from_secs(30),
            client: ClientOptions {
                receiver_cache_bytes: config.receiver_cache_bytes,
                ..client_options(model)
            },
            format,
            arena: ArenaPolicy::Preferred { bytes: ARENA_BYTES },
            processor: model.processor(),
            largest_item: model.largest_item(TakenKinds::ALL),
            role: Role::Aggregated,
            embeddings: None,
            private_network: None,
            starts: None,
        };
        options.arena.check(ENGINES)?;
        let connectors =
            (0..ENGINES).map(|_| connector(SimHost::new(config.clone()), &options)).collect();
        let listener = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?;
        let address = listener.local_addr().map_err(CliError::Server)?;
        let fleet = Fleet::start(
            connectors,
            RouterConfig { policy, ..RouterConfig::default() },
            Patience::default(),
        )?;
        // The demo's web server is on this machine, so the door must let loopback addresses in.
        let media = MediaConfig { allow_private_addresses: true, ..MediaConfig::default() };
        let door = MediaDoor::new(media, ByteBudget::new(DEMO_BYTES))?;
        let page = Arc::new(Page::new(PageOptions::default()));
        let pipeline = Pipeline::new(model.clone(), door, fleet.clone(), PipelineLimits::default());
        let pipeline = Arc::new(pipeline.with_observer(page.clone()));
        let settings = ServerSettings { page: Some(page), ..ServerSettings::default() };
        let server = Server::new(pipeline, settings);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let stopped = async {
            let _ = stopped.await;
        };
        let drain = Drain { delay: Duration::ZERO, timeout: Duration::from_secs(2) };
        let server = tokio::spawn(serve(listener, None, Arc::new(server), stopped, drain));
        fleet.wait_ready(ENGINES).await;
        Ok(Self { address, model: model.name.clone(), policy, fleet, stop, server })
    }

    async fn stop(self) -> Result<(), CliError> {
        drop(self.stop);
        let served = self.server.await;
        self.fleet.shutdown().await;
        served.map_err(|_| CliError::Demo("the server failed".to_owned()))
    }
}
