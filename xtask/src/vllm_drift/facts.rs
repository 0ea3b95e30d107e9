//! The facts of a version of vLLM that Chiasm relies on, read by `python/vllm_drift/facts.py`.

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

/// Facts with the same reason and the same files of ours.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// The reason why Chiasm relies on the facts.
    pub(crate) what: String,
    /// The paths of our files that rely on the facts.
    pub(crate) ours: Vec<String>,
    /// The names and values, in the table's order.
    #[serde(deserialize_with = "in_order")]
    pub(crate) facts: Vec<(String, String)>,
}

/// Deserializes a map in its order: facts include the order of a struct's fields.
fn in_order<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<(String, String)>, D::Error> {
    let map = Map::<String, Value>::deserialize(from)?;
    map.into_iter()
        .map(|(name, value)| match value {
            Value::String(value) => Ok((name, value)),
            other => Err(serde::de::Error::custom(format!("{name} is {other}"))),
        })
        .collect()
}

/// Reads the facts of the vLLM in the folder `packages`.
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

/// Returns a report of pip with the requirements of the published wheel. An overlay has no metadata
/// of its own. The report is kept, because a published version never changes.
pub(super) fn requirements(setup: &Setup, base: &VllmEnv, version: &str) -> Result<PathBuf, Error> {
    let folder = super::sources::work_folder(&setup.workspace);
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    let path = folder.join(format!("requirements-{version}.json"));
    if path.is_file() {
        return Ok(path);
    }
    let temporary = folder.join(format!("requirements-{version}.{}.new", std::process::id()));
    let mut pip = venv::pip(base.python_command(), "install");
    pip.args(["--dry-run", "--ignore-installed", "--report"])
        .arg(&temporary)
        .arg(format!("vllm=={version}"))
        // /tmp is often small or a RAM disk.
        .env("TMPDIR", &folder)
        .stdin(std::process::Stdio::null());
    child::run(
        &mut pip,
        &format!("asking for the metadata of vllm=={version}"),
        &setup.output,
        &setup.cancel,
    )?;
    fs::rename(&temporary, &path).map_err(Error::io("create", &path))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_keep_their_order() {
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
