//! Checks of the flags of `chiasm serve` and `chiasm agent` that need neither the model's files nor
//! another machine. They run before anything starts, and in `chiasm config check`.

use std::net::SocketAddr;

use chiasm_engine::launch;
use chiasm_fleet::NoEngines;
use chiasm_pipeline::model::ModelError;
use chiasm_prompt::ChatTemplate;
use chiasm_types::Role;

use super::engines::upstream_connector;
use super::groups;
use super::server_flags;
use super::settings::{check_media_folder, routing_options};
use crate::agents;
use crate::cli::{ProcessorChoice, ServeArgs, UpstreamArg};
use crate::error::CliError;
use crate::hub_model;
use crate::key_secret;
use crate::side::Side;
use crate::vllm_flags::VllmFlags;

/// Checks the flags, and the files that they name.
///
/// # Errors
/// [`CliError::Usage`] or [`CliError::File`] names a flag, and the file if it is not usable.
pub(crate) fn check_flags(args: &ServeArgs, side: Side) -> Result<(), CliError> {
    match side {
        Side::Frontend => check_frontend(args)?,
        Side::Agent => check_agent(args)?,
    }
    if let Some(file) = &args.agents.block_key_secret {
        key_secret::check(file)?;
    }
    args.agents.tls.load()?;
    args.prompts.chat_defaults()?;
    args.roles.private_network(args.engines.roles())?;
    check_media_folder(&args.media)?;
    let flags = VllmFlags::parse(&args.vllm_args)?;
    hub_model::check(args, &flags)?;
    ChatTemplate::from_model_dir(&args.model, args.chat_template.as_deref())
        .map_err(ModelError::from)?;
    server_flags::check(args, side)?;
    check_launched(args)
}

/// Checks that vLLM's engines can be launched with the flags after `--`, and the flags of their
/// roles.
fn check_launched(args: &ServeArgs) -> Result<(), CliError> {
    groups::check(args)?;
    let vllm_args = groups::without_group_size(&args.vllm_args);
    let launched = args.launched();
    let has_encoders = launched.roles().any(|role| role == Role::Encode);
    for role in launched.roles() {
        let flags: Vec<String> =
            vllm_args.iter().cloned().chain(args.roles.vllm_flags(role)).collect();
        let has_kv_transfer = matches!(role, Role::Prefill | Role::Decode);
        launch::check_flags(&flags, has_kv_transfer, has_encoders)
            .map_err(|error| CliError::Usage(error.to_string()))?;
    }
    Ok(())
}

fn check_frontend(args: &ServeArgs) -> Result<(), CliError> {
    let has_engines = args.engines.has_any() || args.launched().total() > 0;
    if !has_engines && args.engines.upstream.is_empty() && !args.agents.has_agents() {
        return Err(NoEngines.into());
    }
    agents::check(&args.agents)?;
    args.access.keys()?;
    args.http.certificate()?;
    args.http.cors()?;
    args.traces.check()?;
    routing_options(&args.routing)?;
    let agents = &args.agents;
    let agent_flags = [
        (agents.announce.is_some(), "--announce", "frontends are not discovered"),
        (agents.take_tensors, "--take-tensors", "frontends make tensors themselves"),
        (agents.fetch_media, "--fetch-media", "frontends always fetch media"),
    ];
    if let Some((_, flag, reason)) = agent_flags.into_iter().find(|(is_given, ..)| *is_given) {
        return Err(CliError::Usage(format!("{flag} is for chiasm agent: {reason}")));
    }
    if agents.nixl.nixl_library.is_some() && !agents.has_agents() {
        return Err(CliError::Usage(
            "--nixl-library requires agents (--agents or --discovery)".to_owned(),
        ));
    }
    for upstream in &args.engines.upstream {
        if let UpstreamArg::Server(server) = upstream {
            upstream_connector(server, Default::default())?;
        }
    }
    Ok(())
}

fn check_agent(args: &ServeArgs) -> Result<(), CliError> {
    let tls = &args.agents.tls;
    if tls.load()?.is_none() {
        tls.check_plaintext_at(SocketAddr::new(args.host, args.port))?;
    }
    if args.processor.processor == ProcessorChoice::Vllm && !args.agents.take_tensors {
        return Err(CliError::Usage(
            "--processor vllm is for chiasm serve: frontends make the tensors, and an agent \
             accepts them with --take-tensors"
                .to_owned(),
        ));
    }
    if args.agents.nixl.nixl_library.is_some() && !args.agents.take_tensors {
        return Err(CliError::Usage(
            "--nixl-library requires --take-tensors at an agent".to_owned(),
        ));
    }
    Ok(())
}
