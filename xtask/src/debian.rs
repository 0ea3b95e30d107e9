//! Packages of Debian and its kin, unpacked without root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::Held;
use crate::setup::Setup;

/// Fetches a package by the first of its names that the system's sources know, and unpacks it below
/// `path`.
pub(crate) fn unpack(setup: &Setup, names: &[&str], path: &Path, held: &Held) -> Result<(), Error> {
    let mut result = Ok(());
    for name in names {
        setup.output.say(&format!("fetching {name}"))?;
        let mut fetch = Command::new("apt-get");
        fetch.args(["download", name]).current_dir(path).stdin(held.as_input()?);
        result = child::run(&mut fetch, "apt-get download", &setup.output, &setup.cancel);
        if result.is_ok() {
            break;
        }
    }
    result?;
    unpack_archives(setup, path, held)
}

/// The packages that the system lacks for this one, itself included, by its package manager's
/// account.
pub(crate) fn lacking(package: &str) -> Result<Vec<String>, Error> {
    let mut ask = Command::new("apt-get");
    ask.args(["--simulate", "--no-install-recommends", "install", package]);
    let plan = child::read(&mut ask, "apt-get --simulate install")?;
    let installed = plan.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next());
    Ok(installed.map(str::to_owned).collect())
}

/// Fetches these packages, and unpacks them below `path`.
pub(crate) fn unpack_all(
    setup: &Setup,
    packages: &[String],
    path: &Path,
    held: &Held,
) -> Result<(), Error> {
    setup.output.say(&format!("fetching {}", packages.join(" ")))?;
    let mut fetch = Command::new("apt-get");
    fetch.arg("download").args(packages).current_dir(path).stdin(held.as_input()?);
    child::run(&mut fetch, "apt-get download", &setup.output, &setup.cancel)?;
    unpack_archives(setup, path, held)
}

fn unpack_archives(setup: &Setup, path: &Path, held: &Held) -> Result<(), Error> {
    for archive in archives(path)? {
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("--extract").arg(&archive).arg(path).stdin(held.as_input()?);
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
