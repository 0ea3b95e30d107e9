//! etcd for tests: the installed program, or a package that is unpacked into the cache.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

/// The environment variable that passes the program to tests.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_ETCD";

const PACKAGES: [&str; 2] = ["etcd-server", "etcd"];
/// The path of the program in the package.
const PROGRAM: &str = "usr/bin/etcd";

/// Returns the program; unpacks its package if etcd is not installed.
pub(crate) fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    if is_installed() {
        return Ok("etcd".into());
    }
    let dir = KeyedDir::new(&setup.workspace.cache, "etcd", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| path.join(PROGRAM).is_file(),
        |path, lock| debian::unpack(setup, &PACKAGES, path, lock),
    )?;
    Ok(dir.path().join(PROGRAM))
}

fn is_installed() -> bool {
    let mut version = Command::new("etcd");
    version.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}
