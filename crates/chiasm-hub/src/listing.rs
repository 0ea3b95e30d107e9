//! The files of a commit, and the selection of those to fetch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::repo::{Commit, is_hex};
use crate::safe_path::is_safe_path;

/// The maximum number of files of a model.
pub(crate) const MAX_FILES: usize = 20_000;
/// The maximum size of a configuration file. Larger files are data, whatever their extension.
const MAX_CONFIGURATION_BYTES: u64 = 256 << 20;
/// The supported format version of the listings that `huggingface_hub` stores.
const TREE_FORMAT_VERSION: u32 = 1;

/// The files of a model to fetch. Its configuration is always included.
#[derive(Clone, Copy, Debug, Default)]
pub struct WantedFiles {
    /// The weights to include, for engines.
    pub weights: Option<Weights>,
    /// `true` to include Python code, for `--trust-remote-code`.
    pub code: bool,
}

/// A choice among the weights of a model, which may have several kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The weights that vLLM loads with `--load-format auto`: those in Mistral's format, else those
    /// of `transformers`.
    AsVllmChooses,
    /// Every safetensors file.
    All,
}

/// The description of one file of a commit. Some mirrors leave out fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The file's size in bytes.
    pub(crate) size: Option<u64>,
    /// The SHA-1 of the git object. For a file outside of git, this is the object of its pointer.
    pub(crate) blob_id: Option<String>,
    /// The SHA-256 of a file outside of git.
    pub(crate) sha256: Option<String>,
}

/// An error in the hub's description of a model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListingError {
    /// The response is not the JSON of a description.
    #[error("it does not describe a model: {0}")]
    Json(#[from] serde_json::Error),
    /// The commit is not a hash.
    #[error("{0:?} is not a commit")]
    Commit(String),
    /// A file's path is not safe.
    #[error("the path {:?} may lead out of the cache", shortened(.0))]
    Path(String),
    /// The hash of the file with this path is malformed.
    #[error("the hash of {0} is malformed")]
    Hash(String),
    /// The model has more than [`MAX_FILES`] files.
    #[error("the model has more than {MAX_FILES} files")]
    TooManyFiles,
}

/// The files of a commit, by their paths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listing(BTreeMap<String, Entry>);

/// The used part of the response to `/api/models/{id}/revision/{revision}?blobs=true`.
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

/// The file `trees/{commit}.json` of `huggingface_hub` 2.4 (`_tree_cache.py`).
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
    /// Parses the hub's response.
    ///
    /// # Errors
    /// [`ListingError`] if the response is invalid or unsafe.
    pub(crate) fn from_response(body: &[u8]) -> Result<(Commit, Self), ListingError> {
        let info: Info = serde_json::from_slice(body)?;
        let commit = Commit::parse(&info.sha).ok_or(ListingError::Commit(info.sha))?;
        let files = info.siblings.into_iter().map(|sibling| {
            let (sha256, lfs_size) = sibling.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            (
                sibling.rfilename,
                Entry { size: lfs_size.or(sibling.size), blob_id: sibling.blob_id, sha256 },
            )
        });
        Ok((commit, Self::checked(files)?))
    }

    /// Parses the file of `huggingface_hub`. Returns `None` if the file is invalid or has another
    /// format version.
    pub(crate) fn from_tree(text: &[u8]) -> Option<Self> {
        let tree: Tree = serde_json::from_slice(text).ok()?;
        let files = tree.files.into_iter().map(|(path, entry)| {
            let size = Some(entry.lfs_size.unwrap_or(entry.size));
            (path, Entry { size, blob_id: Some(entry.blob_id), sha256: entry.lfs_sha256 })
        });
        Self::checked(files).ok().filter(|_| tree.format_version == TREE_FORMAT_VERSION)
    }

    /// Serializes the file of `huggingface_hub`. Returns `None` if a size or an id is unknown, as
    /// with some mirrors.
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
            .map(|(path, file)| Some((path.clone(), entry(file)?)))
            .collect::<Option<_>>()?;
        serde_json::to_vec_pretty(&Tree { format_version: TREE_FORMAT_VERSION, files }).ok()
    }

    /// Collects files after checking their paths, hashes and number.
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

    /// Returns the paths of all files.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// Returns the wanted files.
    pub(crate) fn wanted(&self, wanted: WantedFiles) -> Vec<(&str, &Entry)> {
        let weights = wanted.weights.map_or_else(Vec::new, |kind| self.weights(kind));
        let is_small =
            |entry: &Entry| entry.size.is_none_or(|size| size <= MAX_CONFIGURATION_BYTES);
        let files = self.0.iter().map(|(path, entry)| (path.as_str(), entry));
        files
            .filter(|(path, entry)| {
                weights.contains(path)
                    || (is_small(entry)
                        && (is_configuration(path) || (wanted.code && path.ends_with(".py"))))
            })
            .collect()
    }

    /// Returns the paths of the weights.
    ///
    /// vLLM only reads weights in the top folder (`_prepare_weights`,
    /// `model_loader/default_loader.py`): those in Mistral's format if there are any, else
    /// safetensors, else PyTorch's pickles.
    fn weights(&self, kind: Weights) -> Vec<&str> {
        let top = || self.0.keys().map(String::as_str).filter(|path| !path.contains('/'));
        let safetensors: Vec<_> = top().filter(|path| path.ends_with(".safetensors")).collect();
        let is_mistral_format = |path: &&&str| path.starts_with("consolidated");
        let mistral_format: Vec<_> =
            safetensors.iter().filter(is_mistral_format).copied().collect();
        if kind == Weights::AsVllmChooses && !mistral_format.is_empty() {
            return mistral_format;
        }
        if !safetensors.is_empty() {
            return safetensors;
        }
        // vLLM's `filter_files_not_needed_for_inference` also leaves these out.
        top()
            .filter(|path| {
                path.ends_with(".bin") && !["training_args.bin", "optimizer.bin"].contains(path)
            })
            .collect()
    }
}

impl FromIterator<String> for Listing {
    /// Creates a listing in which only the paths are known.
    fn from_iter<T: IntoIterator<Item = String>>(paths: T) -> Self {
        Self(paths.into_iter().map(|path| (path, Entry::default())).collect())
    }
}

/// Returns `true` for files of a model's settings, tokenizer, processor or chat template.
fn is_configuration(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    [".json", ".jinja", ".model", ".txt", ".tiktoken"].iter().any(|end| name.ends_with(end))
        // A version follows in the names of Mistral's tokenizers.
        || name.starts_with("tokenizer.model.")
}

/// Returns `true` for files of weights.
pub(crate) fn is_weights(path: &str) -> bool {
    path.ends_with(".safetensors") || path.ends_with(".bin")
}

/// Returns `true` if a model must not be served without this file of the hub: it would behave
/// differently, or be prompted differently.
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

    fn wanted(paths: &[&str], wanted: WantedFiles) -> Vec<String> {
        let listing: Listing = paths.iter().map(|path| (*path).to_owned()).collect();
        listing.wanted(wanted).into_iter().map(|(path, _)| path.to_owned()).collect()
    }

    #[test]
    fn configuration_files_are_always_wanted() {
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
        assert_eq!(wanted(&all, WantedFiles::default()), configuration);
        let code = wanted(&all, WantedFiles { code: true, weights: None });
        assert_eq!(code.len(), configuration.len() + 1);
        assert!(code.contains(&"modeling.py".to_owned()));
        let large = Listing::checked(
            [("data.json".to_owned(), Entry { size: Some(1 << 30), ..Entry::default() })]
                .into_iter(),
        );
        assert!(large.unwrap().wanted(WantedFiles::default()).is_empty());
    }

    #[test]
    fn weights_equal_those_that_vllm_loads() {
        let weights =
            |paths: &[&str], kind| wanted(paths, WantedFiles { weights: Some(kind), code: false });
        let both = [
            "consolidated.safetensors",
            "model-1-of-1.safetensors",
            "onnx/model.safetensors",
            "pytorch_model.bin",
        ];
        assert_eq!(weights(&both, Weights::AsVllmChooses), [both[0]]);
        assert_eq!(weights(&both, Weights::All), both[..2]);
        assert_eq!(weights(&both[1..], Weights::AsVllmChooses), [both[1]]);
        let pickled = ["a/b.bin", "optimizer.bin", "pytorch_model.bin", "training_args.bin"];
        assert_eq!(weights(&pickled, Weights::AsVllmChooses), ["pytorch_model.bin"]);
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
            let problem = Listing::from_response(body.as_bytes()).unwrap_err().to_string();
            assert!(
                problem.contains("out of the cache") && problem.len() < 300,
                "{path}: {problem}"
            );
        }
        for body in [
            "[]".to_owned(),
            r#"{"sha": "../../x"}"#.to_owned(),
            format!(
                r#"{{"sha": "{SHA}", "siblings": [
                    {{"rfilename": "a", "lfs": {{"sha256": "../x"}}}}
                ]}}"#
            ),
            format!(r#"{{"sha": "{SHA}", "siblings": [{{"rfilename": "a", "size": -1}}]}}"#),
        ] {
            assert!(Listing::from_response(body.as_bytes()).is_err(), "{body}");
        }
        let many: Vec<_> =
            (0..=MAX_FILES).map(|n| serde_json::json!({"rfilename": n.to_string()})).collect();
        let body = serde_json::json!({"sha": SHA, "siblings": many}).to_string();
        assert!(
            Listing::from_response(body.as_bytes()).unwrap_err().to_string().contains("more than")
        );
    }

    #[test]
    fn stored_listing_has_format_of_python() {
        let sha256 = "0".repeat(64);
        let body = serde_json::json!({"sha": SHA, "siblings": [
            {"rfilename": "config.json", "size": 3, "blobId": SHA},
            {
                "rfilename": "m.safetensors",
                "size": 9,
                "blobId": SHA,
                "lfs": {"sha256": sha256, "size": 9, "pointerSize": 130},
            },
        ]});
        let (_, listing) = Listing::from_response(body.to_string().as_bytes()).unwrap();
        let tree = listing.to_tree().unwrap();
        let expected = serde_json::json!({"format_version": 1, "files": {
            "config.json": {"size": 3, "blob_id": SHA},
            "m.safetensors": {"size": 9, "blob_id": SHA, "lfs_sha256": sha256, "lfs_size": 9},
        }});
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&tree).unwrap(), expected);
        assert_eq!(Listing::from_tree(&tree), Some(listing));
        assert_eq!(Listing::from_tree(br#"{"format_version": 2, "files": {}}"#), None);
        let names: Listing = ["config.json".to_owned()].into_iter().collect();
        assert_eq!(names.to_tree(), None);
    }
}
