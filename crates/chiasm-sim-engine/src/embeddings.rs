//! Embeddings that engines of one machine leave for each other, as files by the items' identities:
//! what the plugin's `EmbeddingStore` does for vLLM. What is in the files says which item they are
//! of, which is enough to notice that they are another one's.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use chiasm_engine::wire::Value;

/// Most items that an engine leaves: for another one the oldest goes.
const MOST_ITEMS: usize = 4096;

/// Where an engine leaves embeddings, or finds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingFolder {
    /// The folder, which all engines of the machine share.
    pub folder: PathBuf,
    /// Whether the engine only encodes, and leaves what it has encoded.
    pub leaves: bool,
}

/// The file of this item has embeddings of another one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("embeddings of item {0} are those of another one")]
pub(crate) struct OfAnother(String);

/// The engine's view of it.
pub(crate) struct Embeddings {
    folder: PathBuf,
    leaves: bool,
    /// What it has left, the oldest first.
    left: VecDeque<String>,
}

impl Embeddings {
    pub(crate) fn new(EmbeddingFolder { folder, leaves }: EmbeddingFolder) -> Self {
        Self { folder, leaves, left: VecDeque::new() }
    }

    /// Whether the engine only encodes.
    pub(crate) fn leaves(&self) -> bool {
        self.leaves
    }

    fn path(&self, item: &str) -> PathBuf {
        self.folder.join(format!("{item}.safetensors"))
    }

    /// Whether the embeddings of an item are there.
    ///
    /// # Errors
    /// They are those of something else, which would make wrong answers.
    pub(crate) fn find(&self, item: &str, embeds: usize) -> Result<bool, OfAnother> {
        match fs::read_to_string(self.path(item)) {
            Ok(found) if found == content(item, embeds) => Ok(true),
            Ok(_) => Err(OfAnother(item.to_owned())),
            Err(_) => Ok(false),
        }
    }

    /// Leaves the embeddings of an item. Whoever looks finds all of them, or none.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn leave(&mut self, item: &str, embeds: usize) -> io::Result<()> {
        if !self.leaves || self.path(item).exists() {
            return Ok(());
        }
        let unnamed = self.folder.join(format!("{item}.{}", std::process::id()));
        fs::write(&unnamed, content(item, embeds))?;
        fs::rename(unnamed, self.path(item))?;
        self.left.push_back(item.to_owned());
        if self.left.len() > MOST_ITEMS
            && let Some(oldest) = self.left.pop_front()
        {
            remove(&self.path(&oldest));
        }
        Ok(())
    }

    /// What an engine says of these items when it has encoded them.
    pub(crate) fn said<'a>(&self, items: impl Iterator<Item = &'a str>) -> Value {
        let of = |item: &str| {
            let bytes = fs::metadata(self.path(item)).ok()?.len();
            Some((item.into(), Value::Map(vec![("bytes".into(), bytes.into())])))
        };
        Value::Map(items.filter_map(of).collect())
    }
}

fn content(item: &str, embeds: usize) -> String {
    format!("{embeds} embeddings of {item}")
}

/// What is gone already is as good as removed.
fn remove(path: &Path) {
    let _ = fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_engine_leaves_another_finds() {
        let folder = tempfile::tempdir().unwrap();
        let of =
            |leaves| Embeddings::new(EmbeddingFolder { folder: folder.path().to_owned(), leaves });
        let (mut encoder, mut other) = (of(true), of(false));
        assert_eq!(other.find("a", 3), Ok(false));
        other.leave("a", 3).unwrap();
        assert_eq!(other.find("a", 3), Ok(false), "it leaves nothing");
        encoder.leave("a", 3).unwrap();
        assert_eq!(other.find("a", 3), Ok(true));
        assert!(other.find("a", 4).is_err(), "of another size");
        let said = encoder.said(["a", "b"].into_iter());
        assert_eq!(said["a"]["bytes"].as_u64(), Some(content("a", 3).len() as u64));
        assert!(said["b"].is_nil(), "it was not encoded");
    }

    #[test]
    fn the_oldest_goes_for_what_is_new() {
        let folder = tempfile::tempdir().unwrap();
        let mut encoder =
            Embeddings::new(EmbeddingFolder { folder: folder.path().to_owned(), leaves: true });
        for item in 0..=MOST_ITEMS {
            encoder.leave(&item.to_string(), 1).unwrap();
        }
        assert_eq!((encoder.find("0", 1), encoder.find("1", 1)), (Ok(false), Ok(true)));
    }
}
