//! Other versions of vLLM than the environment's own: the packages that differ, in a folder that Python looks into first, and
//! programs that know of it.
//!
//! They have no build for CPUs yet, so they run on the compiled parts of the environment's. Tests with them verify their Python and
//! their wire, not their kernels.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{Held, KeyedDir};
use crate::vllm_env::{self, Setup, VllmEnv};
use crate::workspace::Workspace;

/// A version of vLLM as the difference from the environment's.
struct Overlay {
    version: &'static str,
    /// The list that names vLLM's wheel and its bytes.
    list: &'static str,
    /// Other packages that have to differ.
    beside: &'static [&'static str],
}

/// All of them, oldest first.
const OVERLAYS: [Overlay; 1] =
    [Overlay { version: "0.33.0", list: "python/vllm_env/vllm_0.33.txt", beside: &["orjson==3.13.0"] }];

/// The versions that tests can run with, oldest first.
pub(crate) const VERSIONS: [&str; 2] = [vllm_env::VLLM_VERSION, OVERLAYS[0].version];

/// The version that is tested unless another one is asked for.
pub(crate) const NEWEST: &str = VERSIONS[VERSIONS.len() - 1];

/// Makes one of [`VERSIONS`] ready over the environment `base`, or finds it made.
pub(crate) fn ensure_version(setup: &Setup, base: &VllmEnv, version: &str) -> Result<VllmEnv, Error> {
    match OVERLAYS.iter().find(|overlay| overlay.version == version) {
        Some(overlay) => ensure(setup, base, overlay),
        None => Ok(base.clone()),
    }
}

/// Counted up when the steps below change what comes out of the same lists.
const RECIPE: &[u8] = b"1";

/// Where the versions are, made or not.
pub(crate) fn paths(workspace: &Workspace) -> Result<Vec<PathBuf>, Error> {
    OVERLAYS.iter().map(|overlay| dir(workspace, overlay).map(|dir| dir.path().to_owned())).collect()
}

fn dir(workspace: &Workspace, overlay: &Overlay) -> Result<KeyedDir, Error> {
    let list = workspace.file(overlay.list)?;
    let mut inputs = vllm_env::inputs(workspace)?;
    inputs.extend([RECIPE.to_vec(), fs::read(&list).map_err(Error::io("read", &list))?]);
    inputs.extend(overlay.beside.iter().map(|package| package.as_bytes().to_vec()));
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    Ok(KeyedDir::new(&workspace.cache, &format!("vllm-{}", overlay.version), &inputs))
}

fn ensure(setup: &Setup, base: &VllmEnv, overlay: &'static Overlay) -> Result<VllmEnv, Error> {
    let dir = dir(&setup.workspace, overlay)?;
    let env = VllmEnv::at(dir.path());
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| base.python().is_file() && env.vllm().is_file(),
        |path, held| build(setup, base, overlay, &env, path, held),
    )?;
    Ok(env)
}

fn build(
    setup: &Setup,
    base: &VllmEnv,
    overlay: &Overlay,
    env: &VllmEnv,
    path: &Path,
    held: &Held,
) -> Result<(), Error> {
    setup.output.say(&format!("making {}", path.display()))?;
    let site = path.join("site");
    // /tmp is often small, or memory.
    let downloads = path.join("downloads");
    fs::create_dir(&downloads).map_err(Error::io("create", &downloads))?;
    let install = |what: &str, packages: &[&str]| -> Result<(), Error> {
        let mut pip = base.python_command();
        pip.args(["-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check", "--retries", "10"])
            .arg("--target")
            .arg(&site)
            .args(packages)
            .current_dir(&setup.workspace.root)
            .env("TMPDIR", &downloads)
            .stdin(held.as_input()?);
        child::run(&mut pip, what, &setup.output, &setup.cancel)
    };
    install(&format!("pip install -r {}", overlay.list), &["--require-hashes", "-r", overlay.list])?;
    install(&format!("pip install {}", overlay.beside.join(" ")), overlay.beside)?;
    fs::remove_dir_all(&downloads).map_err(Error::io("remove", &downloads))?;
    use_compiled_of(base, &site)?;
    // vLLM picks its platform by its own version.
    let version = format!("{}+cpu", overlay.version);
    let published = site.join(format!("vllm-{}.dist-info", overlay.version));
    if published.exists() {
        fs::remove_dir_all(&published).map_err(Error::io("remove", &published))?;
    }
    vllm_env::add_vllm_name(&site, &version)?;
    add_programs(&base.python(), path)?;
    setup.output.say("checking that vLLM starts")?;
    vllm_env::check_version(env, &version)
}

/// Puts the environment's compiled parts of vLLM in the place of those in a folder of packages.
pub(crate) fn use_compiled_of(base: &VllmEnv, site: &Path) -> Result<(), Error> {
    remove_compiled(&site.join("vllm"))?;
    link_compiled(&vllm_env::site_packages(base)?.join("vllm"), &site.join("vllm"))
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
        let place = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            return link_compiled(path, &place);
        }
        if !is_compiled(path) {
            return Ok(());
        }
        fs::create_dir_all(to).map_err(Error::io("create", to))?;
        symlink(path, &place).map_err(Error::io("create", &place))
    })
}

fn each_entry(folder: &Path, visit: &mut dyn FnMut(&Path) -> Result<(), Error>) -> Result<(), Error> {
    let read = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>();
    read().map_err(Error::io("list", folder))?.iter().try_for_each(|path| visit(path))
}

/// The programs of an environment, for this folder's packages: `bin/python` and `bin/vllm`. What PYTHONPATH says comes after them.
pub(crate) fn add_programs(python: &Path, path: &Path) -> Result<(), Error> {
    let bin = path.join("bin");
    fs::create_dir(&bin).map_err(Error::io("create", &bin))?;
    let serve = "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = \"vllm\"; main()";
    for (name, arguments) in [("python", String::new()), ("vllm", format!(" -P -c '{serve}'"))] {
        let text = format!(
            "#!/bin/sh\nexport PYTHONPATH=\"{}${{PYTHONPATH:+:$PYTHONPATH}}\"\nexec \"{}\"{arguments} \"$@\"\n",
            path.join("site").display(),
            python.display(),
        );
        let program = bin.join(name);
        fs::write(&program, text).map_err(Error::io("write", &program))?;
        fs::set_permissions(&program, Permissions::from_mode(0o755)).map_err(Error::io("change", &program))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_environment_s_compiled_parts_take_the_place_of_others() {
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
    fn programs_put_their_packages_before_what_the_caller_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("with space");
        fs::create_dir(&path).unwrap();
        add_programs(Path::new("/usr/bin/env"), &path).unwrap();
        let printed = Command::new(path.join("bin/python")).env("PYTHONPATH", "/plugin").output().unwrap().stdout;
        let wanted = format!("PYTHONPATH={}:/plugin", path.join("site").display());
        assert!(String::from_utf8(printed).unwrap().lines().any(|line| line == wanted));
    }
}
