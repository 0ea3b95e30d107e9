//! etcd for tests: the system's, or its package unpacked into the cache.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

/// What tests are told of it by.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_ETCD";

const PACKAGES: [&str; 2] = ["etcd-server", "etcd"];
/// Where it is in the package.
const PROGRAM: &str = "usr/bin/etcd";

/// The program. An error says why there is none.
pub(crate) fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    if is_there() {
        return Ok("etcd".into());
    }
    let dir = KeyedDir::new(&setup.workspace.cache, "etcd", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| path.join(PROGRAM).is_file(),
        |path, held| debian::unpack(setup, &PACKAGES, path, held),
    )?;
    Ok(dir.path().join(PROGRAM))
}

fn is_there() -> bool {
    let mut ask = Command::new("etcd");
    ask.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ask.status().is_ok_and(|status| status.success())
}
