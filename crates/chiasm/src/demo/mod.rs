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
use chiasm_media::{ByteBudget, MediaConfig, MediaLoader};
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{Pipeline, PipelineLimits};
use chiasm_router::{Policy, RouterConfig};
use chiasm_server::{Page, PageOptions, Server, ServerSettings};
use chiasm_types::Role;
use chiasm_vision::AcceptedMedia;

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

const ENGINE_COUNT: usize = 2;

/// The shared memory of each engine, ample for the demo's few small pictures.
const ARENA_BYTES: u64 = 64 << 20;
/// The memory for request bodies and encoded images, including a cache of 1 GiB.
const MEDIA_BUDGET_BYTES: u64 = 2 << 30;

/// The settings of the simulated engines: fast enough for a short demo, slow enough for the time to
/// first token to show whether a prompt was cached.
const SIM_ARGS: SimArgs = SimArgs {
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

    report.print_opening(ENGINE_COUNT, &model.name);
    let kv_server = DemoServer::start(&model, Policy::Kv, args.port).await?;
    let print = |scenario: &str, answer: &player::Answer| report.print_answer(scenario, answer);
    let kv = play(&kv_server, &origin, print).await?;

    let round_robin_server = DemoServer::start(&model, Policy::RoundRobin, 0).await?;
    let round_robin = play(&round_robin_server, &origin, |_, _| ()).await?;
    round_robin_server.stop().await?;

    report.print_summary(&kv, &round_robin);
    if args.keep {
        report.print_next_steps(kv_server.address, &model.name, bundle.picture());
        signals::terminated().await;
    } else {
        report.print_keep_hint();
    }
    kv_server.stop().await
}

/// Plays all scenarios and calls `on_answer` for each answer. Stops at a request that fails or,
/// with KV routing, violates its expectation.
async fn play(
    server: &DemoServer,
    origin: &Origin,
    on_answer: impl Fn(&str, &player::Answer),
) -> Result<Totals, CliError> {
    let player = Player::new(server.address)?;
    let mut totals = Totals::default();
    for scenario in scenarios::all() {
        let mut observed = Vec::new();
        for (index, turn) in scenario.turns.iter().enumerate() {
            let answer = player.play(turn, index, &server.model, &origin.url()).await?;
            on_answer(scenario.name, &answer);
            totals.add(&answer);
            observed.push(answer.observed());
            if server.policy == Policy::Kv {
                turn.expect.check(&observed).map_err(|error| {
                    CliError::Demo(format!("{}, request {}: {error}", scenario.name, index + 1))
                })?;
            }
        }
    }
    totals.images = player.image_counts().await?;
    Ok(totals)
}

/// A frontend with its simulated engines.
struct DemoServer {
    address: SocketAddr,
    model: String,
    policy: Policy,
    fleet: Arc<Fleet>,
    stop: tokio::sync::oneshot::Sender<()>,
    server: tokio::task::JoinHandle<()>,
}

impl DemoServer {
    async fn start(model: &Arc<ServedModel>, policy: Policy, port: u16) -> Result<Self, CliError> {
        let format = FormatPolicy::Raw;
        let config = sim_config(&SIM_ARGS, Some(model), Some(format));
        let options = EngineOptions {
            startup_timeout: Duration::from_secs(30),
            client: ClientOptions {
                receiver_cache_bytes: config.receiver_cache_bytes,
                ..client_options(model)
            },
            format,
            arena: ArenaPolicy::Preferred { bytes: ARENA_BYTES },
            processor: model.processor(),
            largest_item: model.largest_item(AcceptedMedia::ALL),
            role: Role::Aggregated,
            embeddings: None,
            private_network: None,
            starts: None,
        };
        options.arena.check(ENGINE_COUNT)?;
        let connectors =
            (0..ENGINE_COUNT).map(|_| connector(SimHost::new(config.clone()), &options)).collect();
        let listener = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?;
        let address = listener.local_addr().map_err(CliError::Server)?;
        let fleet = Fleet::start(
            connectors,
            RouterConfig { policy, ..RouterConfig::default() },
            Patience::default(),
        )?;
        // The demo's web server has a loopback address, which the loader refuses by default.
        let media = MediaConfig { allow_private_addresses: true, ..MediaConfig::default() };
        let loader = MediaLoader::new(media, ByteBudget::new(MEDIA_BUDGET_BYTES))?;
        let page = Arc::new(Page::new(PageOptions::default()));
        let pipeline =
            Pipeline::new(model.clone(), loader, fleet.clone(), PipelineLimits::default());
        let pipeline = Arc::new(pipeline.with_observer(page.clone()));
        let settings = ServerSettings { page: Some(page), ..ServerSettings::default() };
        let server = Server::new(pipeline, settings);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let stopped = async {
            let _ = stopped.await;
        };
        let drain = Drain { delay: Duration::ZERO, timeout: Duration::from_secs(2) };
        let server = tokio::spawn(serve(listener, None, Arc::new(server), stopped, drain));
        fleet.wait_ready(ENGINE_COUNT).await;
        Ok(Self { address, model: model.name.clone(), policy, fleet, stop, server })
    }

    async fn stop(self) -> Result<(), CliError> {
        drop(self.stop);
        let served = self.server.await;
        self.fleet.shutdown().await;
        served.map_err(|_| CliError::Demo("the server failed".to_owned()))
    }
}
