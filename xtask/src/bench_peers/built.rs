//! The directory into which cargo builds.

use std::path::{Path, PathBuf};

use crate::child;
use crate::error::Error;
use crate::test_run::cargo;
use crate::vllm_env::Setup;

/// The target directory of the workspace that `manifest` belongs to.
pub(crate) fn target_directory(setup: &Setup, manifest: &Path) -> Result<PathBuf, Error> {
    let mut locate = cargo(&setup.workspace);
    locate.args(["metadata", "--no-deps", "--format-version=1", "--manifest-path"]).arg(manifest);
    let what = "cargo metadata";
    let printed = child::read(&mut locate, what)?;
    let metadata: serde_json::Value =
        serde_json::from_str(&printed).map_err(|source| Error::Json { what: what.to_owned(), source })?;
    let target = metadata.get("target_directory").and_then(serde_json::Value::as_str);
    let target = target.ok_or_else(|| Error::Unreadable { what: what.to_owned(), printed: String::new() })?;
    Ok(target.into())
}
