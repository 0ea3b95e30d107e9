use std::num::NonZeroU32;

use crate::DeathReason;

/// A LoRA adapter, as backends identify it.
///
/// The adapter's name is part of the keys of KV-cache blocks, here and in engines, so a name stands
/// for exactly one content. Adapters with the same client-facing name, and versions of one adapter,
/// therefore have different names here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// The number in an engine's requests, unique among the adapters that the engine may hold at
    /// the same time. At most 2³¹ − 1.
    pub id: NonZeroU32,
    /// The name in an engine's requests and in its KV events.
    pub name: String,
    /// The path of the adapter, as the engine sees it. Not empty.
    pub path: String,
}

/// Returns the name by which engines know an adapter: the name in requests and a stamp of the
/// content.
pub fn adapter_engine_name(name: &str, stamp: [u8; 8]) -> String {
    format!("{name}@{:016x}", u64::from_be_bytes(stamp))
}

/// An adapter that the operator configured in a backend, so that no frontend needs to load it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreloadedAdapter {
    /// The name in requests.
    pub name: String,
    /// The adapter's folder, as configured in the backend.
    pub root: String,
    /// A stamp of the content.
    pub stamp: [u8; 8],
    /// The reason why the backend can't use the adapter, if it can't.
    pub refused: Option<String>,
}

/// The reason why a backend does not have an adapter.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdapterError {
    /// The backend takes no adapters.
    #[error("LoRA is not enabled in the engine; start it with --enable-lora")]
    NotEnabled,
    /// The adapter is preloaded in other backends and can't be loaded here, or this backend accepts
    /// only its preloaded adapters.
    #[error("the adapter is available only where it is preloaded (chiasm agent --lora-modules)")]
    NotPreloaded,
    /// There is no adapter at the path, as the backend sees it.
    #[error("no adapter found at '{0}'")]
    NotFound(String),
    /// The backend can't use the adapter; the text is the backend's own.
    #[error("{0}")]
    Refused(String),
    /// The backend is gone or does not respond.
    #[error("the engine is gone: {0}")]
    Gone(DeathReason),
}
