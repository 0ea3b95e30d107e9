//! How engines of one machine hand embeddings of media items to each other.

use std::fs;
use std::path::{Path, PathBuf};

use chiasm_transfer::SHM_DIR;
use chiasm_types::Role;
use serde_json::{Map, Value, json};

use crate::endpoints::SocketDir;
use crate::error::EngineError;

/// The connector of vLLM by which engines that encode leave embeddings, and all others of the
/// machine find them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EcConnector {
    /// The plugin's `EmbeddingStore`: files in memory, whole or not there, of which those that were
    /// used longest ago make room.
    Store,
    /// Files of this folder, which nobody removes: `ECExampleConnector`, for trials. Who reads a
    /// file while it is written dies of it.
    Files(PathBuf),
    /// Another one by which embeddings are found by their items' identities, as vLLM's
    /// `--ec-transfer-config` has it, to which `ec_role` is added unless it is there.
    Other(Map<String, Value>),
}

/// What the engines of one process share: a connector and its folder, which goes when this does.
#[derive(Debug)]
pub struct EmbeddingStore {
    connector: EcConnector,
    max_bytes: u64,
    folder: Option<SocketDir>,
}

impl EmbeddingStore {
    /// A store of so many bytes, with a folder of its own if the connector needs one.
    ///
    /// # Errors
    /// The folder can't be made.
    pub fn new(connector: EcConnector, max_bytes: u64) -> Result<Self, EngineError> {
        let folder = match connector {
            EcConnector::Store => {
                let parent = Path::new(SHM_DIR);
                Some(if parent.is_dir() { SocketDir::new_in(parent) } else { SocketDir::new() }?)
            }
            EcConnector::Files(_) | EcConnector::Other(_) => None,
        };
        Ok(Self { connector, max_bytes, folder })
    }

    /// The store of engines that somebody else has started, of which nothing is known but its size.
    pub fn of_others(max_bytes: u64) -> Self {
        Self { connector: EcConnector::Other(Map::new()), max_bytes, folder: None }
    }

    /// Bytes of embeddings that are there in any case, if so many were left: the store makes room
    /// in parts of an eighth.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.max_bytes / 8 * 7
    }

    /// The folder with one file of each item, for engines that have one.
    pub fn folder(&self) -> Option<&Path> {
        match (&self.connector, &self.folder) {
            (EcConnector::Files(folder), _) => Some(folder),
            (_, folder) => folder.as_ref().map(SocketDir::path),
        }
    }

    /// What an engine of a role is told with `--ec-transfer-config`.
    pub(super) fn config(&self, role: Role) -> Value {
        let ec_role = if role == Role::Encode { "ec_producer" } else { "ec_consumer" };
        match &self.connector {
            EcConnector::Store => json!({
                "ec_connector": "EmbeddingStore",
                "ec_connector_module_path": "chiasm_vllm.embedding_store",
                "ec_role": ec_role,
                "ec_connector_extra_config": {"folder": self.folder(), "max_bytes": self.max_bytes},
            }),
            EcConnector::Files(folder) => json!({
                "ec_connector": "ECExampleConnector",
                "ec_role": ec_role,
                "ec_connector_extra_config": {"shared_storage_path": folder},
            }),
            EcConnector::Other(config) => {
                let mut config = config.clone();
                config.entry("ec_role").or_insert_with(|| ec_role.into());
                Value::Object(config)
            }
        }
    }

    /// Bytes of an item's embeddings; `None` if they are not there, or it can't be told from here.
    /// `item` is its name for engines.
    pub(super) fn bytes_of(&self, item: &str) -> Option<u64> {
        let folder = self.folder()?;
        let file = match self.connector {
            EcConnector::Files(_) => folder.join(item).join("encoder_cache.safetensors"),
            EcConnector::Store | EcConnector::Other(_) => {
                folder.join(format!("{item}.safetensors"))
            }
        };
        Some(fs::metadata(file).ok()?.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_encodes_leaves_and_all_others_find() {
        let store = EmbeddingStore::new(EcConnector::Store, 7).unwrap();
        let [encode, prefill] = [Role::Encode, Role::Prefill].map(|role| store.config(role));
        assert_eq!(
            (&encode["ec_role"], &prefill["ec_role"]),
            (&json!("ec_producer"), &json!("ec_consumer"))
        );
        assert_eq!(
            encode["ec_connector_extra_config"],
            json!({"folder": store.folder(), "max_bytes": 7})
        );
        let other = |config: Value| match config {
            Value::Object(config) => {
                EmbeddingStore::new(EcConnector::Other(config), 7).unwrap().config(Role::Decode)
            }
            _ => panic!("an object"),
        };
        assert_eq!(
            other(json!({"ec_connector": "X"})),
            json!({"ec_connector": "X", "ec_role": "ec_consumer"})
        );
        let both = json!({"ec_connector": "X", "ec_role": "ec_both"});
        assert_eq!(other(both.clone()), both);
    }

    #[test]
    fn a_store_knows_what_is_in_its_folder_and_takes_it_along() {
        let store = EmbeddingStore::new(EcConnector::Store, 7).unwrap();
        let folder = store.folder().unwrap().to_owned();
        assert_eq!(store.bytes_of("ab"), None);
        fs::write(folder.join("ab.safetensors"), "12345").unwrap();
        assert_eq!(store.bytes_of("ab"), Some(5));
        drop(store);
        assert!(!folder.exists());
        let parent = tempfile::tempdir().unwrap();
        let files = EmbeddingStore::new(EcConnector::Files(parent.path().to_owned()), 7).unwrap();
        fs::create_dir(parent.path().join("ab")).unwrap();
        fs::write(parent.path().join("ab/encoder_cache.safetensors"), "123").unwrap();
        assert_eq!((files.bytes_of("ab"), files.bytes_of("cd")), (Some(3), None));
    }
}
