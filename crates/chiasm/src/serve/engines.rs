//! The connectors of engines: launched, simulated, attached, or behind an upstream server.

use std::sync::Arc;

use chiasm_backend::{Connector, PrivateNetwork};
use chiasm_engine::group::EngineGroup;
use chiasm_engine::launch::GroupPlace;
use chiasm_engine::state::StateDir;
use chiasm_engine::{
    AttachHost, ClientOptions, EmbeddingStore, EngineConnector, EngineHost, EngineOptions,
    GroupHost, LaunchHost,
};
use chiasm_pipeline::model::ServedModel;
use chiasm_sim_engine::{EmbeddingFolder, SimConfig};
use chiasm_types::Role;
use chiasm_upstream::{Upstream, UpstreamConnector, UpstreamKey};
use chiasm_vision::AcceptedMedia;
use serde_json::Value;

use super::gpus::{VISIBLE_GPUS, select_gpus};
use super::groups;
use super::settings::{receiver_cache_bytes, receiver_cache_gb};
use super::shared_gpu;
use crate::cli::{AttachArg, RoleArgs, ServeArgs, UpstreamArg};
use crate::error::CliError;
use crate::lora::LoraSetup;
use crate::sim_host::{SimHost, sim_config};
use crate::state_folder;
use crate::vllm_flags::{FlagArg, PROCESSOR_KWARGS};

const REASONING_PARSER: &str = "--reasoning-parser";

/// Returns the flags of launched engines: those after `--`, and Chiasm's own flags that vLLM
/// shares.
///
/// Engines need `reasoning_parser` to find the end of the reasoning, because constraints apply only
/// after it.
pub(super) fn vllm_args(args: &ServeArgs, reasoning_parser: Option<&str>) -> Vec<String> {
    let is_given = args
        .vllm_args
        .iter()
        .filter_map(|arg| FlagArg::parse(arg))
        .any(|flag| flag.name == REASONING_PARSER);
    let parser =
        reasoning_parser.filter(|_| !is_given).map(|name| format!("{REASONING_PARSER}={name}"));
    let kwargs = args.engines.mm_processor_kwargs.clone();
    let kwargs = kwargs.map(|kwargs| format!("{PROCESSOR_KWARGS}={}", Value::Object(kwargs)));
    let given = groups::without_group_size(&args.vllm_args);
    given.into_iter().chain(kwargs).chain(parser).collect()
}

/// Returns the connectors of launched, simulated or attached engines.
pub(super) fn connectors(
    args: &ServeArgs,
    model: &ServedModel,
    options: &EngineOptions,
    private_network: Option<PrivateNetwork>,
    loras: &LoraSetup,
) -> Result<Vec<Box<dyn Connector>>, CliError> {
    let engines = &args.engines;
    let role_options = |role| EngineOptions { role, ..options.clone() };
    if let Some(counts) = &engines.sim {
        let config = SimConfig {
            receiver_cache_bytes: receiver_cache_bytes(args),
            ..sim_config(
                &args.sim_args,
                Some(model),
                model.vision.is_some().then_some(options.format),
            )
        };
        let side_channel = private_network.map_or(config.side_channel, |network| network.address);
        let config =
            SimConfig { lora: loras.sim_limits.clone().or(config.lora), side_channel, ..config };
        let folder = options.embeddings.as_ref().and_then(|store| store.folder());
        let role_config = |role| SimConfig {
            kv_connector: config.kv_connector || matches!(role, Role::Prefill | Role::Decode),
            embeddings: folder.map(|folder| EmbeddingFolder {
                folder: folder.into(),
                encode_only: role == Role::Encode,
            }),
            ..config.clone()
        };
        if let Some(groups) = groups::groups(args, counts)? {
            let host = |_, rank| Ok(SimHost::new(SimConfig { rank, ..config.clone() }));
            return group_connectors(options, groups, host);
        }
        return Ok(counts
            .roles()
            .map(|role| connector(SimHost::new(role_config(role)), &role_options(role)))
            .collect());
    }
    if !engines.attach.is_empty() {
        let state = state_folder::open(engines.state_dir.as_deref())?;
        let attached = |AttachArg { role, handshake }: &AttachArg| {
            stateful_connector(
                AttachHost::new(handshake),
                &role_options(*role),
                state.as_ref(),
                model,
            )
        };
        return Ok(engines.attach.iter().map(attached).collect());
    }
    let state = match engines.keep_engines {
        Some(_) => Some(state_folder::open_required(engines.state_dir.as_deref())?),
        None => None,
    };
    if let Some(state) = &state {
        let ended = state.sweep();
        tracing::debug!(ended, "removed records of engines that had ended without a frontend");
    }
    let launched = args.launched();
    let shares =
        engines.share_gpu.then(|| shared_gpu::GpuShares::from_args(args, &launched)).transpose()?;
    if let Some(groups) = groups::groups(args, &launched)? {
        let host = |index, rank| rank_host(args, model, loras, index, rank);
        return group_connectors(options, groups, host);
    }
    (0..)
        .zip(launched.roles())
        .map(|(index, role)| {
            let side_channel = private_network.map(|network| network.address);
            let embeddings = options.embeddings.clone();
            let host = LaunchHost {
                side_channel,
                embeddings,
                ..launch_host(args, model, loras, index, role)?
            };
            let host = match &shares {
                Some(shares) => shares.apply(host),
                None => host,
            };
            host.check().map_err(|error| CliError::Usage(error.to_string()))?;
            Ok(stateful_connector(host, &role_options(role), state.as_ref(), model))
        })
        .collect()
}

/// Returns the connectors of engines in groups, one for each rank. `host` starts the engine of a
/// group, by the group's index, and a rank.
fn group_connectors<H: EngineHost>(
    options: &EngineOptions,
    groups: Vec<Arc<EngineGroup>>,
    host: impl Fn(u32, u16) -> Result<H, CliError>,
) -> Result<Vec<Box<dyn Connector>>, CliError> {
    let mut connectors = Vec::new();
    for (index, group) in (0..).zip(groups) {
        for rank in 0..group.size() {
            let client = ClientOptions { rank, ..options.client.clone() };
            let options = EngineOptions { client, ..options.clone() };
            let host = GroupHost::new(group.clone(), rank, host(index, rank)?);
            connectors.push(connector(host, &options));
        }
    }
    Ok(connectors)
}

/// Returns the launcher of a rank in the group with this index.
fn rank_host(
    args: &ServeArgs,
    model: &ServedModel,
    loras: &LoraSetup,
    index: u32,
    rank: u16,
) -> Result<LaunchHost, CliError> {
    let size = groups::group_size(&args.vllm_args)?;
    let host = LaunchHost {
        gpus: groups::gpus_of_rank(args, index, size, rank)?,
        place: Some(GroupPlace { size, rank }),
        handshake_port: handshake_port(args, index * u32::from(size) + u32::from(rank))?,
        ..launch_host(args, model, loras, index, Role::Aggregated)?
    };
    host.check().map_err(|error| CliError::Usage(error.to_string()))?;
    Ok(host)
}

/// Returns the store through which engines exchange embeddings, if some engines only encode.
pub(super) fn embedding_store(args: &ServeArgs) -> Result<Option<Arc<EmbeddingStore>>, CliError> {
    let RoleArgs { ec_connector, embedding_store_bytes, .. } = &args.roles;
    let counts = args.engines.sim.as_ref().or(args.engines.engines.as_ref());
    if counts.is_some_and(|counts| counts.roles().any(|role| role == Role::Encode)) {
        if args.engines.keep_engines.is_some() {
            let message = "--keep-engines is not supported with encode engines: their store ends \
                           with this process";
            return Err(CliError::Usage(message.to_owned()));
        }
        if !counts.is_some_and(|counts| counts.roles().any(Role::can_answer))
            && !args.agents.has_agents()
        {
            return Err(CliError::Usage(
                "encode engines can't answer requests: add engines with other roles".to_owned(),
            ));
        }
        let store = EmbeddingStore::new(ec_connector.clone(), *embedding_store_bytes);
        return store
            .map(|store| Some(Arc::new(store)))
            .map_err(|error| CliError::Usage(error.to_string()));
    }
    let attached = args.engines.attach.iter().any(|attached| attached.role == Role::Encode);
    Ok(attached.then(|| Arc::new(EmbeddingStore::external(*embedding_store_bytes))))
}

/// Returns the launcher of the engine with this index.
fn launch_host(
    args: &ServeArgs,
    model: &ServedModel,
    loras: &LoraSetup,
    index: u32,
    role: Role,
) -> Result<LaunchHost, CliError> {
    let engines = &args.engines;
    let visible = std::env::var(VISIBLE_GPUS).ok();
    let gpus = select_gpus(index, engines.gpus_per_engine, engines.share_gpu, visible.as_deref())?;
    let common_args = vllm_args(args, model.answers.engine_parser());
    Ok(LaunchHost {
        vllm: engines.vllm.clone(),
        model: args.model.clone(),
        extra_args: common_args
            .into_iter()
            .chain(loras.engine_args.iter().cloned())
            .chain(args.roles.vllm_flags(role))
            .collect(),
        gpus,
        receiver_cache_gb: receiver_cache_gb(args),
        handshake_port: handshake_port(args, index)?,
        role,
        kv_connector: args.roles.kv_connector.clone(),
        embeddings: None,
        side_channel: None,
        place: None,
        keep: engines.keep_engines,
    })
}

/// Returns the handshake port of the engine with this index; 0 for any free port.
fn handshake_port(args: &ServeArgs, index: u32) -> Result<u16, CliError> {
    let Some(first) = args.engines.engine_port else { return Ok(0) };
    u16::try_from(u32::from(first) + index).map_err(|_| {
        CliError::Usage(format!("--engine-port {first} leaves no port for engine {index}"))
    })
}

/// The servers of `--upstream`.
#[derive(Default)]
pub(super) struct Upstreams {
    pub(super) connectors: Vec<Box<dyn Connector>>,
    /// The keys of requests to these servers.
    pub(super) keys: Vec<Arc<UpstreamKey>>,
}

/// Returns the connectors of the servers of `--upstream`.
pub(super) fn upstreams(args: &ServeArgs, model: &Arc<ServedModel>) -> Result<Upstreams, CliError> {
    let mut names = vec![model.name.clone(), model.root.clone()];
    names.dedup();
    let mut upstreams = Upstreams::default();
    for upstream in &args.engines.upstream {
        // Workers of Dynamo are added when they are discovered.
        let UpstreamArg::Server(server) = upstream else { continue };
        for upstream in server.per_engine() {
            let connector = upstream_connector(&upstream, model.processor())?
                .with_largest_item(model.largest_item(AcceptedMedia::ALL));
            upstreams.keys.extend(connector.key());
            upstreams.connectors.push(Box::new(connector.with_names(names.clone())));
        }
    }
    Ok(upstreams)
}

/// Creates the connector of one server of `--upstream`, for a model with this processor.
pub(super) fn upstream_connector(
    upstream: &Upstream,
    processor: Arc<[u8]>,
) -> Result<UpstreamConnector, CliError> {
    UpstreamConnector::new(upstream.clone(), processor)
        .map_err(|error| CliError::Usage(format!("--upstream {upstream}: {error}")))
}

/// Creates the connector of an engine that may outlive this process.
fn stateful_connector(
    host: impl EngineHost,
    options: &EngineOptions,
    state: Option<&StateDir>,
    model: &ServedModel,
) -> Box<dyn Connector> {
    let connector = EngineConnector::new(host, options.clone());
    Box::new(match state {
        Some(state) => connector.with_state(state, &model.name),
        None => connector,
    })
}

/// Creates the connector of an engine that ends with this process.
pub(crate) fn connector(host: impl EngineHost, options: &EngineOptions) -> Box<dyn Connector> {
    Box::new(EngineConnector::new(host, options.clone()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn launched_engines_get_shared_flags() {
        let cli = [
            "chiasm",
            "serve",
            "m",
            "--mm-processor-kwargs",
            r#"{"max_pixels": 9}"#,
            "--",
            "--dtype",
            "float32",
        ];
        let Command::Serve(args) = Cli::parse_from(cli).command else { panic!("serve") };
        let kwargs = r#"--mm-processor-kwargs={"max_pixels":9}"#;
        assert_eq!(vllm_args(&args, None), ["--dtype", "float32", kwargs]);
        assert_eq!(
            vllm_args(&args, Some("qwen3")),
            ["--dtype", "float32", kwargs, "--reasoning-parser=qwen3"]
        );
        for (flag, is_parser) in [
            ("--reasoning-parser=deepseek_r1", true),
            ("--reasoning_parser=deepseek_r1", true),
            ("--reasoning-parser-plugin=plugin.py", false),
        ] {
            let cli = Cli::parse_from(["chiasm", "serve", "m", "--", flag]);
            let Command::Serve(args) = cli.command else { panic!("serve") };
            let detected = (!is_parser).then_some("--reasoning-parser=qwen3");
            let expected: Vec<&str> = [flag].into_iter().chain(detected).collect();
            assert_eq!(vllm_args(&args, Some("qwen3")), expected);
        }
    }
}
