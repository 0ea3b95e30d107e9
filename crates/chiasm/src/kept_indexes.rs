//! The folder for prefix indexes that outlive this process.

use chiasm_fleet::KeptIndexes;

use crate::cli::{ServeArgs, UpstreamArg};
use crate::error::CliError;
use crate::{key_secret, state_folder};

/// The name of the folder within the state folder.
const FOLDER_NAME: &str = "kv";

/// Opens the folder if some workers outlive this process.
///
/// Block keys must then be the same in the next process, so this function also sets the shared
/// secret, unless `has_secret`. A folder that can't be opened only causes a warning.
pub(crate) fn open(args: &ServeArgs, has_secret: bool) -> Option<KeptIndexes> {
    let engines = &args.engines;
    let is_server = |upstream: &UpstreamArg| matches!(upstream, UpstreamArg::Server(_));
    let any_outlives = engines.keep_engines.is_some()
        || !engines.attach.is_empty()
        || engines.upstream.iter().any(is_server);
    if !any_outlives {
        return None;
    }
    let opened = try_open(args, has_secret);
    let warn = |error: &CliError| {
        tracing::warn!(
            %error,
            "knowledge of KV caches is lost when this process ends; give a folder with --state-dir"
        );
    };
    opened.inspect_err(warn).ok()
}

fn try_open(args: &ServeArgs, has_secret: bool) -> Result<KeptIndexes, CliError> {
    let state_dir = args.engines.state_dir.as_deref();
    // Creates the folder, readable by this user only.
    state_folder::open_required(state_dir)?;
    if !has_secret {
        key_secret::load(args.agents.block_key_secret.as_deref(), state_dir)?;
    }
    let folder = state_folder::path(state_dir)?.join(FOLDER_NAME);
    KeptIndexes::open(&folder).map_err(|source| CliError::file(&folder, source))
}
