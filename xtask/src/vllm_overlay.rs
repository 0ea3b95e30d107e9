//! Overlays over the vLLM environment with other versions of vLLM: a folder with the packages that
//! differ, which Python searches first, and programs that use the folder.
//!
//! A version that has no build for CPUs yet uses the compiled files of the environment. Tests with
//! such a version verify its Python and its wire, not its kernels.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;
use crate::vllm_env::{self, VllmEnv};
use crate::workspace::Workspace;

/// A version of vLLM as a difference from the environment.
struct Overlay {
    version: &'static str,
    /// The list with vLLM's wheel and its hash.
    list: &'static str,
    /// `true` if the wheel is built for CPUs.
    runs_on_cpus: bool,
    /// The other packages that have to differ.
    other_packages: &'static [&'static str],
}

const V0_31: Overlay = Overlay {
    version: "0.31.0",
    list: "python/vllm_env/vllm_0.31.txt",
    runs_on_cpus: true,
    other_packages: &["transformers==5.17.0", "huggingface-hub==1.33.0", "xgrammar==0.2.7"],
};

const V0_33: Overlay = Overlay {
    version: "0.33.0",
    list: "python/vllm_env/vllm_0.33.txt",
    runs_on_cpus: false,
    other_packages: &["orjson==3.13.0", "transformers==5.20.2"],
};

const OVERLAYS: [Overlay; 2] = [V0_31, V0_33];

/// The versions that tests can use, oldest first.
pub(crate) const VERSIONS: [&str; 3] = [V0_31.version, vllm_env::VLLM_VERSION, V0_33.version];

/// The version that is tested by default.
pub(crate) const NEWEST: &str = VERSIONS[VERSIONS.len() - 1];

/// Returns the version that tests combine with `version` in one fleet: the environment's own
/// version, which always exists, or the newest if `version` is the environment's own.
pub(crate) fn companion(version: &str) -> &'static str {
    if version == vllm_env::VLLM_VERSION { NEWEST } else { vllm_env::VLLM_VERSION }
}

/// Makes one of [`VERSIONS`] over the environment `base` unless it exists.
pub(crate) fn ensure_version(
    setup: &Setup,
    base: &VllmEnv,
    version: &str,
) -> Result<VllmEnv, Error> {
    match OVERLAYS.iter().find(|overlay| overlay.version == version) {
        Some(overlay) => ensure(setup, base, overlay),
        None => Ok(base.clone()),
    }
}

/// The version of the build steps below; incremented when they change the result for the same
/// lists.
const RECIPE: &[u8] = b"1";

/// Returns the paths of all overlays, whether they exist or not.
pub(crate) fn paths(workspace: &Workspace) -> Result<Vec<PathBuf>, Error> {
    OVERLAYS
        .iter()
        .map(|overlay| dir(workspace, overlay).map(|dir| dir.path().to_owned()))
        .collect()
}

fn dir(workspace: &Workspace, overlay: &Overlay) -> Result<KeyedDir, Error> {
    let list = workspace.file(overlay.list)?;
    let mut inputs = vllm_env::inputs(workspace)?;
    inputs.extend([RECIPE.to_vec(), fs::read(&list).map_err(Error::io("read", &list))?]);
    inputs.extend(overlay.other_packages.iter().map(|package| package.as_bytes().to_vec()));
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    Ok(KeyedDir::new(&workspace.cache, &format!("vllm-{}", overlay.version), &inputs))
}

fn ensure(setup: &Setup, base: &VllmEnv, overlay: &'static Overlay) -> Result<VllmEnv, Error> {
    let dir = dir(&setup.workspace, overlay)?;
    let list = ["--require-hashes", "-r", overlay.list];
    let make = |path: &Path, lock: &DirLock| -> Result<(), Error> {
        build(
            setup,
            base,
            overlay.version,
            overlay.runs_on_cpus,
            &[&list, overlay.other_packages],
            path,
            lock,
        )?;
        setup.output.print_line("checking that vLLM starts")?;
        vllm_env::check_version(&VllmEnv::at(path), &local_version(overlay.version))
    };
    ensure_made(setup, base, &dir, make)
}

/// Installs the published wheel of any version over the environment `base`, for inspection only.
///
/// No list pins the version and no test uses it. It may not even start on the compiled files of
/// `base`.
pub(crate) fn ensure_for_inspection(
    setup: &Setup,
    base: &VllmEnv,
    version: &str,
) -> Result<VllmEnv, Error> {
    let inputs = vllm_env::inputs(&setup.workspace)?;
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir =
        KeyedDir::new(&setup.workspace.cache, &format!("{INSPECTION_PREFIX}{version}"), &inputs);
    let wheel = format!("vllm=={version}");
    ensure_made(setup, base, &dir, |path, lock| {
        build(setup, base, version, false, &[&[&wheel]], path, lock)
    })
}

/// The prefix of the names of environments for inspection. Those for tests start with `vllm-`, so
/// no test finds the wrong one.
pub(crate) const INSPECTION_PREFIX: &str = "drift-";

fn ensure_made(
    setup: &Setup,
    base: &VllmEnv,
    dir: &KeyedDir,
    make: impl FnOnce(&Path, &DirLock) -> Result<(), Error>,
) -> Result<VllmEnv, Error> {
    let env = VllmEnv::at(dir.path());
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| base.python().is_file() && env.vllm().is_file(),
        make,
    )?;
    Ok(env)
}

/// Returns the version that an overlay's metadata names. vLLM selects its platform by the suffix.
fn local_version(version: &str) -> String {
    format!("{version}+cpu")
}

/// Fills the folder `path`. Each item of `packages` has the arguments of one `pip install`.
fn build(
    setup: &Setup,
    base: &VllmEnv,
    version: &str,
    runs_on_cpus: bool,
    packages: &[&[&str]],
    path: &Path,
    lock: &DirLock,
) -> Result<(), Error> {
    setup.output.print_line(&format!("making {}", path.display()))?;
    let site = path.join("site");
    // /tmp is often small or a RAM disk.
    let downloads = path.join("downloads");
    fs::create_dir(&downloads).map_err(Error::io("create", &downloads))?;
    for packages in packages {
        let mut pip = venv::pip(base.python_command(), "install");
        pip.arg("--target")
            .arg(&site)
            .args(*packages)
            .current_dir(&setup.workspace.root)
            .env("TMPDIR", &downloads)
            .stdin(lock.as_stdin()?);
        child::run(
            &mut pip,
            &format!("pip install {}", packages.join(" ")),
            &setup.output,
            &setup.cancel,
        )?;
    }
    fs::remove_dir_all(&downloads).map_err(Error::io("remove", &downloads))?;
    if !runs_on_cpus {
        remove_compiled(&site.join("vllm"))?;
        link_compiled(&vllm_env::site_packages(base)?.join("vllm"), &site.join("vllm"))?;
    }
    let published_metadata = site.join(format!("vllm-{version}.dist-info"));
    if published_metadata.exists() {
        fs::remove_dir_all(&published_metadata)
            .map_err(Error::io("remove", &published_metadata))?;
    }
    vllm_env::add_vllm_name(&site, &local_version(version))?;
    add_programs(&base.python(), path)
}

fn is_compiled(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "so") || path.ends_with("vllm/vllm-rs")
}

fn remove_compiled(folder: &Path) -> Result<(), Error> {
    each_entry(folder, &mut |path| {
        if path.is_dir() {
            remove_compiled(path)
        } else if is_compiled(path) {
            fs::remove_file(path).map_err(Error::io("remove", path))
        } else {
            Ok(())
        }
    })
}

fn link_compiled(from: &Path, to: &Path) -> Result<(), Error> {
    each_entry(from, &mut |path| {
        let link = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            return link_compiled(path, &link);
        }
        if !is_compiled(path) {
            return Ok(());
        }
        fs::create_dir_all(to).map_err(Error::io("create", to))?;
        symlink(path, &link).map_err(Error::io("create", &link))
    })
}

fn each_entry(
    folder: &Path,
    visit: &mut dyn FnMut(&Path) -> Result<(), Error>,
) -> Result<(), Error> {
    let read =
        || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>();
    read().map_err(Error::io("list", folder))?.iter().try_for_each(|path| visit(path))
}

/// Writes the programs `bin/python` and `bin/vllm`, which search this folder's packages before
/// PYTHONPATH.
fn add_programs(python: &Path, path: &Path) -> Result<(), Error> {
    let serve =
        "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = \"vllm\"; main()";
    add_program(python, path, "python", "")?;
    add_program(python, path, "vllm", &format!(" -P -c '{serve}'"))
}

/// Writes a program to `bin` that runs `python` with these arguments in front of its own, and
/// searches the packages in `site` first.
pub(crate) fn add_program(
    python: &Path,
    path: &Path,
    name: &str,
    arguments: &str,
) -> Result<(), Error> {
    let bin = path.join("bin");
    fs::create_dir_all(&bin).map_err(Error::io("create", &bin))?;
    let text = format!(
        "#!/bin/sh\nexport PYTHONPATH=\"{}${{PYTHONPATH:+:$PYTHONPATH}}\"\n\
         exec \"{}\"{arguments} \"$@\"\n",
        path.join("site").display(),
        python.display(),
    );
    let program = bin.join(name);
    fs::write(&program, text).map_err(Error::io("write", &program))?;
    fs::set_permissions(&program, Permissions::from_mode(0o755))
        .map_err(Error::io("change", &program))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn compiled_files_of_environment_replace_others() {
        let dir = tempfile::tempdir().unwrap();
        let [base, site] = ["base", "site"].map(|name| dir.path().join(name).join("vllm"));
        for (folder, file) in [
            (&base, "a.so"),
            (&base, "deep/b.so"),
            (&base, "c.py"),
            (&site, "a.so"),
            (&site, "gpu/d.so"),
            (&site, "e.py"),
        ] {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, folder.display().to_string()).unwrap();
        }
        remove_compiled(&site).unwrap();
        link_compiled(&base, &site).unwrap();
        let text = |file: &str| fs::read_to_string(site.join(file)).ok();
        assert_eq!(text("a.so"), Some(base.display().to_string()));
        assert_eq!(text("deep/b.so"), Some(base.display().to_string()));
        assert_eq!((text("gpu/d.so"), text("c.py")), (None, None));
        assert_eq!(text("e.py"), Some(site.display().to_string()));
    }

    #[test]
    fn programs_search_their_packages_before_pythonpath() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("with space");
        fs::create_dir(&path).unwrap();
        add_programs(Path::new("/usr/bin/env"), &path).unwrap();
        let printed = Command::new(path.join("bin/python"))
            .env("PYTHONPATH", "/plugin")
            .output()
            .unwrap()
            .stdout;
        let wanted = format!("PYTHONPATH={}:/plugin", path.join("site").display());
        assert!(String::from_utf8(printed).unwrap().lines().any(|line| line == wanted));
    }
}
