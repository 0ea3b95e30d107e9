//! The peers of the benchmark `door`. They are downloaded once and kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;

/// The version of vLLM whose wheel contains `vllm-rs`. Its engines have the wire of 0.32.
pub(crate) const VLLM: &str = "0.33.0";
/// The version of Dynamo that [`REQUIREMENTS`] pins.
pub(crate) const DYNAMO: &str = "1.6.1";

/// The environment variable that passes the Python with Dynamo to tests.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_DYNAMO";

/// The pinned packages of Dynamo and its dependencies.
pub(crate) const REQUIREMENTS: &str = "bench/peers/door/requirements.txt";
/// The version of the build steps below; incremented when they change the result for the same
/// lists.
const RECIPE: &[u8] = b"1";

/// Extracts `vllm-rs` from a wheel of 340 MB, which is a zip file, and marks it as executable.
const EXTRACT: &str = "\
import pathlib, sys, zipfile
wheel, target = next(pathlib.Path(sys.argv[1]).glob('vllm-*.whl')), pathlib.Path(sys.argv[2])
target.write_bytes(zipfile.ZipFile(wheel).read('vllm/vllm-rs'))
target.chmod(0o755)
";

/// The peers' programs.
pub(crate) struct Peers {
    path: PathBuf,
}

impl Peers {
    /// Returns the Python with Dynamo.
    pub(crate) fn python(&self) -> PathBuf {
        self.path.join("env/bin/python")
    }

    /// Returns vLLM's Rust frontend.
    pub(crate) fn vllm_rs(&self) -> PathBuf {
        self.path.join("vllm-rs")
    }

    fn python_command(&self) -> Command {
        venv::python(&self.path.join("env"))
    }
}

/// Downloads the peers unless they exist.
pub(crate) fn ensure(setup: &Setup) -> Result<Peers, Error> {
    let list = setup.workspace.file(REQUIREMENTS)?;
    let list = fs::read(&list).map_err(Error::io("read", list))?;
    let dir =
        KeyedDir::new(&setup.workspace.cache, "door-peers", &[RECIPE, VLLM.as_bytes(), &list]);
    let peers = Peers { path: dir.path().to_owned() };
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| peers.vllm_rs().is_file(),
        |path, lock| fetch(setup, &peers, path, lock),
    )?;
    Ok(peers)
}

fn fetch(setup: &Setup, peers: &Peers, path: &Path, lock: &DirLock) -> Result<(), Error> {
    venv::make(setup, &path.join("env"), lock, Some("0.6 GB to download"))?;
    let wheels = path.join("wheels");
    fs::create_dir(&wheels).map_err(Error::io("create", &wheels))?;
    let run = |what: &str,
               mut command: Command,
               arguments: &[&str],
               paths: &[&Path]|
     -> Result<(), Error> {
        // /tmp is often small or a RAM disk.
        command.args(arguments).args(paths).env("TMPDIR", &wheels).stdin(lock.as_stdin()?);
        child::run(&mut command, what, &setup.output, &setup.cancel)
    };
    let pip = |command| venv::pip(peers.python_command(), command);
    let list = setup.workspace.file(REQUIREMENTS)?;
    run("pip install for Dynamo", pip("install"), &["-r"], &[&list])?;
    let vllm = format!("vllm=={VLLM}");
    run(
        "pip download of vLLM",
        pip("download"),
        &["--only-binary", ":all:", &vllm, "--dest"],
        &[&wheels],
    )?;
    run(
        "taking vllm-rs out of its wheel",
        peers.python_command(),
        &["-c", EXTRACT],
        &[&wheels, &peers.vllm_rs()],
    )?;
    fs::remove_dir_all(&wheels).map_err(Error::io("remove", &wheels))
}
