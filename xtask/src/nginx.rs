//! nginx for a bench: the system's, or its package unpacked into the cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

const PACKAGES: [&str; 1] = ["nginx"];
/// Where it is in the package, which needs no libraries but those that every system has.
const PROGRAM: &str = "usr/sbin/nginx";
/// What it says before its version.
const SAYS: &str = "nginx version: nginx/";

/// The program and its version. An error says why there is none.
pub(crate) fn ensure(setup: &Setup) -> Result<(PathBuf, String), Error> {
    if let Some(version) = version(Path::new("nginx")) {
        return Ok(("nginx".into(), version));
    }
    let dir = KeyedDir::new(&setup.workspace.cache, "nginx", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| version(&path.join(PROGRAM)).is_some(),
        |path, held| debian::unpack(setup, &PACKAGES, path, held),
    )?;
    let program = dir.path().join(PROGRAM);
    let version = version(&program).ok_or_else(|| Error::MissingFile { path: program.clone() })?;
    Ok((program, version))
}

/// Its version, by its own account, if it starts.
fn version(program: &Path) -> Option<String> {
    let mut ask = Command::new(program);
    let said =
        ask.arg("-v").stdin(Stdio::null()).output().ok().filter(|said| said.status.success())?;
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    Some(said.strip_prefix(SAYS)?.split_whitespace().next()?.to_owned())
}
