//! Profile-guided optimisation: runs an instrumented `chiasm` under the load of the benchmarks.
//! Later builds in the profile `dist` for this system use the recorded profile (`build_profile`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bench_peers;
use crate::build_profile;
use crate::cargo::cargo;
use crate::child::{self, Cancel, Output};
use crate::error::Error;
use crate::setup::Setup;

/// The folder of the instrumented build, which has other flags.
const TARGET_DIR: &str = "target/pgo";
/// The program of the same release as the compiler, which merges what was recorded.
const MERGE: &str = "llvm-profdata";
/// The component of rustup with [`MERGE`].
const COMPONENT: &str = "llvm-tools";

/// Records a profile, replaces an existing one, and returns the path.
pub(crate) fn make(setup: &Setup) -> Result<PathBuf, Error> {
    let merge = merge_program(setup)?;
    let dir = build_profile::dir(&setup.workspace)?;
    fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    let raw = tempfile::tempdir_in(&dir).map_err(Error::io("create a folder in", &dir))?;
    let new = raw.path().join(build_profile::FILE);
    record(setup, &merge, raw.path(), &new)?;
    let data = dir.join(build_profile::FILE);
    fs::rename(&new, &data).map_err(Error::io("replace", &data))?;
    Ok(data)
}

/// Returns the path of [`MERGE`]. Installs it if it is missing and rustup is there.
fn merge_program(setup: &Setup) -> Result<PathBuf, Error> {
    let mut rustc = Command::new("rustc");
    rustc.args(["--print", "target-libdir"]).current_dir(&setup.workspace.root);
    let libraries = PathBuf::from(child::read(&mut rustc, "rustc --print target-libdir")?);
    let path = libraries.with_file_name("bin").join(MERGE);
    if !path.is_file() {
        let mut rustup = Command::new("rustup");
        rustup.args(["component", "add", COMPONENT]).current_dir(&setup.workspace.root);
        child::run(&mut rustup, "rustup component add", &setup.output, &setup.cancel)?;
    }
    if path.is_file() { Ok(path) } else { Err(Error::MissingFile { path }) }
}

/// Builds an instrumented `chiasm`, runs it, and merges what it records in `raw` into `data`.
fn record(setup: &Setup, merge: &Path, raw: &Path, data: &Path) -> Result<(), Error> {
    let host = build_profile::host(&setup.workspace)?;
    let mut build = cargo(&setup.workspace);
    build.args(["build", "--locked", "--profile", "dist", "--package", "chiasm", "--bin"]);
    build.args(["chiasm", "--target", &host]);
    build.env("CARGO_TARGET_DIR", TARGET_DIR);
    build_profile::set_flag(&mut build, &format!("-Cprofile-generate={}", raw.display()));
    child::run(&mut build, "the instrumented build", &Output::Terminal, &Cancel::default())?;
    let chiasm = setup.workspace.root.join(TARGET_DIR).join(host).join("dist/chiasm");
    bench_peers::train(setup, &chiasm)?;
    let mut merge = Command::new(merge);
    merge.arg("merge").arg("--output").arg(data).arg(raw);
    child::read(&mut merge, MERGE).map(drop)
}
