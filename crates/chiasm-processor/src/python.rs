//! Which Python runs the processor, and what it is told beside its arguments.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use tempfile::TempDir;

use crate::ProcessorError;

/// The sources of `python/chiasm_processor`.
const SOURCES: [(&str, &str); 12] = [
    ("__init__.py", include_str!("../../../python/chiasm_processor/chiasm_processor/__init__.py")),
    ("__main__.py", include_str!("../../../python/chiasm_processor/chiasm_processor/__main__.py")),
    ("child.py", include_str!("../../../python/chiasm_processor/chiasm_processor/child.py")),
    (
        "conversation.py",
        include_str!("../../../python/chiasm_processor/chiasm_processor/conversation.py"),
    ),
    ("fields.py", include_str!("../../../python/chiasm_processor/chiasm_processor/fields.py")),
    ("greeting.py", include_str!("../../../python/chiasm_processor/chiasm_processor/greeting.py")),
    ("limits.py", include_str!("../../../python/chiasm_processor/chiasm_processor/limits.py")),
    ("messages.py", include_str!("../../../python/chiasm_processor/chiasm_processor/messages.py")),
    (
        "processor.py",
        include_str!("../../../python/chiasm_processor/chiasm_processor/processor.py"),
    ),
    ("sandbox.py", include_str!("../../../python/chiasm_processor/chiasm_processor/sandbox.py")),
    ("server.py", include_str!("../../../python/chiasm_processor/chiasm_processor/server.py")),
    ("updates.py", include_str!("../../../python/chiasm_processor/chiasm_processor/updates.py")),
];

/// The name of the package.
pub(crate) const PACKAGE: &str = "chiasm_processor";

/// Variables that Python, vLLM and the libraries below them read; those that end in `_` by their
/// beginnings. Nothing else of the environment goes to processes that read foreign files: it may
/// hold secrets.
const VARIABLES: [&str; 17] = [
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_MODULES_CACHE",
    "HOME",
    "LANG",
    "LC_",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "TRANSFORMERS_",
    "USER",
    "VIRTUAL_ENV",
    "VLLM_",
    "XDG_",
];

/// Parts of names of variables that hold secrets, though they begin like others.
const SECRETS: [&str; 4] = ["KEY", "TOKEN", "SECRET", "PASSWORD"];

/// The Python that a `vllm` command runs in: the one of its first line, else the one beside it.
///
/// # Errors
/// [`ProcessorError::NoPython`] if there is no such command, or no Python that belongs to it.
pub fn python_of(vllm: &Path) -> Result<PathBuf, ProcessorError> {
    let missing = |reason: &str| ProcessorError::NoPython {
        command: vllm.to_owned(),
        reason: reason.to_owned(),
    };
    let command = if vllm.components().count() > 1 {
        vllm.to_owned()
    } else {
        let folders = env::var_os("PATH").unwrap_or_default();
        let found =
            env::split_paths(&folders).map(|folder| folder.join(vllm)).find(|path| path.is_file());
        found.ok_or_else(|| missing("it is not in PATH"))?
    };
    let command = command.canonicalize().map_err(|error| missing(&error.to_string()))?;
    let beside = ["python3", "python"].map(|name| command.with_file_name(name));
    let python = first_line(&command).into_iter().chain(beside).find(|path| path.is_file());
    python.ok_or_else(|| missing("there is no Python beside it"))
}

/// The Python that a script's first line names.
fn first_line(script: &Path) -> Option<PathBuf> {
    let mut line = String::new();
    // What is longer is no path.
    BufReader::new(fs::File::open(script).ok()?.take(4096)).read_line(&mut line).ok()?;
    let python = PathBuf::from(line.strip_prefix("#!")?.split_whitespace().next()?);
    let name = python.file_name()?.to_str()?;
    name.starts_with("python").then_some(python)
}

/// A start of `python` with this program, which can import the package and has the variables of the
/// processor. The folder with the package has to outlive it.
///
/// # Errors
/// The system's, if the folder can't be made.
pub fn script(python: &Path, program: &str) -> io::Result<(Command, TempDir)> {
    let sources = unpack()?;
    let mut command = Command::new(python);
    command.args(["-B", "-c", program]).env_clear().envs(environment(sources.path()));
    Ok((command, sources))
}

/// Writes the package's sources to a folder of their own.
pub(crate) fn unpack() -> io::Result<TempDir> {
    let folder = tempfile::Builder::new().prefix("chiasm-processor-").tempdir()?;
    let package = folder.path().join(PACKAGE);
    fs::create_dir(&package)?;
    SOURCES.iter().try_for_each(|(name, text)| fs::write(package.join(name), text))?;
    Ok(folder)
}

/// The environment of the processor, with the package's folder among Python's.
pub(crate) fn environment(package: &Path) -> Vec<(OsString, OsString)> {
    let is_known = |name: &str| {
        let known = |known: &&str| {
            if known.ends_with('_') { name.starts_with(known) } else { name == *known }
        };
        VARIABLES.iter().any(known) && !SECRETS.iter().any(|secret| name.contains(secret))
    };
    let mut environment: Vec<_> =
        env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_known)).collect();
    let own = env::var_os("PYTHONPATH").unwrap_or_default();
    let folders = [package.to_owned()]
        .into_iter()
        .chain(env::split_paths(&own).filter(|path| *path != Path::new("")));
    environment.retain(|(name, _)| name != "PYTHONPATH");
    environment
        .push(("PYTHONPATH".into(), env::join_paths(folders).unwrap_or_else(|_| package.into())));
    // The current folder is no place for modules. Python before 3.11 does not know that.
    environment.push(("PYTHONSAFEPATH".into(), "1".into()));
    // It needs no GPU, and a process that has one open can't be forked.
    environment.push(("CUDA_VISIBLE_DEVICES".into(), "".into()));
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_python_is_that_of_the_command() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let vllm = file("vllm", "#!/bin/sh\nexec x\n");
        assert!(matches!(python_of(&vllm), Err(ProcessorError::NoPython { .. })));
        let python = file("python", "");
        assert_eq!(python_of(&vllm).unwrap(), python.canonicalize().unwrap());
        let other = file("python3.11", "");
        file("vllm", &format!("#!{} -P\n", other.display()));
        assert_eq!(python_of(&vllm).unwrap(), other);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&vllm, &link).unwrap();
        assert_eq!(python_of(&link).unwrap(), other);
        assert!(python_of(&folder.path().join("nothing")).is_err());
        assert!(python_of(Path::new("no-such-command-anywhere")).is_err());
    }

    #[test]
    fn all_sources_are_carried_along() {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../python/chiasm_processor/chiasm_processor");
        let files = fs::read_dir(package)
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        let mut names: Vec<_> = files.filter(|name| name.ends_with(".py")).collect();
        names.sort();
        assert_eq!(names, SOURCES.map(|(name, _)| name));
    }
}
