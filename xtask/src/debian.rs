//! Packages of Debian and its derivatives, unpacked without root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::DirLock;
use crate::setup::Setup;

/// Downloads a package by the first of its names that the system's sources know, and unpacks it
/// below `path`.
pub(crate) fn unpack(
    setup: &Setup,
    names: &[&str],
    path: &Path,
    lock: &DirLock,
) -> Result<(), Error> {
    let mut result = Ok(());
    for name in names {
        setup.output.print_line(&format!("fetching {name}"))?;
        let mut fetch = Command::new("apt-get");
        fetch.args(["download", name]).current_dir(path).stdin(lock.as_stdin()?);
        result = child::run(&mut fetch, "apt-get download", &setup.output, &setup.cancel);
        if result.is_ok() {
            break;
        }
    }
    result?;
    unpack_archives(setup, path, lock)
}

/// Returns `package` and its dependencies that are not installed, as `apt-get --simulate` lists
/// them.
pub(crate) fn missing_packages(package: &str) -> Result<Vec<String>, Error> {
    let mut simulate = Command::new("apt-get");
    simulate.args(["--simulate", "--no-install-recommends", "install", package]);
    let plan = child::read(&mut simulate, "apt-get --simulate install")?;
    let to_install = plan.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next());
    Ok(to_install.map(str::to_owned).collect())
}

/// Downloads the packages and unpacks them below `path`.
pub(crate) fn unpack_all(
    setup: &Setup,
    packages: &[String],
    path: &Path,
    lock: &DirLock,
) -> Result<(), Error> {
    setup.output.print_line(&format!("fetching {}", packages.join(" ")))?;
    let mut fetch = Command::new("apt-get");
    fetch.arg("download").args(packages).current_dir(path).stdin(lock.as_stdin()?);
    child::run(&mut fetch, "apt-get download", &setup.output, &setup.cancel)?;
    unpack_archives(setup, path, lock)
}

fn unpack_archives(setup: &Setup, path: &Path, lock: &DirLock) -> Result<(), Error> {
    for archive in archives(path)? {
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("--extract").arg(&archive).arg(path).stdin(lock.as_stdin()?);
        child::run(&mut unpack, "dpkg-deb", &setup.output, &setup.cancel)?;
    }
    Ok(())
}

fn archives(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(Error::io("read", dir))?;
    Ok(entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "deb"))
        .collect())
}
