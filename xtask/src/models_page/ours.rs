//! Which architectures Chiasm has code of its own for, and which it was compared in: from this
//! repository alone.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::facts::Facts;
use crate::error::Error;
use crate::workspace::Workspace;

/// The families of `crates/chiasm/tests/real_vllm/modalities.rs`, and which items of theirs vLLM's
/// processor makes there.
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

/// The tests of these have golden model directories of every native family, and of no other that
/// takes images.
const CRATES: &str = "crates";
const GOLDENS: &str = "tests/goldens";

/// A family of `chiasm-vision` in a model directory: its `model_type`, and the architecture that
/// the directory names beside it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Native {
    pub(super) model_type: String,
    pub(super) architecture: String,
}

/// The native families, by the models among the golden files.
pub(super) fn native(workspace: &Workspace) -> Result<BTreeSet<Native>, Error> {
    let mut found = BTreeSet::new();
    let crates = workspace.root.join(CRATES);
    for each in entries(&crates)? {
        let goldens = each.join(GOLDENS);
        if goldens.is_dir() {
            collect(&goldens, &mut found)?;
        }
    }
    Ok(found)
}

fn collect(folder: &Path, found: &mut BTreeSet<Native>) -> Result<(), Error> {
    for path in entries(folder)? {
        if path.is_dir() {
            collect(&path, found)?;
        } else if path.ends_with("config.json") {
            let json = fs::read(&path).map_err(Error::io("read", &path))?;
            // Some are broken on purpose.
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

/// Whether items of this modality and architecture were compared.
pub(super) fn is_compared(facts: &Facts, architecture: &str, modality: &str) -> bool {
    COMPARED.iter().any(|(family, modalities)| {
        facts.compared.get(*family).is_some_and(|of_family| of_family == architecture)
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
    fn the_families_are_those_that_are_compared_on_engines() {
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
    fn the_native_families_are_those_of_the_code() {
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
