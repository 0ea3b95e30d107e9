use std::num::NonZeroU32;

use crate::Death;

/// A LoRA adapter as backends know it.
///
/// Its name is what blocks of the KV cache are kept apart by, here and in engines: it stands for
/// one content. An adapter that clients know under the same name as another, or that was changed
/// where it lies, has another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// No two adapters that an engine may have at the same time share it. At most 2³¹ − 1.
    pub id: NonZeroU32,
    /// The name in an engine's requests and in its KV events.
    pub name: String,
    /// Where it lies, as the engine finds it. Not empty.
    pub path: String,
}

/// The name that engines know an adapter by: that in requests, and a stamp of its content.
pub fn adapter_engine_name(name: &str, stamp: [u8; 8]) -> String {
    format!("{name}@{:016x}", u64::from_be_bytes(stamp))
}

/// An adapter that a backend has without being asked to load it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnAdapter {
    /// The name in requests.
    pub name: String,
    /// Its folder, as the backend was given it.
    pub root: String,
    /// Tells its content from others.
    pub stamp: [u8; 8],
    /// Why requests can't name it there after all.
    pub refused: Option<String>,
}

/// Why a backend does not have an adapter.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdapterError {
    /// It takes none at all.
    #[error("LoRA is not enabled in the engine; start it with --enable-lora")]
    NotEnabled,
    /// Backends that have it by themselves have it alone, or this one takes no others than its own.
    #[error("only engines whose agent was given it have it (--lora-modules of chiasm agent)")]
    NotOwn,
    /// There is none at its path, as the backend sees that.
    #[error("no adapter is found at '{0}'")]
    NotFound(String),
    /// The backend can't use it, in its own words.
    #[error("{0}")]
    Refused(String),
    /// The backend is gone, or says nothing.
    #[error("the engine is gone: {0}")]
    Gone(Death),
}
