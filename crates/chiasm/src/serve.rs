//! `chiasm serve`: engines, the frontend in front of them, and graceful shutdown.

mod engines;
mod flag_checks;
mod gpus;
mod groups;
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
use chiasm_media::MediaLoader;
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{Objectives, Pipeline, VllmProcessorOptions};
use chiasm_processor::ProcessorError;
use chiasm_router::RouterConfig;
use chiasm_server::{Certificate, LogCounts, PAGE_PATH, Page, Server, ServerSettings};
use chiasm_types::Role;
use chiasm_upstream::UpstreamKey;
use chiasm_vision::VideoOptions;
use serde_json::{Map, Value};
use tokio::net::TcpListener;

use crate::cli::{ServeArgs, UpstreamArg};
use crate::error::CliError;
use crate::lora;
use crate::side::Side;
use crate::signals::{Hangups, Interrupts};
use crate::vllm_flags::{PROCESSOR_KWARGS, VllmFlags, first_engine_only_flag};
use crate::{
    agents, dynamo, hub_model, kept_indexes, key_secret, nixl, open_files, signals, vllm_command,
    vllm_processor,
};

pub(crate) use engines::connector;
use engines::{connectors, embedding_store, upstreams, vllm_args};
pub(crate) use flag_checks::check_flags;
use reload::Reload;
use settings::{
    Limits, arena_policy, format_policy, limits, media_loader, patience, receiver_cache_bytes,
    router_config, routing_options,
};
pub(crate) use settings::{cache_bytes, client_options};

/// The environment variable of vLLM with the largest area of a frame.
const MAX_FRAME_PIXELS: &str = "VLLM_MAX_IMAGE_PIXELS";
/// The environment variable of vLLM with the loader of videos.
const VIDEO_LOADER: &str = "VLLM_VIDEO_LOADER_BACKEND";
/// The time for sending the errors of aborted requests to the clients.
const ERROR_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// The time for sending the last traces to the collector.
const TRACE_FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs until SIGTERM or Ctrl-C. `log_counts` returns the log's counters for the metrics.
pub(crate) async fn run(
    mut args: ServeArgs,
    log_counts: impl Fn() -> LogCounts + Send + Sync + 'static,
) -> Result<(), CliError> {
    // First, because from here on SIGHUP no longer ends the process.
    let hangups = Hangups::listen();
    check_flags(&args, Side::Frontend)?;
    let keys = args.access.keys()?;
    let has_keys = keys.are_required();
    let certificate = args.http.certificate()?;
    let cors = args.http.cors()?;
    if args.agents.has_agents() {
        key_secret::load(
            args.agents.block_key_secret.as_deref(),
            args.engines.state_dir.as_deref(),
        )?;
    }
    args.limits.max_connections = open_files::raise_limit_for(args.limits.max_connections);
    let kept_indexes = kept_indexes::open(&args, args.agents.has_agents());
    let ServeSetup {
        model,
        loader,
        patience,
        connectors,
        upstream_keys,
        router,
        limits,
        adapters,
        processor,
    } = prepare(&mut args, Side::Frontend).await?;
    let lending = nixl::start_lending(&args).await?;
    let workers = connectors.len();
    let routing = routing_options(&args.routing)?;
    // Bound before any engine is started, so that a taken port fails at once.
    let address = SocketAddr::new(args.host, args.port);
    let listener = listen(address).await?;
    if workers == 0 && !args.agents.has_agents() && !dynamo::is_enabled(&args) {
        return Err(NoEngines.into());
    }
    let fleet = Fleet::empty(router, patience, adapters);
    if let Some(indexes) = kept_indexes {
        fleet.keep_indexes(indexes);
    }
    for connector in connectors {
        fleet.add(connector);
    }
    let _agents = agents::discover(&args, &fleet, model.processor(), lending)?;
    let _dynamo = dynamo::discover(&args, &fleet, &model)?;
    let page = args.http.page(args.host).map(|options| Arc::new(Page::new(options)));
    // `Some(true)` if the processor starts with the server and is required.
    let starts_required = processor
        .as_ref()
        .filter(|processor| processor.at_start)
        .map(|processor| processor.required);
    let mut pipeline =
        Pipeline::new(model.clone(), loader, fleet.clone(), limits.pipeline).with_objectives(
            Objectives { first_token: args.limits.slo_ttft, between_tokens: args.limits.slo_itl },
        );
    if let Some(page) = &page {
        pipeline = pipeline.with_observer(page.clone());
    }
    if let Some(processor) = processor {
        pipeline = pipeline.with_processor(processor);
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
    let traced_server = server.clone();
    // Returns only if a processor is required and can't be started.
    let processor_failed = async {
        if let (Some(required), Some(processor)) = (starts_required, &pipeline.vllm_processors)
            && let Err(error) = processor.start_all().await
            && required
            && matches!(error, ProcessorError::Unsupported(_) | ProcessorError::NoPython { .. })
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
            () = reload.run() => {}
        }
        tracing::info!(
            delay = drain.delay.as_secs_f64(),
            "shutting down: requests in flight finish; another Ctrl-C aborts them"
        );
    };
    let summary = log_addresses(&listener, certificate.is_some(), &server, has_keys);
    let announce_ready = async {
        // Does not wait for engines of agents.
        if workers > 0 && fleet.wait_ready(workers).await {
            tracing::info!(workers, "all engines are ready");
            if let Some(summary) = &summary {
                // A log line shows line breaks escaped.
                for line in summary.lines() {
                    tracing::info!("{line}");
                }
            }
        }
    };
    let watched_certificate = certificate.clone();
    let watch_certificate = async {
        if let Some(certificate) = watched_certificate {
            certificate.follow().await;
        }
        std::future::pending().await
    };
    let ended = tokio::select! {
        () = serve(listener, certificate, server, terminated, drain) => Ok(()),
        () = watch_certificate => Ok(()),
        () = async { announce_ready.await; std::future::pending().await } => Ok(()),
        error = processor_failed => Err(CliError::Usage(error.to_string())),
    };
    tokio::join!(fleet.shutdown(), traced_server.finish_traces(TRACE_FLUSH_TIMEOUT));
    ended
}

/// Logs the server's addresses, before its engines are ready. Returns the summary to show once they
/// are, if standard error is a terminal.
fn log_addresses(
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
            "anyone who can reach this address may use the model: give --api-key, \
             or restrict access to the address"
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

/// The parts that a frontend or an agent is built from.
pub(crate) struct ServeSetup {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) loader: MediaLoader,
    pub(crate) patience: Patience,
    pub(crate) connectors: Vec<Box<dyn Connector>>,
    /// The keys of requests to the servers of `--upstream`.
    pub(crate) upstream_keys: Vec<Arc<UpstreamKey>>,
    pub(crate) router: RouterConfig,
    pub(crate) limits: Limits,
    pub(crate) adapters: Arc<Adapters>,
    /// The settings of vLLM's processor, if it is used.
    pub(crate) processor: Option<VllmProcessorOptions>,
}

/// Loads the model and prepares everything that engines are started with.
pub(crate) async fn prepare(args: &mut ServeArgs, side: Side) -> Result<ServeSetup, CliError> {
    let given = args.model.display().to_string();
    let name = args.served_model_name.clone().unwrap_or_else(|| given.clone());
    let chats = args.prompts.chat_defaults()?;
    let private_network = args.roles.private_network(args.engines.roles())?;
    let flags = VllmFlags::parse(&args.vllm_args)?;
    args.engines.vllm = vllm_command::locate(&args.engines.vllm);
    // From here on, `args.model` is a directory.
    hub_model::resolve(args, &flags).await?;
    let native_images = vllm_processor::native_images(args, &flags)?;
    let template = args.chat_template.as_deref();
    let model = ServedModel::load_with(&args.model, name, template, native_images)?;
    let model = match args.prompts.chat_template_content_format.explicit() {
        None => model,
        Some(format) => model.with_content_format(format),
    };
    let model = with_engine_kwargs(model, args, &flags)?;
    let model = model.with_videos(video_options(args, &flags)?, flags.max_videos());
    let model =
        model.with_parsers(&args.answers.tool_call_parser, &args.answers.reasoning_parser)?;
    let model = model.with_token_cache(args.prompts.token_cache_bytes);
    let model = Arc::new(ServedModel { root: given, chats, ..model });
    let processor = match side {
        Side::Frontend => vllm_processor::options(
            args,
            &model,
            &flags,
            &vllm_args(args, model.answers.engine_parser()),
        )?,
        Side::Agent => vllm_processor::agent_options(
            args,
            &model,
            &vllm_args(args, model.answers.engine_parser()),
        )?,
    };
    warn_about_unused_flags(args, processor.is_some());
    let has_tensors = processor.is_some() || args.agents.take_tensors;
    let accepts_media = vllm_processor::accepts_media(args, &model, has_tensors);
    // Frontends send agents files only for Chiasm's own processor.
    let accepts_all_formats = processor.is_some() && side == Side::Frontend;
    let loader = media_loader(&args.media, accepts_all_formats)?;
    let patience = patience(args);
    let options = EngineOptions {
        startup_timeout: args.engines.startup_timeout,
        client: ClientOptions {
            strict_version: args.engines.strict_vllm_version,
            receiver_cache_bytes: receiver_cache_bytes(args),
            probe_after: Some(patience.check_interval()),
            ..client_options(&model)
        },
        format: format_policy(args, &flags, &model),
        arena: arena_policy(args, accepts_media),
        processor: model.processor(),
        largest_item: model.largest_item(flags.accepted_media()),
        role: Role::Aggregated,
        embeddings: embedding_store(args)?,
        private_network: private_network.map(|PrivateNetwork { network, .. }| network),
        starts: args.engines.share_gpu.then(Arc::default),
    };
    let loras = lora::prepare(args, &model.name, lora::stamp_source(args, side)).await?;
    let mut connectors = connectors(args, &model, &options, private_network, &loras)?;
    let upstreams = upstreams(args, &model)?;
    connectors.extend(upstreams.connectors);
    let swept = SocketDir::sweep();
    if swept > 0 {
        tracing::info!(swept, "removed socket folders of killed processes");
    }
    options.arena.check(connectors.len())?;
    Ok(ServeSetup {
        model,
        loader,
        patience,
        connectors,
        upstream_keys: upstreams.keys,
        router: RouterConfig { stages: args.roles.weights(), ..router_config(&args.routing) },
        limits: limits(args),
        adapters: loras.adapters,
        processor,
    })
}

/// Warns about flags after `--` that have no effect. Only launched engines and vLLM's processor get
/// these flags.
fn warn_about_unused_flags(args: &ServeArgs, has_processor: bool) {
    // Simulated engines can be in groups, too.
    let flags = match args.engines.sim {
        Some(_) => groups::without_group_size(&args.vllm_args),
        None => args.vllm_args.clone(),
    };
    if args.launched().total() == 0
        && !has_processor
        && let Some(flag) = first_engine_only_flag(&flags)
    {
        tracing::warn!(
            flag,
            "flags after -- have no effect: neither an engine nor vLLM's processor is launched here"
        );
    }
}

/// Binds the frontend's address.
pub(crate) async fn listen(address: SocketAddr) -> Result<TcpListener, CliError> {
    TcpListener::bind(address).await.map_err(|source| CliError::Listen { address, source })
}

/// The durations of the phases of a graceful shutdown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drain {
    /// The time for which the server reports that it is not ready and still accepts requests, so
    /// that load balancers can react.
    pub(crate) delay: Duration,
    /// The time for requests in flight to finish after that.
    pub(crate) timeout: Duration,
}

/// Serves until `stop` resolves, then lets requests in flight finish. Requests that take too long
/// are aborted with an error.
pub(crate) async fn serve(
    listener: TcpListener,
    certificate: Option<Arc<Certificate>>,
    server: Arc<Server>,
    stop: impl Future<Output = ()>,
    drain: Drain,
) {
    // Carries the time left for requests in flight, and the listener for another Ctrl-C.
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
    let timed_out = async {
        // Fails only if the server has ended.
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
        () = timed_out => {}
    }
    tracing::warn!(
        seconds = drain.timeout.as_secs(),
        "aborting requests in flight (--drain-timeout or another Ctrl-C)"
    );
    server.pipeline().fleet.abort_requests("the frontend is shutting down");
    let _ = tokio::time::timeout(ERROR_FLUSH_TIMEOUT, serving).await;
}

/// Adds the engines' image processor settings to the model.
fn with_engine_kwargs(
    model: ServedModel,
    args: &ServeArgs,
    flags: &VllmFlags,
) -> Result<ServedModel, CliError> {
    model
        .with_engine_kwargs(engine_kwargs(args, flags)?.clone())
        .map_err(|error| CliError::Usage(format!("{PROCESSOR_KWARGS}: {error}")))
}

/// Returns the engines' settings of media processors, from Chiasm's flag or from vLLM's.
fn engine_kwargs<'a>(
    args: &'a ServeArgs,
    flags: &'a VllmFlags,
) -> Result<&'a Map<String, Value>, CliError> {
    match &args.engines.mm_processor_kwargs {
        Some(_) if !flags.processor_kwargs.is_empty() => {
            Err(CliError::Usage(format!("{PROCESSOR_KWARGS} is given twice: before and after --")))
        }
        Some(kwargs) => Ok(kwargs),
        None => Ok(&flags.processor_kwargs),
    }
}

/// Returns the engines' settings of videos. Engines and vLLM's processor share this process's
/// environment.
fn video_options(args: &ServeArgs, flags: &VllmFlags) -> Result<VideoOptions, CliError> {
    let default = VideoOptions::default();
    let max_frame_pixels = match std::env::var(MAX_FRAME_PIXELS) {
        Err(_) => default.max_frame_pixels,
        Ok(pixels) => pixels
            .parse()
            .map_err(|_| CliError::Usage(format!("{MAX_FRAME_PIXELS} must be an integer")))?,
    };
    Ok(VideoOptions {
        processor_kwargs: engine_kwargs(args, flags)?.clone(),
        media_io_kwargs: flags.video_io_kwargs.clone(),
        default_loader: std::env::var(VIDEO_LOADER).unwrap_or(default.default_loader),
        max_frame_pixels,
        pruning: flags.video_pruning,
    })
}
