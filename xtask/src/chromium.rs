//! Chromium for tests: the installed program, or a package that is unpacked into the cache with its
//! missing dependencies.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::child;
use crate::debian;
use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;

/// The environment variable that passes the program to tests.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_CHROMIUM";

const PACKAGE: &str = "chromium";
/// The program's names in different distributions.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// The script in an unpacked package that starts Chromium with the package's libraries.
const STARTER: &str = "start";
const SCRIPT: &str = "#!/bin/sh\n\
    here=$(dirname \"$0\")\n\
    libraries=$(find \"$here/usr/lib\" \"$here/lib\" -type d -path '*-linux-gnu*' 2>/dev/null \
    | tr '\\n' ':')\n\
    LD_LIBRARY_PATH=\"$libraries$LD_LIBRARY_PATH\" \
    exec \"$here/usr/lib/chromium/chromium\" \"$@\"\n";

/// Returns the program; unpacks its package if Chromium is not installed.
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
        |path, lock| unpack(setup, path, lock),
    )?;
    Ok(starter(dir.path()))
}

fn unpack(setup: &Setup, path: &Path, lock: &DirLock) -> Result<(), Error> {
    let packages = debian::missing_packages(PACKAGE)?;
    debian::unpack_all(setup, &packages, path, lock)?;
    let starter = path.join(STARTER);
    fs::write(&starter, SCRIPT).map_err(Error::io("write", &starter))?;
    fs::set_permissions(&starter, fs::Permissions::from_mode(0o755))
        .map_err(Error::io("make executable", &starter))?;
    child::read(Command::new(&starter).arg("--version"), "the unpacked Chromium").map(drop)
}

/// Returns `true` if the program can print its version.
fn starts(program: &Path) -> bool {
    let mut version = Command::new(program);
    version.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}
