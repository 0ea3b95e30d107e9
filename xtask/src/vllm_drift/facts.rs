//! The table of what is relied on, filled in for a version of vLLM by `python/vllm_drift/facts.py`.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{FOLDER, script};
use crate::child;
use crate::error::Error;
use crate::setup::Setup;
use crate::venv;
use crate::vllm_env::VllmEnv;

/// Things that matter for one reason, and in the same of our files.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// The reason.
    pub(crate) what: String,
    /// Paths in the repository.
    pub(crate) ours: Vec<String>,
    /// Names and values, in the table's order.
    #[serde(deserialize_with = "in_order")]
    pub(crate) facts: Vec<(String, String)>,
}

/// A struct's fields are facts in their order, which a plain map would lose.
fn in_order<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<(String, String)>, D::Error> {
    let map = Map::<String, Value>::deserialize(from)?;
    map.into_iter()
        .map(|(name, value)| match value {
            Value::String(value) => Ok((name, value)),
            other => Err(serde::de::Error::custom(format!("{name} is {other}"))),
        })
        .collect()
}

/// Reads the facts of the vLLM in this folder of packages.
pub(super) fn read(
    setup: &Setup,
    base: &VllmEnv,
    packages: &Path,
    requirements: &Path,
) -> Result<Vec<Group>, Error> {
    let mut python = script(setup, base);
    python.arg(format!("{FOLDER}/facts.py")).arg(packages).arg(requirements);
    let printed = child::read(&mut python, "facts.py")?;
    serde_json::from_str(&printed)
        .map_err(|source| Error::Json { what: "what facts.py printed".to_owned(), source })
}

/// What the published wheel asks for, in a file of pip's. An overlay's own metadata says nothing,
/// and what is published under a version never changes, so it is asked for once.
pub(super) fn requirements(setup: &Setup, base: &VllmEnv, version: &str) -> Result<PathBuf, Error> {
    let folder = super::sources::work_folder(&setup.workspace);
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    let path = folder.join(format!("requirements-{version}.json"));
    if path.is_file() {
        return Ok(path);
    }
    let unnamed = folder.join(format!("requirements-{version}.{}.new", std::process::id()));
    let mut pip = venv::pip(base.python_command(), "install");
    pip.args(["--dry-run", "--ignore-installed", "--report"])
        .arg(&unnamed)
        .arg(format!("vllm=={version}"))
        // /tmp is often small, or memory.
        .env("TMPDIR", &folder)
        .stdin(std::process::Stdio::null());
    child::run(
        &mut pip,
        &format!("asking for the metadata of vllm=={version}"),
        &setup.output,
        &setup.cancel,
    )?;
    fs::rename(&unnamed, &path).map_err(Error::io("create", &path))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_read_with_its_facts_in_their_order() {
        let text =
            r#"[{"name": "n", "what": "w", "ours": ["a.rs"], "facts": {"b": "2", "a": "1"}}]"#;
        let groups: Vec<Group> = serde_json::from_str(text).unwrap();
        assert_eq!(
            groups[0].facts,
            [("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1".to_owned())]
        );
        assert!(serde_json::from_str::<Vec<Group>>(&text.replace("\"2\"", "2")).is_err());
    }
}
