//! The native architectures of Chiasm and those compared in tests, from this repository only.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::facts::Facts;
use crate::error::Error;
use crate::workspace::Workspace;

/// The model families of `crates/chiasm/tests/real_vllm/modalities.rs`, and the modalities whose
/// items vLLM's processor makes there.
pub(super) const COMPARED: &[(&str, &[&str])] = &[
    ("qwen25vl", &["video"]),
    ("qwen3vl", &["video"]),
    ("qwen2audio", &["audio"]),
    ("omni", &["image", "video", "audio"]),
    ("llavaov", &["image", "video"]),
    ("mistral_small", &["image"]),
    ("paligemma", &["image"]),
    ("minicpmv46", &["image", "video"]),
];

/// The folder of crates. Their goldens have model directories of all native families, and of no
/// other family that takes images.
const CRATES: &str = "crates";
/// The folder of goldens in a crate.
const GOLDENS: &str = "tests/goldens";

/// A family of `chiasm-vision`: the `model_type` and the architecture in config.json of a model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Native {
    pub(super) model_type: String,
    pub(super) architecture: String,
}

/// Returns the native families, found by the models among the golden files.
pub(super) fn native(workspace: &Workspace) -> Result<BTreeSet<Native>, Error> {
    let mut found = BTreeSet::new();
    let crates = workspace.root.join(CRATES);
    for folder in entries(&crates)? {
        let goldens = folder.join(GOLDENS);
        if goldens.is_dir() {
            collect(&goldens, &mut found)?;
        }
    }
    Ok(found)
}

/// Adds the native families below a folder.
fn collect(folder: &Path, found: &mut BTreeSet<Native>) -> Result<(), Error> {
    for path in entries(folder)? {
        if path.is_dir() {
            collect(&path, found)?;
        } else if path.ends_with("config.json") {
            let json = fs::read(&path).map_err(Error::io("read", &path))?;
            // Some files are invalid on purpose.
            let config: Value = serde_json::from_slice(&json).unwrap_or_default();
            if let (Some(model_type), Some(architecture), true) = (
                config["model_type"].as_str(),
                config["architectures"][0].as_str(),
                config["vision_config"].is_object(),
            ) {
                found.insert(Native {
                    model_type: model_type.to_owned(),
                    architecture: architecture.to_owned(),
                });
            }
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let read = || {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()
    };
    read().map_err(Error::io("list", folder))
}

/// Returns `true` if items of this modality and architecture were compared.
pub(super) fn is_compared(facts: &Facts, architecture: &str, modality: &str) -> bool {
    COMPARED.iter().any(|(family, modalities)| {
        facts.compared.get(*family).is_some_and(|compared| compared == architecture)
            && modalities.contains(&modality)
    })
}

#[cfg(test)]
mod tests {
    use chiasm_vision::{NoVocabulary, VisionError, VisionModel};

    use super::*;

    fn repository() -> Workspace {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        Workspace { root: root.to_owned(), cache: root.join("nowhere") }
    }

    #[test]
    fn compared_families_match_engine_tests() {
        let path = repository().file("crates/chiasm/tests/real_vllm/modalities.rs").unwrap();
        let text = fs::read_to_string(path).unwrap();
        let rows: Vec<_> = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("(\"")?.split_once("\", "))
            .collect();
        let names: Vec<&str> = rows.iter().map(|(family, _)| *family).collect();
        assert_eq!(names, COMPARED.iter().map(|(family, _)| *family).collect::<Vec<_>>());
        for ((family, requests), (_, modalities)) in rows.iter().zip(COMPARED) {
            for modality in ["image", "video", "audio"] {
                let is_named = requests.contains(&format!("{modality}_requests"));
                assert!(!is_named || modalities.contains(&modality), "{family}: {modality}");
            }
        }
    }

    #[test]
    fn native_families_match_vision_crate() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), r#"{"model_type": "none", "vision_config": {}}"#)
            .unwrap();
        let Err(VisionError::UnknownFamily { known, .. }) =
            VisionModel::from_model_dir(dir.path(), &NoVocabulary)
        else {
            panic!("there is no family `none`");
        };
        let native = native(&repository()).unwrap();
        let found: BTreeSet<&str> =
            native.iter().map(|native| native.model_type.as_str()).collect();
        assert_eq!(found, known.into_iter().collect());
    }
}
