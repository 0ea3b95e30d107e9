//! Chromium for tests: the system's, or its package unpacked into the cache with whatever the
//! system lacks for it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::child;
use crate::debian;
use crate::error::Error;
use crate::keyed_dir::{Held, KeyedDir};
use crate::setup::Setup;

/// What tests are told of it by.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_CHROMIUM";

const PACKAGE: &str = "chromium";
/// Names of it in other distributions.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// The program that is started in an unpacked package, which finds its libraries there.
const STARTER: &str = "start";
const SCRIPT: &str = "#!/bin/sh\n\
    here=$(dirname \"$0\")\n\
    libraries=$(find \"$here/usr/lib\" \"$here/lib\" -type d -path '*-linux-gnu*' 2>/dev/null | tr '\\n' ':')\n\
    LD_LIBRARY_PATH=\"$libraries$LD_LIBRARY_PATH\" exec \"$here/usr/lib/chromium/chromium\" \"$@\"\n";

/// The program. An error says why there is none.
pub(crate) fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    if let Some(name) = NAMES.into_iter().find(|name| starts(Path::new(name))) {
        return Ok(name.into());
    }
    let dir = KeyedDir::new(&setup.workspace.cache, "chromium", &[SCRIPT.as_bytes()]);
    let starter = |path: &Path| path.join(STARTER);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| starts(&starter(path)),
        |path, held| unpack(setup, path, held),
    )?;
    Ok(starter(dir.path()))
}

fn unpack(setup: &Setup, path: &Path, held: &Held) -> Result<(), Error> {
    let packages = debian::lacking(PACKAGE)?;
    debian::unpack_all(setup, &packages, path, held)?;
    let starter = path.join(STARTER);
    fs::write(&starter, SCRIPT).map_err(Error::io("write", &starter))?;
    fs::set_permissions(&starter, fs::Permissions::from_mode(0o755))
        .map_err(Error::io("make executable", &starter))?;
    child::read(Command::new(&starter).arg("--version"), "the unpacked Chromium").map(drop)
}

fn starts(program: &Path) -> bool {
    let mut ask = Command::new(program);
    ask.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ask.status().is_ok_and(|status| status.success())
}
