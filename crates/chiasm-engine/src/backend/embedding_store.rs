//! The store through which engines of one machine exchange the embeddings of media items.

use std::fs;
use std::path::{Path, PathBuf};

use chiasm_transfer::SHM_DIR;
use chiasm_types::Role;
use serde_json::{Map, Value, json};

use crate::endpoints::SocketDir;
use crate::error::EngineError;

/// vLLM's connector with which encoding engines store embeddings, and the other engines of the
/// machine find them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EcConnector {
    /// The plugin's `EmbeddingStore`: files in memory, created atomically. The least recently used
    /// files are removed to make room.
    Store,
    /// `ECExampleConnector`, for trials: files in this folder, which are never removed. An engine
    /// that reads a file while it is written dies.
    Files(PathBuf),
    /// Another connector that finds embeddings by their items' identities, as the value of vLLM's
    /// `--ec-transfer-config`. `ec_role` is added unless present.
    Other(Map<String, Value>),
}

/// The embedding store of a process's engines: a connector and its folder, which is removed on
/// drop.
#[derive(Debug)]
pub struct EmbeddingStore {
    connector: EcConnector,
    max_bytes: u64,
    folder: Option<SocketDir>,
}

impl EmbeddingStore {
    /// Creates a store of `max_bytes`, with a folder if the connector needs one.
    ///
    /// # Errors
    /// The folder can't be created.
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

    /// Creates the store of attached engines, of which only the size is known.
    pub fn external(max_bytes: u64) -> Self {
        Self { connector: EcConnector::Other(Map::new()), max_bytes, folder: None }
    }

    /// Returns the number of bytes that the store keeps at least: it removes embeddings in parts of
    /// an eighth of its size.
    pub(super) fn guaranteed_bytes(&self) -> u64 {
        self.max_bytes / 8 * 7
    }

    /// Returns the folder with one file per item, if the connector has one.
    pub fn folder(&self) -> Option<&Path> {
        match (&self.connector, &self.folder) {
            (EcConnector::Files(folder), _) => Some(folder),
            (_, folder) => folder.as_ref().map(SocketDir::path),
        }
    }

    /// Returns the `--ec-transfer-config` of an engine with a role.
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

    /// Returns the size of an item's embeddings in bytes; `None` if they are missing or unknown
    /// here. `item` is the item's name for engines.
    pub(super) fn item_bytes(&self, item: &str) -> Option<u64> {
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
    fn config_has_role_of_engine() {
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
        let config_of_other = |config: Value| match config {
            Value::Object(config) => {
                EmbeddingStore::new(EcConnector::Other(config), 7).unwrap().config(Role::Decode)
            }
            _ => panic!("an object"),
        };
        assert_eq!(
            config_of_other(json!({"ec_connector": "X"})),
            json!({"ec_connector": "X", "ec_role": "ec_consumer"})
        );
        let both = json!({"ec_connector": "X", "ec_role": "ec_both"});
        assert_eq!(config_of_other(both.clone()), both);
    }

    #[test]
    fn dropping_store_removes_its_folder() {
        let store = EmbeddingStore::new(EcConnector::Store, 7).unwrap();
        let folder = store.folder().unwrap().to_owned();
        assert_eq!(store.item_bytes("ab"), None);
        fs::write(folder.join("ab.safetensors"), "12345").unwrap();
        assert_eq!(store.item_bytes("ab"), Some(5));
        drop(store);
        assert!(!folder.exists());
        let parent = tempfile::tempdir().unwrap();
        let files = EmbeddingStore::new(EcConnector::Files(parent.path().to_owned()), 7).unwrap();
        fs::create_dir(parent.path().join("ab")).unwrap();
        fs::write(parent.path().join("ab/encoder_cache.safetensors"), "123").unwrap();
        assert_eq!((files.item_bytes("ab"), files.item_bytes("cd")), (Some(3), None));
    }
}
