//! What the door benchmark measures against: fetched once, kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{Held, KeyedDir};
use crate::setup::Setup;
use crate::venv;

/// The vLLM whose wheel holds `vllm-rs`. Its engines are 0.32's on the wire.
pub(crate) const VLLM: &str = "0.33.0";
/// The version of Dynamo that [`REQUIREMENTS`] pins.
pub(crate) const DYNAMO: &str = "1.6.1";

/// What tests are told of the Python with Dynamo by.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_DYNAMO";

/// What Dynamo runs on, every package pinned.
pub(crate) const REQUIREMENTS: &str = "bench/peers/door/requirements.txt";
/// Counted up when the steps below change what comes out of the same lists.
const RECIPE: &[u8] = b"1";

/// Takes one file out of a wheel of 340 MB; a wheel is a zip file, and has it marked as a program.
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
    /// A Python with Dynamo.
    pub(crate) fn python(&self) -> PathBuf {
        self.path.join("env/bin/python")
    }

    /// vLLM's Rust frontend.
    pub(crate) fn vllm_rs(&self) -> PathBuf {
        self.path.join("vllm-rs")
    }

    fn python_command(&self) -> Command {
        venv::python(&self.path.join("env"))
    }
}

/// Fetches the peers, or finds them fetched.
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
        |path, held| fetch(setup, &peers, path, held),
    )?;
    Ok(peers)
}

fn fetch(setup: &Setup, peers: &Peers, path: &Path, held: &Held) -> Result<(), Error> {
    venv::make(setup, &path.join("env"), held, Some("0.6 GB to download"))?;
    let wheels = path.join("wheels");
    fs::create_dir(&wheels).map_err(Error::io("create", &wheels))?;
    let run = |what: &str,
               mut command: Command,
               arguments: &[&str],
               paths: &[&Path]|
     -> Result<(), Error> {
        // /tmp is often small, or memory.
        command.args(arguments).args(paths).env("TMPDIR", &wheels).stdin(held.as_input()?);
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
