//! `chiasm serve`: engines, a frontend before them, and an orderly end.

mod engines;
mod reload;
mod server_flags;
mod settings;
mod shared_gpu;
mod summary;

use std::future::Future;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Connector, PrivateNetwork};
use chiasm_engine::{ClientOptions, EngineOptions, SocketDir};
use chiasm_fleet::adapters::Adapters;
use chiasm_fleet::{Fleet, NoEngines, Patience};
use chiasm_media::MediaDoor;
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{HelperOptions, Objectives, Pipeline};
use chiasm_processor::ProcessorError;
use chiasm_router::RouterConfig;
use chiasm_server::{Certificate, LogCounts, PAGE_PATH, Page, Server, ServerSettings};
use chiasm_types::Role;
use chiasm_upstream::UpstreamKey;
use tokio::net::TcpListener;

use crate::cli::{ServeArgs, UpstreamArg};
use crate::error::CliError;
use crate::lora;
use crate::side::Side;
use crate::signals::{Hangups, Interrupts};
use crate::vllm_flags::{PROCESSOR_KWARGS, VllmFlags, for_engines_alone};
use crate::{
    agents, dynamo, hub_model, kept_indexes, key_secret, nixl, open_files, signals, vllm_command,
    vllm_processor,
};

pub(crate) use engines::connector;
use engines::{connectors, embedding_store, upstreams, vllm_args};
use reload::Reload;
use settings::{
    Limits, arena_policy, format_policy, limits, media_door, patience, receiver_cache_bytes,
    router_config, routing_options,
};
pub(crate) use settings::{cache_bytes, client_options};

/// How long the errors of requests that were cut off may take on their way to the clients.
const LAST_CHUNKS: Duration = Duration::from_secs(1);
/// How long a collector may take with the last traces.
const LAST_TRACES: Duration = Duration::from_secs(3);

/// Runs until SIGTERM or Ctrl-C. `log_counts` tells what the log has counted so far.
pub(crate) async fn run(
    mut args: ServeArgs,
    log_counts: impl Fn() -> LogCounts + Send + Sync + 'static,
) -> Result<(), CliError> {
    // Before anything takes long: from here on a SIGHUP does not end the process.
    let hangups = Hangups::listen();
    let keys = args.access.keys()?;
    let has_keys = keys.are_asked_for();
    let (certificate, cors) = (args.http.certificate()?, args.http.cors()?);
    if args.agents.announce.is_some() {
        return Err(CliError::Usage(
            "--announce is of chiasm agent: frontends are not looked for".to_owned(),
        ));
    }
    if args.agents.take_tensors {
        return Err(CliError::Usage(
            "--take-tensors is of chiasm agent: frontends make them".to_owned(),
        ));
    }
    if args.agents.fetch_media {
        return Err(CliError::Usage(
            "--fetch-media is of chiasm agent: frontends fetch in any case".to_owned(),
        ));
    }
    if args.agents.has_agents() {
        key_secret::share(
            args.agents.block_key_secret.as_deref(),
            args.engines.state_dir.as_deref(),
        )?;
    }
    args.limits.max_connections = open_files::raise_for(args.limits.max_connections);
    let kept = kept_indexes::open(&args, args.agents.has_agents());
    let Machine {
        model,
        door,
        patience,
        connectors,
        upstream_keys,
        router,
        limits,
        adapters,
        helper,
    } = machine(&mut args, Side::Frontend).await?;
    if args.agents.nixl.nixl_library.is_some() && !args.agents.has_agents() {
        return Err(CliError::Usage(
            "--nixl-library: there are no agents that could read (--agents)".to_owned(),
        ));
    }
    let lending = nixl::lending(&args).await?;
    let workers = connectors.len();
    let routing = routing_options(&args.routing)?;
    // Bound before any engine is started: a taken port is told at once.
    let address = SocketAddr::new(args.host, args.port);
    let listener = listen(address).await?;
    if workers == 0 && !args.agents.has_agents() && !dynamo::is_asked_for(&args) {
        return Err(NoEngines.into());
    }
    let fleet = Fleet::empty(router, patience, adapters);
    kept.into_iter().for_each(|kept| fleet.keep_indexes(kept));
    for connector in connectors {
        fleet.add(connector);
    }
    let _agents = agents::find(&args, &fleet, model.processor(), lending)?;
    let _dynamo = dynamo::find(&args, &fleet, &model)?;
    let page = args.http.page(args.host).map(|options| Arc::new(Page::new(options)));
    let starting = helper.as_ref().filter(|helper| helper.at_start).map(|helper| helper.required);
    let mut pipeline =
        Pipeline::new(model.clone(), door, fleet.clone(), limits.pipeline).with_objectives(
            Objectives { first_token: args.limits.slo_ttft, between_tokens: args.limits.slo_itl },
        );
    if let Some(page) = &page {
        pipeline = pipeline.with_observer(page.clone());
    }
    if let Some(helper) = helper {
        pipeline = pipeline.with_processor(helper);
    }
    let pipeline = Arc::new(pipeline);
    let settings = ServerSettings {
        http_limits: limits.http,
        body_limits: limits.body,
        routing,
        keys,
        reasoning_fields: args.answers.reasoning_fields.into(),
        usage_in_all_streams: args.answers.enable_force_include_usage,
        cors,
        root_path: args.http.root_path.clone(),
        adapters_may_change: args.lora.allow_runtime_lora_updating,
        forwards: args.engines.upstream.iter().any(UpstreamArg::takes_messages),
        page,
        traces: args.traces.traces()?,
        log_counts: Some(Box::new(log_counts)),
    };
    let server = Arc::new(Server::new(pipeline.clone(), settings));
    let traced = server.clone();
    // Ends if there has to be a processor and none can be had.
    let unhelped = async {
        if let (Some(required), Some(helped)) = (starting, &pipeline.helpers)
            && let Err(error) = helped.started().await
            && required
            && matches!(error, ProcessorError::NotServed(_) | ProcessorError::NoPython { .. })
        {
            return error;
        }
        std::future::pending().await
    };

    let drain = Drain { delay: args.limits.drain_delay, timeout: args.limits.drain_timeout };
    let reload = Reload {
        hangups,
        certificate: certificate.clone(),
        access: args.access.clone(),
        upstream_keys,
        server: server.clone(),
    };
    let terminated = async {
        tokio::select! {
            () = signals::terminated() => {}
            () = reload.follow() => {}
        }
        tracing::info!(
            delay = drain.delay.as_secs_f64(),
            "going down: requests in flight finish, a second Ctrl-C cuts them off"
        );
    };
    let summary = say_where(&listener, certificate.is_some(), &server, has_keys);
    let announce = async {
        // Those of agents come as they are found.
        if workers > 0 && fleet.wait_ready(workers).await {
            tracing::info!(workers, "all engines are ready");
            if let Some(summary) = &summary {
                tracing::info!("{summary}");
            }
        }
    };
    let renewed = certificate.clone();
    let follow = async {
        if let Some(certificate) = renewed {
            certificate.follow().await;
        }
        std::future::pending().await
    };
    let ended = tokio::select! {
        () = serve(listener, certificate, server, terminated, drain) => Ok(()),
        () = follow => Ok(()),
        () = async { announce.await; std::future::pending().await } => Ok(()),
        error = unhelped => Err(CliError::Usage(error.to_string())),
    };
    tokio::join!(fleet.shutdown(), traced.finish_traces(LAST_TRACES));
    ended
}

/// Says where the server is, before its engines are ready. Returns what whoever sits at a terminal
/// is shown when they are.
fn say_where(
    listener: &TcpListener,
    is_encrypted: bool,
    server: &Server,
    has_keys: bool,
) -> Option<String> {
    let address = listener.local_addr().ok()?;
    let model = &server.pipeline().model.name;
    let base = format!("{}://{address}", if is_encrypted { "https" } else { "http" });
    tracing::info!(model, url = %format_args!("{base}/v1"), "serving");
    if !has_keys && !address.ip().is_loopback() {
        tracing::warn!(
            %address,
            "whoever reaches this address may use the model: give --api-key, or keep strangers from it"
        );
    }
    let page = server.has_page().then(|| format!("{base}{}/", PAGE_PATH));
    if let Some(url) = &page {
        tracing::info!(%url, "live page");
    }
    std::io::stderr()
        .is_terminal()
        .then(|| summary::summary(&base, model, page.as_deref(), has_keys))
}

/// What an engine's machine needs, for a frontend or an agent.
pub(crate) struct Machine {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) door: MediaDoor,
    pub(crate) patience: Patience,
    pub(crate) connectors: Vec<Box<dyn Connector>>,
    /// The keys for servers of `--upstream`.
    pub(crate) upstream_keys: Vec<Arc<UpstreamKey>>,
    pub(crate) router: RouterConfig,
    pub(crate) limits: Limits,
    pub(crate) adapters: Arc<Adapters>,
    pub(crate) helper: Option<HelperOptions>,
}

/// Reads the model and makes ready what engines are started with.
pub(crate) async fn machine(args: &mut ServeArgs, side: Side) -> Result<Machine, CliError> {
    let given = args.model.display().to_string();
    let name = args.served_model_name.clone().unwrap_or_else(|| given.clone());
    let chats = args.prompts.chats()?;
    let private_network = args.roles.private_network(args.engines.roles())?;
    let flags = VllmFlags::read(&args.vllm_args)?;
    server_flags::check(args, side)?;
    args.engines.vllm = vllm_command::locate(&args.engines.vllm);
    // From here on the model is a directory, for engines and processor too.
    hub_model::locate(args, &flags).await?;
    let native = vllm_processor::native_images(args, &flags)?;
    let model = ServedModel::load_with(&args.model, name, args.chat_template.as_deref(), native)?;
    let model = match args.prompts.chat_template_content_format.given() {
        None => model,
        Some(format) => model.with_content_format(format),
    };
    let model = with_engine_kwargs(model, args, &flags)?;
    let model =
        model.with_parsers(&args.answers.tool_call_parser, &args.answers.reasoning_parser)?;
    let model = model.with_token_cache(args.prompts.token_cache_bytes);
    let model = Arc::new(ServedModel { root: given, chats, ..model });
    let helper = match side {
        Side::Frontend => vllm_processor::options(
            args,
            &model,
            &flags,
            &vllm_args(args, model.answers.engine_parser()),
        )?,
        Side::Agent => None,
    };
    warn_of_flags_for_nobody(args, helper.is_some());
    let takes_media =
        vllm_processor::takes_media(args, &model, helper.is_some() || args.agents.take_tensors);
    let door = media_door(&args.media, helper.is_some())?;
    let patience = patience(args);
    let options = EngineOptions {
        startup_timeout: args.engines.startup_timeout,
        client: ClientOptions {
            strict_version: args.engines.strict_vllm_version,
            receiver_cache_bytes: receiver_cache_bytes(args),
            ask_after: Some(patience.look_every()),
            ..client_options(&model)
        },
        format: format_policy(args, &flags, &model),
        arena: arena_policy(args, takes_media),
        processor: model.processor(),
        largest_item: model.largest_item(flags.taken_kinds()),
        role: Role::Aggregated,
        embeddings: embedding_store(args)?,
        private_network: private_network.map(|PrivateNetwork { network, .. }| network),
        starts: args.engines.share_gpu.then(Arc::default),
    };
    let loras = lora::prepare(args, &model.name, lora::stamps(args, side)).await?;
    let mut connectors = connectors(args, &model, &options, private_network, &loras)?;
    let upstreams = upstreams(args, &model)?;
    connectors.extend(upstreams.connectors);
    let swept = SocketDir::sweep();
    if swept > 0 {
        tracing::info!(swept, "removed folders of sockets that killed processes had left");
    }
    options.arena.check(connectors.len())?;
    Ok(Machine {
        model,
        door,
        patience,
        connectors,
        upstream_keys: upstreams.keys,
        router: RouterConfig { stages: args.roles.weights(), ..router_config(&args.routing) },
        limits: limits(args),
        adapters: loras.adapters,
        helper,
    })
}

/// Flags behind `--` are for engines that are launched, and for vLLM's processor, which makes what
/// such engines would take.
fn warn_of_flags_for_nobody(args: &ServeArgs, has_helper: bool) {
    if args.launched().total() == 0
        && !has_helper
        && let Some(flag) = for_engines_alone(&args.vllm_args)
    {
        tracing::warn!(
            flag,
            "nobody heeds what is behind --: neither an engine nor vLLM's processor is launched here"
        );
    }
}

/// Binds the frontend's address.
pub(crate) async fn listen(address: SocketAddr) -> Result<TcpListener, CliError> {
    TcpListener::bind(address).await.map_err(|source| CliError::Listen { address, source })
}

/// How a server goes down.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drain {
    /// Time for which it is not ready and still takes requests, so that whoever sends them can
    /// learn of it.
    pub(crate) delay: Duration,
    /// Time that requests in flight have after that.
    pub(crate) timeout: Duration,
}

/// Serves until `stop`, then lets requests in flight finish. Those that take too long end with an
/// error.
pub(crate) async fn serve(
    listener: TcpListener,
    certificate: Option<Arc<Certificate>>,
    server: Arc<Server>,
    stop: impl Future<Output = ()>,
    drain: Drain,
) {
    // The time that requests in flight have once no more are taken, and the Ctrl-Cs that cut them
    // off.
    let (stopping, stopped) = tokio::sync::oneshot::channel::<(Duration, Interrupts)>();
    let graceful = {
        let server = server.clone();
        async move {
            stop.await;
            let mut interrupts = Interrupts::listen();
            server.begin_draining();
            let timeout = tokio::select! {
                () = tokio::time::sleep(drain.delay) => drain.timeout,
                () = interrupts.next() => Duration::ZERO,
            };
            let _ = stopping.send((timeout, interrupts));
        }
    };
    let too_long = async {
        // Fails only if the server is gone already.
        let Ok((timeout, mut interrupts)) = stopped.await else {
            return std::future::pending().await;
        };
        tokio::select! {
            () = tokio::time::sleep(timeout) => {}
            () = interrupts.next() => {}
        }
    };
    let serving = server.serve(listener, certificate, graceful);
    tokio::pin!(serving);
    tokio::select! {
        () = &mut serving => return,
        never = server.keep_page() => match never {},
        () = too_long => {}
    }
    tracing::warn!(
        seconds = drain.timeout.as_secs(),
        "requests were still in flight (--drain-timeout, or a second Ctrl-C)"
    );
    server.pipeline().fleet.cut("the frontend is going down");
    let _ = tokio::time::timeout(LAST_CHUNKS, serving).await;
}

/// The settings of the image processor that the engines have, from Chiasm's flag or from vLLM's.
fn with_engine_kwargs(
    model: ServedModel,
    args: &ServeArgs,
    flags: &VllmFlags,
) -> Result<ServedModel, CliError> {
    let kwargs = match &args.engines.mm_processor_kwargs {
        Some(_) if !flags.processor_kwargs.is_empty() => {
            return Err(CliError::Usage(format!(
                "{PROCESSOR_KWARGS} is given twice: before and after --"
            )));
        }
        Some(kwargs) => kwargs,
        None => &flags.processor_kwargs,
    };
    model
        .with_engine_kwargs(kwargs.clone())
        .map_err(|error| CliError::Usage(format!("{PROCESSOR_KWARGS}: {error}")))
}
