//! Cross compilation for other systems and for older versions of the same system.
//!
//! Zig is a C compiler and linker for all of them and has the symbols of each glibc. Zig and the
//! cargo command that uses it come from PyPI, in an environment of their own in the user's cache.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo;
use crate::child::{self, Cancel, Output};
use crate::debian;
use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;

/// The supported target triples.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];
/// The oldest supported glibc: that of Debian 10, RHEL 8 and Ubuntu 20.04.
const GLIBC: &str = "2.28";
const PACKAGES: [&str; 2] = ["ziglang==0.17.1", "cargo-zigbuild==0.24.1"];

/// The emulator of 64-bit ARM programs, in its package.
const EMULATOR: &str = "usr/bin/qemu-aarch64-static";
const EMULATOR_PACKAGES: [&str; 2] = ["qemu-user-static", "libc6-arm64-cross"];
/// The folder of the libraries for 64-bit ARM, in their package.
const ARM_LIBRARIES: &str = "usr/aarch64-linux-gnu";

/// A target triple to build for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target(&'static str);

impl Target {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        TARGETS.into_iter().find(|target| *target == name).map(Self)
    }

    pub(crate) fn name(self) -> &'static str {
        self.0
    }

    /// Returns the names of all targets, for an error.
    pub(crate) fn names() -> String {
        TARGETS.map(|target| format!("`{target}`")).join(" or ")
    }

    /// Returns `true` if the target's architecture is not that of this machine.
    fn is_foreign(self) -> bool {
        !self.0.starts_with(std::env::consts::ARCH)
    }
}

/// Returns a `cargo zigbuild` command for this target; the caller appends further arguments.
pub(crate) fn cargo(setup: &Setup, target: Target, profile: &str) -> Result<Command, Error> {
    let zig = ensure(setup)?;
    let mut add = Command::new("rustup");
    add.args(["target", "add", target.0]).current_dir(&setup.workspace.root);
    child::run(&mut add, "rustup target add", &setup.output, &setup.cancel)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [zig.join("bin")].into_iter().chain(std::env::split_paths(&path));
    let mut cargo = cargo::cargo(&setup.workspace);
    // The environment's path has no character that is invalid in PATH.
    cargo.env("PATH", std::env::join_paths(folders).unwrap_or(path));
    // The system's `strip` does not support programs of other systems.
    cargo.env(format!("CARGO_PROFILE_{}_STRIP", profile.to_uppercase()), "symbols");
    cargo.arg("zigbuild").args(["--target", &format!("{}.{GLIBC}", target.0)]);
    Ok(cargo)
}

/// Makes the environment with Zig unless it exists.
fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    let inputs: Vec<&[u8]> = PACKAGES.iter().map(|package| package.as_bytes()).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "zig", &inputs);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| path.join("bin/cargo-zigbuild").is_file(),
        |path, lock| make(setup, path, lock),
    )?;
    Ok(dir.path().to_owned())
}

fn make(setup: &Setup, path: &Path, lock: &DirLock) -> Result<(), Error> {
    venv::make(setup, path, lock, None)?;
    let mut pip = venv::pip(venv::python(path), "install");
    pip.args(PACKAGES);
    child::run(pip.stdin(lock.as_stdin()?), "pip install of Zig", &setup.output, &setup.cancel)
}

/// Tests that the binary prints its version and runs the demo. A binary for another architecture
/// runs in an emulator from Debian packages.
pub(crate) fn test(setup: &Setup, target: Target, binary: &Path) -> Result<(), Error> {
    let emulator = if target.is_foreign() { Some(emulator(setup)?) } else { None };
    for arguments in [&["--version"][..], &["demo"]] {
        let mut run = match &emulator {
            Some(emulator) => {
                let mut run = Command::new(emulator.join(EMULATOR));
                run.arg("-L").arg(emulator.join(ARM_LIBRARIES)).arg(binary);
                run
            }
            None => Command::new(binary),
        };
        child::run(
            run.args(arguments),
            &binary.display().to_string(),
            &Output::Terminal,
            &Cancel::default(),
        )?;
    }
    Ok(())
}

/// Returns the folder with the emulator and its libraries; unpacks their packages if needed.
fn emulator(setup: &Setup) -> Result<PathBuf, Error> {
    let dir = KeyedDir::new(&setup.workspace.cache, "arm64-emulator", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| path.join(EMULATOR).is_file() && path.join(ARM_LIBRARIES).is_dir(),
        |path, lock| debian::unpack_all(setup, &EMULATOR_PACKAGES.map(str::to_owned), path, lock),
    )?;
    Ok(dir.path().to_owned())
}
