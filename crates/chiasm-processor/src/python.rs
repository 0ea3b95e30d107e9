//! The Python interpreter of the processor, its environment, and the embedded Python sources.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use tempfile::TempDir;

use crate::ProcessorError;

/// The sources of `python/chiasm_processor`.
const SOURCES: [(&str, &str); 14] = [
    ("__init__.py", include_str!("../../../python/chiasm_processor/chiasm_processor/__init__.py")),
    ("__main__.py", include_str!("../../../python/chiasm_processor/chiasm_processor/__main__.py")),
    ("audio.py", include_str!("../../../python/chiasm_processor/chiasm_processor/audio.py")),
    ("child.py", include_str!("../../../python/chiasm_processor/chiasm_processor/child.py")),
    (
        "conversation.py",
        include_str!("../../../python/chiasm_processor/chiasm_processor/conversation.py"),
    ),
    ("fields.py", include_str!("../../../python/chiasm_processor/chiasm_processor/fields.py")),
    ("frames.py", include_str!("../../../python/chiasm_processor/chiasm_processor/frames.py")),
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

/// The environment variables that are passed on: those that Python, vLLM and their libraries read.
/// A name that ends in `_` is a prefix.
///
/// The processes read clients' files, so they get no other variables, which may hold secrets.
const PASSED_VARIABLES: [&str; 17] = [
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

/// Parts of the names of variables that may hold secrets. A variable with one of them is not passed
/// on, even if a prefix matches.
const SECRET_NAME_PARTS: [&str; 4] = ["KEY", "TOKEN", "SECRET", "PASSWORD"];

/// Finds the Python interpreter of a `vllm` command: in its `#!` line, else beside the command.
///
/// # Errors
/// [`ProcessorError::NoPython`] if the command does not exist, or no Python belongs to it.
pub fn find_python(vllm: &Path) -> Result<PathBuf, ProcessorError> {
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
    let python = shebang_python(&command).into_iter().chain(beside).find(|path| path.is_file());
    python.ok_or_else(|| missing("there is no Python beside it"))
}

/// Returns the Python interpreter in the `#!` line of a script.
fn shebang_python(script: &Path) -> Option<PathBuf> {
    let mut line = String::new();
    // The line of an interpreter is shorter than this limit.
    BufReader::new(fs::File::open(script).ok()?.take(4096)).read_line(&mut line).ok()?;
    let python = PathBuf::from(line.strip_prefix("#!")?.split_whitespace().next()?);
    let name = python.file_name()?.to_str()?;
    name.starts_with("python").then_some(python)
}

/// Creates a command that runs `program` in `python`. The program can import the package and has
/// the processor's environment. The returned folder holds the package and must outlive the process.
///
/// # Errors
/// The folder cannot be created.
pub fn python_command(python: &Path, program: &str) -> io::Result<(Command, TempDir)> {
    let sources = unpack_sources()?;
    let mut command = Command::new(python);
    command.args(["-B", "-c", program]).env_clear().envs(environment(sources.path()));
    Ok((command, sources))
}

/// Writes the package's sources to a new temporary folder.
pub(crate) fn unpack_sources() -> io::Result<TempDir> {
    let folder = tempfile::Builder::new().prefix("chiasm-processor-").tempdir()?;
    let package = folder.path().join(PACKAGE);
    fs::create_dir(&package)?;
    SOURCES.iter().try_for_each(|(name, text)| fs::write(package.join(name), text))?;
    Ok(folder)
}

/// Returns the environment of the processor, with the package's folder in `PYTHONPATH`.
pub(crate) fn environment(package: &Path) -> Vec<(OsString, OsString)> {
    let is_passed = |name: &str| {
        let is_match = |passed: &&str| {
            if passed.ends_with('_') { name.starts_with(passed) } else { name == *passed }
        };
        PASSED_VARIABLES.iter().any(is_match)
            && !SECRET_NAME_PARTS.iter().any(|part| name.contains(part))
    };
    let mut environment: Vec<_> =
        env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_passed)).collect();
    let own = env::var_os("PYTHONPATH").unwrap_or_default();
    let folders = [package.to_owned()]
        .into_iter()
        .chain(env::split_paths(&own).filter(|path| *path != Path::new("")));
    environment.retain(|(name, _)| name != "PYTHONPATH");
    environment
        .push(("PYTHONPATH".into(), env::join_paths(folders).unwrap_or_else(|_| package.into())));
    // Modules must not be loaded from the current folder. Python before 3.11 ignores this variable.
    environment.push(("PYTHONSAFEPATH".into(), "1".into()));
    // The processor needs no GPU, and a process with an open GPU cannot be forked.
    environment.push(("CUDA_VISIBLE_DEVICES".into(), "".into()));
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_is_found_by_shebang_or_beside_the_command() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let vllm = file("vllm", "#!/bin/sh\nexec x\n");
        assert!(matches!(find_python(&vllm), Err(ProcessorError::NoPython { .. })));
        let python = file("python", "");
        assert_eq!(find_python(&vllm).unwrap(), python.canonicalize().unwrap());
        let other = file("python3.11", "");
        file("vllm", &format!("#!{} -P\n", other.display()));
        assert_eq!(find_python(&vllm).unwrap(), other);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&vllm, &link).unwrap();
        assert_eq!(find_python(&link).unwrap(), other);
        assert!(find_python(&folder.path().join("nothing")).is_err());
        assert!(find_python(Path::new("no-such-command-anywhere")).is_err());
    }

    #[test]
    fn sources_of_the_package_are_complete() {
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
