//! The files of a commit, and which of them are wanted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::repo::{Commit, is_hex};
use crate::safe_path::is_safe_path;

/// Most files of a model.
pub(crate) const MAX_FILES: usize = 20_000;
/// Larger files than this are data, whatever their names end in.
const MAX_SMALL: u64 = 256 << 20;
/// The version of Python's files of listings that is understood.
const FORMAT: u32 = 1;

/// Which files of a model are wanted: always all that configure it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// The weights too, for engines.
    pub weights: Option<Weights>,
    /// Python code too, for `--trust-remote-code`.
    pub code: bool,
}

/// Which weights, where a model has several kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Those that vLLM takes with `--load-format auto`: Mistral's own before those of
    /// `transformers`.
    AsVllmChooses,
    /// All safetensors.
    All,
}

/// What a commit says of one file, as far as it does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Bytes.
    pub(crate) size: Option<u64>,
    /// The SHA-1 of the file as a git object; of a pointer for files that git does not hold itself.
    pub(crate) blob_id: Option<String>,
    /// The SHA-256 of a file that git does not hold itself.
    pub(crate) sha256: Option<String>,
}

/// The fault of a hub's description of a model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListingError {
    /// It is not the JSON of a description.
    #[error("it is no model's description: {0}")]
    Json(#[from] serde_json::Error),
    /// Its commit has no hash.
    #[error("{0:?} is no commit")]
    Commit(String),
    /// A file would be written elsewhere.
    #[error("a file is called {:?}, which may lead out of the cache", shortened(.0))]
    Path(String),
    /// The hash of the file with this path is malformed.
    #[error("{0} has a hash that is none")]
    Hash(String),
    /// More than [`MAX_FILES`].
    #[error("it has more than {MAX_FILES} files")]
    TooManyFiles,
}

/// The files of a commit, by their paths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listing(BTreeMap<String, Entry>);

/// The answer to `/api/models/{id}/revision/{revision}?blobs=true`; all else in it does not matter
/// here.
#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

/// Python's file `trees/{commit}.json` (`_tree_cache.py` of `huggingface_hub` 2.4).
#[derive(Deserialize, Serialize)]
struct Tree {
    format_version: u32,
    files: BTreeMap<String, TreeEntry>,
}

#[derive(Deserialize, Serialize)]
struct TreeEntry {
    size: u64,
    blob_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lfs_sha256: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lfs_size: Option<u64>,
}

impl Listing {
    /// Reads a hub's answer.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn of_answer(body: &[u8]) -> Result<(Commit, Self), ListingError> {
        let info: Info = serde_json::from_slice(body)?;
        let commit = Commit::read(&info.sha).ok_or(ListingError::Commit(info.sha))?;
        let files = info.siblings.into_iter().map(|sibling| {
            let (sha256, lfs_size) = sibling.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            (
                sibling.rfilename,
                Entry { size: lfs_size.or(sibling.size), blob_id: sibling.blob_id, sha256 },
            )
        });
        Ok((commit, Self::checked(files)?))
    }

    /// Reads Python's file; `None` for what is none, or of another version.
    pub(crate) fn of_tree(text: &[u8]) -> Option<Self> {
        let tree: Tree = serde_json::from_slice(text).ok()?;
        let files = tree.files.into_iter().map(|(path, entry)| {
            let size = Some(entry.lfs_size.unwrap_or(entry.size));
            (path, Entry { size, blob_id: Some(entry.blob_id), sha256: entry.lfs_sha256 })
        });
        Self::checked(files).ok().filter(|_| tree.format_version == FORMAT)
    }

    /// Python's file; `None` if the hub, as some mirrors do, did not tell enough for one.
    pub(crate) fn to_tree(&self) -> Option<Vec<u8>> {
        let entry = |entry: &Entry| {
            let size = entry.size?;
            let lfs_size = entry.sha256.is_some().then_some(size);
            Some(TreeEntry {
                size,
                blob_id: entry.blob_id.clone()?,
                lfs_sha256: entry.sha256.clone(),
                lfs_size,
            })
        };
        let files = self
            .0
            .iter()
            .map(|(path, of)| Some((path.clone(), entry(of)?)))
            .collect::<Option<_>>()?;
        serde_json::to_vec_pretty(&Tree { format_version: FORMAT, files }).ok()
    }

    fn checked(files: impl Iterator<Item = (String, Entry)>) -> Result<Self, ListingError> {
        let mut checked = BTreeMap::new();
        for (path, entry) in files {
            if !is_safe_path(&path) {
                return Err(ListingError::Path(path));
            }
            let is_hash = |hash: &Option<String>, digits| {
                hash.as_ref().is_none_or(|hash| is_hex(hash, digits))
            };
            if !is_hash(&entry.blob_id, 40) || !is_hash(&entry.sha256, 64) {
                return Err(ListingError::Hash(path));
            }
            checked.insert(path, entry);
            if checked.len() > MAX_FILES {
                return Err(ListingError::TooManyFiles);
            }
        }
        Ok(Self(checked))
    }

    /// The paths of all files.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// The files that are wanted.
    pub(crate) fn wanted(&self, wanted: Wanted) -> Vec<(&str, &Entry)> {
        let weights = wanted.weights.map_or_else(Vec::new, |kind| self.weights(kind));
        let is_small = |entry: &Entry| entry.size.is_none_or(|size| size <= MAX_SMALL);
        let files = self.0.iter().map(|(path, entry)| (path.as_str(), entry));
        files
            .filter(|(path, entry)| {
                weights.contains(path)
                    || (is_small(entry)
                        && (is_configuration(path) || (wanted.code && path.ends_with(".py"))))
            })
            .collect()
    }

    /// vLLM reads weights from the uppermost folder alone (`_prepare_weights`,
    /// `model_loader/default_loader.py`): Mistral's own if there are any, else safetensors, else
    /// what PyTorch has pickled.
    fn weights(&self, kind: Weights) -> Vec<&str> {
        let top = || self.0.keys().map(String::as_str).filter(|path| !path.contains('/'));
        let safetensors: Vec<_> = top().filter(|path| path.ends_with(".safetensors")).collect();
        let is_mistrals = |path: &&&str| path.starts_with("consolidated");
        let mistrals: Vec<_> = safetensors.iter().filter(is_mistrals).copied().collect();
        if kind == Weights::AsVllmChooses && !mistrals.is_empty() {
            return mistrals;
        }
        if !safetensors.is_empty() {
            return safetensors;
        }
        // Not for inference, as `filter_files_not_needed_for_inference` has it.
        top()
            .filter(|path| {
                path.ends_with(".bin") && !["training_args.bin", "optimizer.bin"].contains(path)
            })
            .collect()
    }
}

impl FromIterator<String> for Listing {
    /// Of names alone.
    fn from_iter<T: IntoIterator<Item = String>>(paths: T) -> Self {
        Self(paths.into_iter().map(|path| (path, Entry::default())).collect())
    }
}

/// Whether a file tells of a model's settings, tokenizer, processor or chat template.
fn is_configuration(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    [".json", ".jinja", ".model", ".txt", ".tiktoken"].iter().any(|end| name.ends_with(end))
        // Mistral's tokenizers have a version behind it.
        || name.starts_with("tokenizer.model.")
}

/// Whether a file has weights.
pub(crate) fn is_weights(path: &str) -> bool {
    path.ends_with(".safetensors") || path.ends_with(".bin")
}

/// Whether a model without this file, which it has on the hub, would be another one, or be written
/// to in another way.
pub(crate) fn is_needed(path: &str) -> bool {
    const NAMES: [&str; 14] = [
        "added_tokens",
        "chat_template",
        "config.json",
        "generation_config",
        "merges",
        "model.safetensors.index",
        "params.json",
        "preprocessor_config",
        "processor_config",
        "special_tokens_map",
        "tekken",
        "tokenizer",
        "video_preprocessor_config",
        "vocab",
    ];
    is_weights(path) || path.ends_with(".py") || NAMES.iter().any(|name| path.starts_with(name))
}

fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHA: &str = "607a30d783dfa663caf39e06633721c8d4cfcd7e";

    fn wanted(paths: &[&str], wanted: Wanted) -> Vec<String> {
        let listing: Listing = paths.iter().map(|path| (*path).to_owned()).collect();
        listing.wanted(wanted).into_iter().map(|(path, _)| path.to_owned()).collect()
    }

    #[test]
    fn what_configures_a_model_is_wanted_always() {
        let configuration = [
            "chat_template.jinja",
            "chat_templates/default.jinja",
            "config.json",
            "merges.txt",
            "qwen.tiktoken",
            "tekken.json",
            "tokenizer.model",
            "tokenizer.model.v7m1",
        ];
        let others = [
            "README.md",
            "model.gguf",
            "model.safetensors",
            "modeling.py",
            "original/consolidated.00.pth",
            "x.bin",
        ];
        let all: Vec<&str> = configuration.iter().chain(&others).copied().collect();
        assert_eq!(wanted(&all, Wanted::default()), configuration);
        let code = wanted(&all, Wanted { code: true, weights: None });
        assert_eq!(code.len(), configuration.len() + 1);
        assert!(code.contains(&"modeling.py".to_owned()));
        let large = Listing::checked(
            [("data.json".to_owned(), Entry { size: Some(1 << 30), ..Entry::default() })]
                .into_iter(),
        );
        assert!(large.unwrap().wanted(Wanted::default()).is_empty());
    }

    #[test]
    fn weights_are_those_that_vllm_reads() {
        let of = |paths: &[&str], kind| wanted(paths, Wanted { weights: Some(kind), code: false });
        let both = [
            "consolidated.safetensors",
            "model-1-of-1.safetensors",
            "onnx/model.safetensors",
            "pytorch_model.bin",
        ];
        assert_eq!(of(&both, Weights::AsVllmChooses), [both[0]]);
        assert_eq!(of(&both, Weights::All), both[..2]);
        assert_eq!(of(&both[1..], Weights::AsVllmChooses), [both[1]]);
        let pickled = ["a/b.bin", "optimizer.bin", "pytorch_model.bin", "training_args.bin"];
        assert_eq!(of(&pickled, Weights::AsVllmChooses), ["pytorch_model.bin"]);
    }

    #[test]
    fn hostile_listings_are_refused() {
        let long = format!("{}.json", "a".repeat(2000));
        for path in [
            "../config.json",
            "a/../../b.json",
            "/etc/passwd",
            "a//b",
            "",
            ".",
            "a\\..\\b",
            "a\nb",
            "a\0b",
            &long,
        ] {
            let body =
                serde_json::json!({"sha": SHA, "siblings": [{"rfilename": path}]}).to_string();
            let problem = Listing::of_answer(body.as_bytes()).unwrap_err().to_string();
            assert!(
                problem.contains("out of the cache") && problem.len() < 300,
                "{path}: {problem}"
            );
        }
        for body in [
            "[]".to_owned(),
            r#"{"sha": "../../x"}"#.to_owned(),
            format!(
                r#"{{"sha": "{SHA}", "siblings": [{{"rfilename": "a", "lfs": {{"sha256": "../x"}}}}]}}"#
            ),
            format!(r#"{{"sha": "{SHA}", "siblings": [{{"rfilename": "a", "size": -1}}]}}"#),
        ] {
            assert!(Listing::of_answer(body.as_bytes()).is_err(), "{body}");
        }
        let many: Vec<_> =
            (0..=MAX_FILES).map(|n| serde_json::json!({"rfilename": n.to_string()})).collect();
        let body = serde_json::json!({"sha": SHA, "siblings": many}).to_string();
        assert!(Listing::of_answer(body.as_bytes()).unwrap_err().to_string().contains("more than"));
    }

    #[test]
    fn listings_are_kept_as_python_keeps_them() {
        let sha256 = "0".repeat(64);
        let body = serde_json::json!({"sha": SHA, "siblings": [
            {"rfilename": "config.json", "size": 3, "blobId": SHA},
            {"rfilename": "m.safetensors", "size": 9, "blobId": SHA, "lfs": {"sha256": sha256, "size": 9, "pointerSize": 130}},
        ]});
        let (_, listing) = Listing::of_answer(body.to_string().as_bytes()).unwrap();
        let tree = listing.to_tree().unwrap();
        let expected = serde_json::json!({"format_version": 1, "files": {
            "config.json": {"size": 3, "blob_id": SHA},
            "m.safetensors": {"size": 9, "blob_id": SHA, "lfs_sha256": sha256, "lfs_size": 9},
        }});
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&tree).unwrap(), expected);
        assert_eq!(Listing::of_tree(&tree), Some(listing));
        assert_eq!(Listing::of_tree(br#"{"format_version": 2, "files": {}}"#), None);
        let names: Listing = ["config.json".to_owned()].into_iter().collect();
        assert_eq!(names.to_tree(), None);
    }
}
