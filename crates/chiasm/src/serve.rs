//! `chiasm serve`: engines, a frontend before them, and an orderly end.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use chiasm_backend::Connector;
use chiasm_engine::state::StateDir;
use chiasm_engine::{
    ArenaPolicy, AttachHost, ClientOptions, CountedRows, EngineConnector, EngineHost, EngineOptions, FormatPolicy,
    LaunchHost, SocketDir,
};
use chiasm_media::{ByteBudget, ImageLimits, MediaConfig, MediaDoor, MediaLimits};
use chiasm_processor::ProcessorError;
use chiasm_router::{BusyThresholds, Decoding, RouterConfig, Weights};
use chiasm_server::fleet::{Fleet, Patience};
use chiasm_server::model::ServedModel;
use chiasm_server::{Frontend, Limits, LogCounts, RoutingOptions, TrustedProxies, connections};
use chiasm_sim_engine::SimConfig;
use serde_json::Value;
use tokio::net::TcpListener;

use crate::cli::{MediaArgs, MmTransfer, RoutingArgs, ServeArgs, TensorFormats};
use crate::error::CliError;
use crate::sim_host::{SimHost, sim_config};
use crate::vllm_flags::{PROCESSOR_KWARGS, VllmFlags};
use crate::{signals, state_folder, vllm_processor};

/// vLLM's own default.
const DEFAULT_RECEIVER_CACHE_GB: f64 = 4.0;

/// Room for tensors that are being written, sent, or used by requests after their eviction.
const ARENA_GB_IN_FLIGHT: f64 = 1.0;

/// How long the errors of requests that were cut off may take on their way to the clients.
const LAST_CHUNKS: Duration = Duration::from_secs(1);

/// Runs until SIGTERM or Ctrl-C. `log_counts` tells what the log has counted so far.
pub(crate) async fn run(
    args: ServeArgs,
    log_counts: impl Fn() -> LogCounts + Send + Sync + 'static,
) -> Result<(), CliError> {
    let name = args.served_model_name.clone().unwrap_or_else(|| args.model.display().to_string());
    let flags = VllmFlags::read(&args.vllm_args)?;
    let native = vllm_processor::native_images(&args, &flags)?;
    let model = ServedModel::load_with(&args.model, name, args.chat_template.as_deref(), native)?;
    let model = Arc::new(with_engine_kwargs(model, &args, &flags)?);
    let helper = vllm_processor::options(&args, &model, &flags, &vllm_args(&args))?;
    let takes_media = vllm_processor::takes_media(&args, &model, helper.as_ref());
    let door = MediaDoor::new(media_config(&args.media, helper.is_some()), byte_budget(&args.media))?;
    let patience = patience(&args);
    let options = EngineOptions {
        startup_timeout: args.engines.startup_timeout,
        client: ClientOptions {
            strict_version: args.engines.strict_vllm_version,
            receiver_cache_bytes: receiver_cache_bytes(&args),
            ask_after: Some(patience.look_every()),
            ..client_options(&model)
        },
        format: format_policy(&args, &flags, &model),
        arena: arena_policy(&args, takes_media),
        processor: model.processor(),
    };
    let connectors = connectors(&args, &model, &options)?;
    let workers = connectors.len();
    let swept = SocketDir::sweep();
    if swept > 0 {
        tracing::info!(swept, "removed folders of sockets that killed processes had left");
    }
    options.arena.check(workers)?;
    let routing = routing_options(&args.routing)?;
    // Bound before any engine is started: a taken port is told at once.
    let address = SocketAddr::new(args.host, args.port);
    let listener = listen(address).await?;
    let fleet = Fleet::start(connectors, router_config(&args.routing), patience)?;
    let mut frontend =
        Frontend::new(model.clone(), door, fleet.clone(), limits(&args)).with_routing(routing).with_log(log_counts);
    let starting = helper.as_ref().filter(|helper| helper.at_start).map(|helper| helper.required);
    if let Some(helper) = helper {
        frontend = frontend.with_helper(helper);
    }
    let frontend = Arc::new(frontend);
    let helped = frontend.clone();
    // Ends if there has to be a processor and none can be had.
    let unhelped = async {
        if let (Some(required), Some(helped)) = (starting, &helped.helped)
            && let Err(error) = helped.started().await
            && required
            && matches!(error, ProcessorError::NotServed(_) | ProcessorError::NoPython { .. })
        {
            return error;
        }
        std::future::pending().await
    };

    let drain = Drain { delay: args.limits.drain_delay, timeout: args.limits.drain_timeout };
    let terminated = async {
        signals::terminated().await;
        tracing::info!(delay = drain.delay.as_secs_f64(), "going down: requests in flight finish");
    };
    let announce = async {
        if fleet.wait_ready(workers).await {
            tracing::info!(workers, "all engines are ready");
        }
    };
    if let Ok(address) = listener.local_addr() {
        tracing::info!(model = model.name, url = %format_args!("http://{address}/v1"), "serving");
    }
    let ended = tokio::select! {
        () = serve(listener, frontend, terminated, drain) => Ok(()),
        () = async { announce.await; std::future::pending().await } => Ok(()),
        error = unhelped => Err(CliError::Usage(error.to_string())),
    };
    fleet.shutdown().await;
    ended
}

/// Binds the frontend's address.
pub(crate) async fn listen(address: SocketAddr) -> Result<TcpListener, CliError> {
    TcpListener::bind(address).await.map_err(|source| CliError::Listen { address, source })
}

/// How a server goes down.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drain {
    /// Time for which it is not ready and still takes requests, so that whoever sends them can learn of it.
    pub(crate) delay: Duration,
    /// Time that requests in flight have after that.
    pub(crate) timeout: Duration,
}

/// Serves until `stop`, then lets requests in flight finish. Those that take too long end with an error.
pub(crate) async fn serve(
    listener: TcpListener,
    frontend: Arc<Frontend>,
    stop: impl Future<Output = ()>,
    drain: Drain,
) {
    let (stopping, stopped) = tokio::sync::oneshot::channel::<()>();
    let graceful = {
        let frontend = frontend.clone();
        async move {
            stop.await;
            frontend.begin_draining();
            tokio::time::sleep(drain.delay).await;
            drop(stopping);
        }
    };
    let too_long = async {
        // Ends with an error when `stopping` is dropped, which is the signal.
        let _ = stopped.await;
        tokio::time::sleep(drain.timeout).await;
    };
    let serving = connections::serve(listener, frontend.clone(), graceful);
    tokio::pin!(serving);
    tokio::select! {
        () = &mut serving => return,
        () = too_long => {}
    }
    tracing::warn!(seconds = drain.timeout.as_secs(), "requests were still in flight (--drain-timeout)");
    frontend.fleet.cut("the frontend is going down");
    let _ = tokio::time::timeout(LAST_CHUNKS, serving).await;
}

/// The settings of the image processor that the engines have, from Chiasm's flag or from vLLM's.
fn with_engine_kwargs(model: ServedModel, args: &ServeArgs, flags: &VllmFlags) -> Result<ServedModel, CliError> {
    let kwargs = match &args.engines.mm_processor_kwargs {
        Some(_) if !flags.processor_kwargs.is_empty() => {
            return Err(CliError::Usage(format!("{PROCESSOR_KWARGS} is given twice: before and after --")));
        }
        Some(kwargs) => kwargs,
        None => &flags.processor_kwargs,
    };
    model.with_engine_kwargs(kwargs.clone()).map_err(|error| CliError::Usage(format!("{PROCESSOR_KWARGS}: {error}")))
}

/// What launched engines are told: the user's flags, and those of Chiasm's that are vLLM's too.
fn vllm_args(args: &ServeArgs) -> Vec<String> {
    let kwargs = args.engines.mm_processor_kwargs.clone();
    let kwargs = kwargs.map(|kwargs| format!("{PROCESSOR_KWARGS}={}", Value::Object(kwargs)));
    args.vllm_args.iter().cloned().chain(kwargs).collect()
}

fn connectors(
    args: &ServeArgs,
    model: &ServedModel,
    options: &EngineOptions,
) -> Result<Vec<Box<dyn Connector>>, CliError> {
    let engines = &args.engines;
    if let Some(count) = engines.sim {
        let config = SimConfig {
            receiver_cache_bytes: receiver_cache_bytes(args),
            ..sim_config(&args.sim_args, Some(model), model.vision.is_some().then_some(options.format))
        };
        return Ok((0..count).map(|_| connector(SimHost::new(config.clone()), options)).collect());
    }
    if !engines.attach.is_empty() {
        let state = state_folder::open(engines.state_dir.as_deref())?;
        let attached = engines.attach.iter().map(AttachHost::new);
        return Ok(attached.map(|host| remembering(host, options, state.as_ref(), model)).collect());
    }
    let state = match engines.keep_engines {
        Some(_) => Some(state_folder::required(engines.state_dir.as_deref())?),
        None => None,
    };
    if let Some(state) = &state {
        let ended = state.sweep();
        tracing::debug!(ended, "forgot engines that had ended without a frontend");
    }
    (0..engines.engines)
        .map(|index| {
            let gpus = engines.gpus_per_engine.map(|count| {
                let first = if engines.share_gpu { 0 } else { index * count };
                (first..first + count).collect()
            });
            let handshake_port = match engines.engine_port {
                None => 0,
                Some(first) => u16::try_from(u32::from(first) + index)
                    .map_err(|_| CliError::Usage(format!("--engine-port {first} leaves no port for engine {index}")))?,
            };
            let host = LaunchHost {
                vllm: engines.vllm.clone(),
                model: args.model.clone(),
                extra_args: vllm_args(args),
                gpus,
                receiver_cache_gb: receiver_cache_gb(args),
                handshake_port,
                keep: engines.keep_engines,
            };
            host.check().map_err(|error| CliError::Usage(error.to_string()))?;
            Ok(remembering(host, options, state.as_ref(), model))
        })
        .collect()
}

/// The connector of a worker whose engine may outlive this process.
fn remembering(
    host: impl EngineHost,
    options: &EngineOptions,
    state: Option<&StateDir>,
    model: &ServedModel,
) -> Box<dyn Connector> {
    let connector = EngineConnector::new(host, options.clone());
    Box::new(match state {
        Some(state) => connector.remembering(state, &model.name),
        None => connector,
    })
}

/// The connector of one worker. All workers of a command have the same options today; each has its own copy.
pub(crate) fn connector(host: impl EngineHost, options: &EngineOptions) -> Box<dyn Connector> {
    Box::new(EngineConnector::new(host, options.clone()))
}

/// Raw values where the engine normalises. vLLM does so by default for the families that can, from some version on.
fn format_policy(args: &ServeArgs, flags: &VllmFlags, model: &ServedModel) -> FormatPolicy {
    match args.engines.mm_tensor_format.or(args.engines.pixels).unwrap_or(TensorFormats::Auto) {
        TensorFormats::Raw => FormatPolicy::Raw,
        TensorFormats::Float => FormatPolicy::Float,
        TensorFormats::Auto => {
            let since = model.vision.as_ref().and_then(|vision| vision.engine_normalizes_since());
            since.filter(|_| flags.normalize).map_or(FormatPolicy::Float, FormatPolicy::RawSince)
        }
    }
}

/// Size of the engines' receiver caches. The engines that are started here cache nothing with `--mm-transfer off`.
fn receiver_cache_gb(args: &ServeArgs) -> f64 {
    match args.engines.mm_transfer {
        MmTransfer::Off => 0.0,
        _ => args.engines.receiver_cache_gb.unwrap_or(DEFAULT_RECEIVER_CACHE_GB),
    }
}

/// An engine's receiver cache keeps the tensors where they are, in its arena; so that must hold as much and what is under
/// way. A model without media needs none.
fn arena_policy(args: &ServeArgs, takes_media: bool) -> ArenaPolicy {
    if !takes_media {
        return ArenaPolicy::Never;
    }
    let gib = args.engines.mm_arena_gb.unwrap_or_else(|| receiver_cache_gb(args) + ARENA_GB_IN_FLIGHT);
    let bytes = (gib * (1_u64 << 30) as f64) as u64;
    match args.engines.mm_transfer {
        MmTransfer::Auto => ArenaPolicy::Preferred { bytes },
        MmTransfer::Shm => ArenaPolicy::Required { bytes },
        MmTransfer::Inline | MmTransfer::Off => ArenaPolicy::Never,
    }
}

/// What the engines' receiver caches hold, where that is known. An attached engine does not tell, and one without a cache
/// dies of an item without data.
fn receiver_cache_bytes(args: &ServeArgs) -> Option<u64> {
    if !args.engines.attach.is_empty() && args.engines.receiver_cache_gb.is_none() {
        return None;
    }
    cache_bytes(receiver_cache_gb(args))
}

/// GiB to bytes as vLLM computes them; `None` for no cache. A fraction of a byte makes no difference to it either.
pub(crate) fn cache_bytes(gib: f64) -> Option<u64> {
    let bytes = gib * (1_u64 << 30) as f64;
    (bytes >= 1.0).then_some(bytes as u64)
}

/// What clients of this model's engines have to know about it.
pub(crate) fn client_options(model: &ServedModel) -> ClientOptions {
    let counted = model.vision.as_ref().map_or(&[][..], |vision| vision.counted_rows());
    ClientOptions {
        vocab_size: model.last_token().0.checked_add(1),
        counted_rows: counted
            .iter()
            .map(|&(rows_of, grid)| CountedRows { rows_of: rows_of.into(), grid: grid.into() })
            .collect(),
        ..ClientOptions::default()
    }
}

fn patience(args: &ServeArgs) -> Patience {
    Patience { suspect_after: args.engines.engine_timeout, hung_after: args.engines.engine_hang_timeout }
}

fn router_config(args: &RoutingArgs) -> RouterConfig {
    RouterConfig {
        policy: args.policy,
        weights: Weights {
            prefill: args.prefill_weight,
            fetch: args.fetch_weight,
            encode: args.encode_weight,
            process: args.process_weight,
            queue: args.queue_weight,
            load: args.load_weight,
            balance: args.balance_weight,
        },
        decoding: Decoding {
            steps_per_second: args.decode_steps_per_second,
            read_per_block: args.decode_read_per_block,
        },
        temperature: args.routing_temperature,
        busy: BusyThresholds {
            kv_usage: args.busy_kv_usage,
            pending_tokens: args.busy_pending_tokens,
            waiting: args.busy_waiting,
        },
        believed_for: args.approximate_ttl,
        max_sessions: args.max_sessions,
        index_max_bytes: Some(args.index_max_bytes),
        ..RouterConfig::default()
    }
}

fn routing_options(args: &RoutingArgs) -> Result<RoutingOptions, CliError> {
    let session_header = match args.session_header.as_str() {
        "" => None,
        name => Some(
            name.parse()
                .map_err(|_| CliError::Usage(format!("--session-header '{name}' is no name of an HTTP header")))?,
        ),
    };
    let busy_status = StatusCode::from_u16(args.busy_status)
        .map_err(|_| CliError::Usage(format!("--busy-status {} is no HTTP status", args.busy_status)))?;
    Ok(RoutingOptions { session_header, busy_status })
}

/// With vLLM's processor, images of formats that are not read here are not refused at once.
fn media_config(args: &MediaArgs, has_helper: bool) -> MediaConfig {
    let image = ImageLimits {
        max_bytes: args.max_image_bytes,
        max_pixels: args.max_image_pixels,
        max_side: args.max_image_side,
        max_aspect_ratio: args.max_image_aspect_ratio,
        max_scans: args.max_image_scans,
    };
    MediaConfig {
        limits: MediaLimits {
            image,
            foreign_images: has_helper,
            video_bytes: args.max_video_bytes,
            audio_bytes: args.max_audio_bytes,
        },
        connect_timeout: args.media_connect_timeout,
        first_byte_timeout: args.media_first_byte_timeout,
        min_body_rate: args.media_min_rate,
        total_timeout: args.media_timeout,
        max_fetches: args.max_media_fetches,
        max_fetches_per_origin: args.max_media_fetches_per_origin,
        max_redirects: args.media_max_redirects,
        cache_bytes: args.media_cache_bytes,
        max_known_names: args.max_media_names,
        failures_last: args.media_error_ttl,
        allowed_local_media_path: args.allowed_local_media_path.clone(),
        allow_private_addresses: args.allow_private_media,
        allowed_ports: args.allowed_media_ports.clone(),
        allowed_domains: args.allowed_media_domains.clone(),
        min_freshness: args.media_min_freshness,
        max_freshness: args.media_max_freshness,
        ..MediaConfig::default()
    }
}

/// Caches count too, and must not take the room of requests.
fn byte_budget(args: &MediaArgs) -> ByteBudget {
    let caches = args.media_cache_bytes.saturating_add(args.processed_cache_bytes);
    ByteBudget::new(args.max_bytes_in_flight.saturating_add(caches))
}

fn limits(args: &ServeArgs) -> Limits {
    let defaults = Limits::default();
    Limits {
        body_bytes: args.limits.max_body_bytes,
        body_timeout: args.limits.body_timeout,
        min_body_rate: args.limits.min_body_rate,
        json_values: args.limits.max_json_values,
        messages: args.limits.max_messages,
        content_parts: args.limits.max_content_parts,
        items_per_prompt: args.media.limit_mm_per_prompt.clone(),
        processed_bytes: args.media.processed_cache_bytes,
        connections: args.limits.max_connections,
        head_timeout: args.limits.head_timeout,
        write_timeout: args.limits.write_timeout,
        requests: args.limits.max_requests,
        trusted_proxies: TrustedProxies::new(args.limits.trusted_proxies.clone()),
        cpu_threads: args.limits.cpu_threads.unwrap_or(defaults.cpu_threads),
        request_cost: args.limits.max_request_cost,
        first_token_timeout: some_time(args.limits.first_token_timeout),
        request_timeout: some_time(args.limits.request_timeout),
        quarantine: args.limits.quarantine,
    }
}

/// A limit of 0 is none.
fn some_time(limit: Duration) -> Option<Duration> {
    (!limit.is_zero()).then_some(limit)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn launched_engines_are_told_the_settings_of_the_image_processor() {
        let cli = ["chiasm", "serve", "m", "--mm-processor-kwargs", r#"{"max_pixels": 9}"#, "--", "--dtype", "float32"];
        let Command::Serve(args) = Cli::parse_from(cli).command else { panic!("serve") };
        assert_eq!(vllm_args(&args), ["--dtype", "float32", r#"--mm-processor-kwargs={"max_pixels":9}"#]);
    }

    #[test]
    fn limits_are_those_of_the_flags() {
        let of = |flags: &[&str]| {
            let Command::Serve(args) = Cli::parse_from([&["chiasm", "serve", "m"], flags].concat()).command else {
                panic!("serve")
            };
            limits(&args)
        };
        let defaults = Limits { cpu_threads: of(&[]).cpu_threads, ..Limits::default() };
        assert_eq!(of(&[]), defaults);
        let flags =
            ["--min-body-rate=5", "--write-timeout=7", "--max-requests=9", "--trusted-proxies=10.0.0.0/8,fd00::1"];
        let networks = ["10.0.0.0/8", "fd00::1"].map(|network| network.parse().unwrap());
        let changed = Limits {
            min_body_rate: 5,
            write_timeout: Duration::from_secs(7),
            requests: Some(9),
            trusted_proxies: TrustedProxies::new(networks.into()),
            ..defaults
        };
        assert_eq!(of(&flags), changed);
        assert!(Cli::try_parse_from(["chiasm", "serve", "m", "--trusted-proxies", "example.com"]).is_err());
    }
}
