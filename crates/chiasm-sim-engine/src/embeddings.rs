//! Embeddings that engines of one machine share, as files by the items' identities. They stand for
//! the plugin's `EmbeddingStore` in vLLM. A file's content names its item, which is enough to
//! notice a file of another item.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use chiasm_engine::wire::Value;

/// The maximum number of items that an engine stores; beyond it the oldest item is removed.
const MAX_ITEMS: usize = 4096;

/// The folder in which engines share embeddings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingFolder {
    /// The folder, which all engines of the machine share.
    pub folder: PathBuf,
    /// `true` for an engine that only encodes, and stores its embeddings in the folder.
    pub encode_only: bool,
}

/// The error for a file whose embeddings are those of another item.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the embeddings stored for item {0} are those of another item")]
pub(crate) struct WrongItem(String);

/// An engine's access to shared embeddings.
pub(crate) struct Embeddings {
    folder: PathBuf,
    encode_only: bool,
    /// The items that this engine has stored, the oldest first.
    stored: VecDeque<String>,
}

impl Embeddings {
    pub(crate) fn new(EmbeddingFolder { folder, encode_only }: EmbeddingFolder) -> Self {
        Self { folder, encode_only, stored: VecDeque::new() }
    }

    /// Returns `true` if the engine only encodes.
    pub(crate) fn encode_only(&self) -> bool {
        self.encode_only
    }

    fn path(&self, item: &str) -> PathBuf {
        self.folder.join(format!("{item}.safetensors"))
    }

    /// Returns `true` if the embeddings of an item are stored.
    ///
    /// # Errors
    /// Returns [`WrongItem`] if the file has other embeddings, which would make wrong answers.
    pub(crate) fn find(&self, item: &str, embeds: usize) -> Result<bool, WrongItem> {
        match fs::read_to_string(self.path(item)) {
            Ok(found) if found == content(item, embeds) => Ok(true),
            Ok(_) => Err(WrongItem(item.to_owned())),
            Err(_) => Ok(false),
        }
    }

    /// Stores the embeddings of an item, if this engine only encodes. The file appears atomically.
    ///
    /// # Errors
    /// Returns the system's error.
    pub(crate) fn store(&mut self, item: &str, embeds: usize) -> io::Result<()> {
        if !self.encode_only || self.path(item).exists() {
            return Ok(());
        }
        let unnamed = self.folder.join(format!("{item}.{}", std::process::id()));
        fs::write(&unnamed, content(item, embeds))?;
        fs::rename(unnamed, self.path(item))?;
        self.stored.push_back(item.to_owned());
        if self.stored.len() > MAX_ITEMS
            && let Some(oldest) = self.stored.pop_front()
        {
            remove(&self.path(&oldest));
        }
        Ok(())
    }

    /// Returns the `ec_transfer_params` for these items after they were encoded.
    pub(crate) fn transfer_params<'a>(&self, items: impl Iterator<Item = &'a str>) -> Value {
        let entry = |item: &str| {
            let bytes = fs::metadata(self.path(item)).ok()?.len();
            Some((item.into(), Value::Map(vec![("bytes".into(), bytes.into())])))
        };
        Value::Map(items.filter_map(entry).collect())
    }
}

fn content(item: &str, embeds: usize) -> String {
    format!("{embeds} embeddings of {item}")
}

/// Removes a file. A missing file is ignored.
fn remove(path: &Path) {
    let _ = fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_embeddings_are_found_by_another_engine() {
        let folder = tempfile::tempdir().unwrap();
        let embeddings = |encode_only| {
            Embeddings::new(EmbeddingFolder { folder: folder.path().to_owned(), encode_only })
        };
        let mut encoder = embeddings(true);
        let mut other = embeddings(false);
        assert_eq!(other.find("a", 3), Ok(false));
        other.store("a", 3).unwrap();
        assert_eq!(other.find("a", 3), Ok(false), "only an encoder stores");
        encoder.store("a", 3).unwrap();
        assert_eq!(other.find("a", 3), Ok(true));
        assert!(other.find("a", 4).is_err(), "another size");
        let params = encoder.transfer_params(["a", "b"].into_iter());
        assert_eq!(params["a"]["bytes"].as_u64(), Some(content("a", 3).len() as u64));
        assert!(params["b"].is_nil(), "the item was not encoded");
    }

    #[test]
    fn oldest_embeddings_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut encoder = Embeddings::new(EmbeddingFolder {
            folder: folder.path().to_owned(),
            encode_only: true,
        });
        for item in 0..=MAX_ITEMS {
            encoder.store(&item.to_string(), 1).unwrap();
        }
        assert_eq!((encoder.find("0", 1), encoder.find("1", 1)), (Ok(false), Ok(true)));
    }
}
