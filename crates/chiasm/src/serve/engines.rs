//! What connects to engines: those that are launched, simulated, attached, or somebody else's.

use std::sync::Arc;

use chiasm_backend::{Connector, PrivateNetwork};
use chiasm_engine::state::StateDir;
use chiasm_engine::{
    AttachHost, EmbeddingStore, EngineConnector, EngineHost, EngineOptions, LaunchHost,
};
use chiasm_pipeline::model::ServedModel;
use chiasm_sim_engine::{EmbeddingFolder, SimConfig};
use chiasm_types::Role;
use chiasm_upstream::{SetupError, UpstreamConnector, UpstreamKey};
use chiasm_vision::TakenKinds;
use serde_json::Value;

use super::settings::{receiver_cache_bytes, receiver_cache_gb};
use super::shared_gpu;
use crate::cli::{AttachArg, RoleArgs, ServeArgs, UpstreamArg};
use crate::error::CliError;
use crate::lora::Loras;
use crate::sim_host::{SimHost, sim_config};
use crate::state_folder;
use crate::vllm_flags::PROCESSOR_KWARGS;

const REASONING_PARSER: &str = "--reasoning-parser";
/// The GPUs that engines see, if it is set.
const VISIBLE_GPUS: &str = "CUDA_VISIBLE_DEVICES";

/// What launched engines are told: the user's flags, and those of Chiasm's that are vLLM's too. An
/// answer that is held to something is held to it behind its reasoning, which engines find with
/// `reasoning_parser`.
pub(super) fn vllm_args(args: &ServeArgs, reasoning_parser: Option<&str>) -> Vec<String> {
    let is_told = args.vllm_args.iter().any(|arg| arg.starts_with(REASONING_PARSER));
    let parser =
        reasoning_parser.filter(|_| !is_told).map(|name| format!("{REASONING_PARSER}={name}"));
    let kwargs = args.engines.mm_processor_kwargs.clone();
    let kwargs = kwargs.map(|kwargs| format!("{PROCESSOR_KWARGS}={}", Value::Object(kwargs)));
    args.vllm_args.iter().cloned().chain(kwargs).chain(parser).collect()
}

/// The connectors of engines that are launched, simulated or attached, as the command line says.
pub(super) fn connectors(
    args: &ServeArgs,
    model: &ServedModel,
    options: &EngineOptions,
    private_network: Option<PrivateNetwork>,
    loras: &Loras,
) -> Result<Vec<Box<dyn Connector>>, CliError> {
    let engines = &args.engines;
    let of_role = |role| EngineOptions { role, ..options.clone() };
    if let Some(counts) = &engines.sim {
        let config = SimConfig {
            receiver_cache_bytes: receiver_cache_bytes(args),
            ..sim_config(
                &args.sim_args,
                Some(model),
                model.vision.is_some().then_some(options.format),
            )
        };
        let side_channel = private_network.map_or(config.side_channel, |here| here.address);
        let config =
            SimConfig { lora: loras.of_sim.clone().or(config.lora), side_channel, ..config };
        let folder = options.embeddings.as_ref().and_then(|store| store.folder());
        let sim = |role| SimConfig {
            leaves_prompts: config.leaves_prompts || matches!(role, Role::Prefill | Role::Decode),
            embeddings: folder.map(|folder| EmbeddingFolder {
                folder: folder.into(),
                leaves: role == Role::Encode,
            }),
            ..config.clone()
        };
        return Ok(counts
            .roles()
            .map(|role| connector(SimHost::new(sim(role)), &of_role(role)))
            .collect());
    }
    if !engines.attach.is_empty() {
        let state = state_folder::open(engines.state_dir.as_deref())?;
        let attached = |AttachArg { role, handshake }: &AttachArg| {
            remembering(AttachHost::new(handshake), &of_role(*role), state.as_ref(), model)
        };
        return Ok(engines.attach.iter().map(attached).collect());
    }
    let state = match engines.keep_engines {
        Some(_) => Some(state_folder::required(engines.state_dir.as_deref())?),
        None => None,
    };
    if let Some(state) = &state {
        let ended = state.sweep();
        tracing::debug!(ended, "forgot engines that had ended without a frontend");
    }
    let launched = args.launched();
    let shares = engines.share_gpu.then(|| shared_gpu::Shares::of(args, &launched)).transpose()?;
    (0..)
        .zip(launched.roles())
        .map(|(index, role)| {
            let side_channel = private_network.map(|here| here.address);
            let embeddings = options.embeddings.clone();
            let host = LaunchHost {
                side_channel,
                embeddings,
                ..launch_host(args, model, loras, index, role)?
            };
            let host = match &shares {
                Some(shares) => shares.told(host),
                None => host,
            };
            host.check().map_err(|error| CliError::Usage(error.to_string()))?;
            Ok(remembering(host, &of_role(role), state.as_ref(), model))
        })
        .collect()
}

/// Where engines leave embeddings for each other, if some encode alone.
pub(super) fn embedding_store(args: &ServeArgs) -> Result<Option<Arc<EmbeddingStore>>, CliError> {
    let RoleArgs { ec_connector, embedding_store_bytes, .. } = &args.roles;
    let counts = args.engines.sim.as_ref().or(args.engines.engines.as_ref());
    if counts.is_some_and(|counts| counts.roles().any(|role| role == Role::Encode)) {
        if args.engines.keep_engines.is_some() {
            let why = "--keep-engines does not work with engines that encode: their store goes with this process";
            return Err(CliError::Usage(why.to_owned()));
        }
        if !counts.is_some_and(|counts| counts.roles().any(Role::answers))
            && !args.agents.has_agents()
        {
            return Err(CliError::Usage(
                "engines that encode alone can't answer: others have to be there".to_owned(),
            ));
        }
        let store = EmbeddingStore::new(ec_connector.clone(), *embedding_store_bytes);
        return store
            .map(|store| Some(Arc::new(store)))
            .map_err(|error| CliError::Usage(error.to_string()));
    }
    let attached = args.engines.attach.iter().any(|attached| attached.role == Role::Encode);
    Ok(attached.then(|| Arc::new(EmbeddingStore::of_others(*embedding_store_bytes))))
}

/// What launches the engine of this number.
fn launch_host(
    args: &ServeArgs,
    model: &ServedModel,
    loras: &Loras,
    index: u32,
    role: Role,
) -> Result<LaunchHost, CliError> {
    let engines = &args.engines;
    let gpus = match engines.share_gpu {
        true => shared_gpu::gpus(engines.gpus_per_engine, std::env::var_os(VISIBLE_GPUS).is_some()),
        false => {
            engines.gpus_per_engine.map(|count| (index * count..(index + 1) * count).collect())
        }
    };
    let handshake_port = match engines.engine_port {
        None => 0,
        Some(first) => u16::try_from(u32::from(first) + index).map_err(|_| {
            CliError::Usage(format!("--engine-port {first} leaves no port for engine {index}"))
        })?,
    };
    let of_all = vllm_args(args, model.answers.engine_parser());
    Ok(LaunchHost {
        vllm: engines.vllm.clone(),
        model: args.model.clone(),
        extra_args: of_all
            .into_iter()
            .chain(loras.engine_args.iter().cloned())
            .chain(args.roles.of(role))
            .collect(),
        gpus,
        receiver_cache_gb: receiver_cache_gb(args),
        handshake_port,
        role,
        kv_connector: args.roles.kv_connector.clone(),
        embeddings: None,
        side_channel: None,
        keep: engines.keep_engines,
    })
}

/// The servers that somebody else runs.
#[derive(Default)]
pub(super) struct Upstreams {
    pub(super) connectors: Vec<Box<dyn Connector>>,
    /// The keys that requests to them carry.
    pub(super) keys: Vec<Arc<UpstreamKey>>,
}

/// Returns the servers that somebody else runs.
pub(super) fn upstreams(args: &ServeArgs, model: &Arc<ServedModel>) -> Result<Upstreams, CliError> {
    let mut names = vec![model.name.clone(), model.root.clone()];
    names.dedup();
    let mut upstreams = Upstreams::default();
    for upstream in &args.engines.upstream {
        // Workers of Dynamo come as they are found.
        let UpstreamArg::Server(upstream) = upstream else { continue };
        let connector = UpstreamConnector::new(upstream.clone(), model.processor());
        let wrong = |error: SetupError| CliError::Usage(format!("--upstream {upstream}: {error}"));
        let connector =
            connector.map_err(wrong)?.with_largest_item(model.largest_item(TakenKinds::ALL));
        upstreams.keys.extend(connector.key());
        upstreams.connectors.push(Box::new(connector.with_names(names.clone())));
    }
    Ok(upstreams)
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

/// The connector of one worker. All workers of a command have the same options today; each has its
/// own copy.
pub(crate) fn connector(host: impl EngineHost, options: &EngineOptions) -> Box<dyn Connector> {
    Box::new(EngineConnector::new(host, options.clone()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn launched_engines_are_told_what_is_theirs_too() {
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
        let told = ["chiasm", "serve", "m", "--", "--reasoning-parser", "deepseek_r1"];
        let Command::Serve(args) = Cli::parse_from(told).command else { panic!("serve") };
        assert_eq!(vllm_args(&args, Some("qwen3")), ["--reasoning-parser", "deepseek_r1"]);
    }
}
