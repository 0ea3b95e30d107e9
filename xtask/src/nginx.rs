//! nginx for a benchmark: the installed program, or a package that is unpacked into the cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

const PACKAGES: [&str; 1] = ["nginx"];
/// The path of the program in the package. It needs only libraries that every system has.
const PROGRAM: &str = "usr/sbin/nginx";
/// The text in front of the version in the output of `nginx -v`.
const VERSION_PREFIX: &str = "nginx version: nginx/";

/// Returns the program and its version; unpacks its package if nginx is not installed.
pub(crate) fn ensure(setup: &Setup) -> Result<(PathBuf, String), Error> {
    if let Some(version) = version(Path::new("nginx")) {
        return Ok(("nginx".into(), version));
    }
    let dir = KeyedDir::new(&setup.workspace.cache, "nginx", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| version(&path.join(PROGRAM)).is_some(),
        |path, lock| debian::unpack(setup, &PACKAGES, path, lock),
    )?;
    let program = dir.path().join(PROGRAM);
    let version = version(&program).ok_or_else(|| Error::MissingFile { path: program.clone() })?;
    Ok((program, version))
}

/// Returns the version that the program prints; `None` if the program does not start.
fn version(program: &Path) -> Option<String> {
    let mut print_version = Command::new(program);
    print_version.arg("-v").stdin(Stdio::null());
    let output = print_version.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Some(text.strip_prefix(VERSION_PREFIX)?.split_whitespace().next()?.to_owned())
}
