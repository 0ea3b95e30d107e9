//! The folder in which knowledge of KV caches outlives this process.

use chiasm_fleet::KeptIndexes;

use crate::cli::{ServeArgs, UpstreamArg};
use crate::error::CliError;
use crate::{key_secret, state_folder};

/// The name of the folder within the state folder.
const NAME: &str = "kv";

/// Opens the folder if some workers outlive this process. Block keys then need a secret that the
/// next process has, too: it is set here unless it is already (`has_secret`). A folder that can't
/// be opened is a warning, and everything else works.
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
        tracing::warn!(%error, "what is known of KV caches ends with this process (--state-dir names a folder for it)");
    };
    opened.inspect_err(warn).ok()
}

fn try_open(args: &ServeArgs, has_secret: bool) -> Result<KeptIndexes, CliError> {
    let asked = args.engines.state_dir.as_deref();
    // Creates the folder, for this user alone.
    state_folder::required(asked)?;
    if !has_secret {
        key_secret::share(args.agents.block_key_secret.as_deref(), asked)?;
    }
    let folder = state_folder::path(asked)?.join(NAME);
    KeptIndexes::open(&folder).map_err(|source| CliError::file(&folder, source))
}
