//! Binaries for other systems, and for older ones of the same kind: Zig is a C compiler and linker
//! for all of them, with the symbols of any glibc. It comes from PyPI, with the cargo command that
//! uses it, into an environment of its own in the user's cache.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo;
use crate::child::{self, Cancel, Output};
use crate::debian;
use crate::error::Error;
use crate::keyed_dir::{Held, KeyedDir};
use crate::setup::Setup;
use crate::venv;

/// The systems that are built for, as Rust names them.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];
/// The oldest glibc that such a binary runs on: Debian 10, RHEL 8, Ubuntu 20.04.
const GLIBC: &str = "2.28";
const PACKAGES: [&str; 2] = ["ziglang==0.17.1", "cargo-zigbuild==0.24.1"];

/// A program that runs those of 64-bit ARM, and the libraries that they need.
const EMULATOR: &str = "usr/bin/qemu-aarch64-static";
const EMULATOR_PACKAGES: [&str; 2] = ["qemu-user-static", "libc6-arm64-cross"];
const LIBRARIES: &str = "usr/aarch64-linux-gnu";

/// A system to build for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target(&'static str);

impl Target {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        TARGETS.into_iter().find(|target| *target == name).map(Self)
    }

    pub(crate) fn name(self) -> &'static str {
        self.0
    }

    /// For an error: what there is.
    pub(crate) fn names() -> String {
        TARGETS.map(|target| format!("`{target}`")).join(" or ")
    }

    fn is_foreign(self) -> bool {
        !self.0.starts_with(std::env::consts::ARCH)
    }
}

/// A cargo that builds for this system by `zigbuild`, with what it is told after that word.
pub(crate) fn cargo(setup: &Setup, target: Target, profile: &str) -> Result<Command, Error> {
    let zig = ensure(setup)?;
    let mut add = Command::new("rustup");
    add.args(["target", "add", target.0]).current_dir(&setup.workspace.root);
    child::run(&mut add, "rustup target add", &setup.output, &setup.cancel)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [zig.join("bin")].into_iter().chain(std::env::split_paths(&path));
    let mut cargo = cargo::cargo(&setup.workspace);
    // An environment's own folder has no character that a list of folders could not have.
    cargo.env("PATH", std::env::join_paths(folders).unwrap_or(path));
    // The system's strip does not know other systems' programs.
    cargo.env(format!("CARGO_PROFILE_{}_STRIP", profile.to_uppercase()), "symbols");
    cargo.arg("zigbuild").args(["--target", &format!("{}.{GLIBC}", target.0)]);
    Ok(cargo)
}

/// The environment with Zig, made or found made.
fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    let inputs: Vec<&[u8]> = PACKAGES.iter().map(|package| package.as_bytes()).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "zig", &inputs);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| path.join("bin/cargo-zigbuild").is_file(),
        |path, held| make(setup, path, held),
    )?;
    Ok(dir.path().to_owned())
}

fn make(setup: &Setup, path: &Path, held: &Held) -> Result<(), Error> {
    venv::make(setup, path, held, None)?;
    let mut pip = venv::pip(venv::python(path), "install");
    pip.args(PACKAGES);
    child::run(pip.stdin(held.as_input()?), "pip install of Zig", &setup.output, &setup.cancel)
}

/// Runs the binary: it has to tell its version and to play the demo. One for another system runs in
/// an emulator, of Debian's packages.
pub(crate) fn test(setup: &Setup, target: Target, binary: &Path) -> Result<(), Error> {
    let emulator = match target.is_foreign() {
        true => Some(emulator(setup)?),
        false => None,
    };
    for arguments in [&["--version"][..], &["demo"]] {
        let mut run = match &emulator {
            Some(emulator) => {
                let mut run = Command::new(emulator.join(EMULATOR));
                run.arg("-L").arg(emulator.join(LIBRARIES)).arg(binary);
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

fn emulator(setup: &Setup) -> Result<PathBuf, Error> {
    let dir = KeyedDir::new(&setup.workspace.cache, "arm64-emulator", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| path.join(EMULATOR).is_file() && path.join(LIBRARIES).is_dir(),
        |path, held| debian::unpack_all(setup, &EMULATOR_PACKAGES.map(str::to_owned), path, held),
    )?;
    Ok(dir.path().to_owned())
}
