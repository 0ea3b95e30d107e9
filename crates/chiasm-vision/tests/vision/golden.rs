//! Access to the golden files.

use std::path::PathBuf;

use serde::de::DeserializeOwned;

/// Returns the path of a file below `tests/goldens`.
pub(crate) fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

/// Reads the bytes of a golden.
///
/// # Panics
/// If the golden is missing.
pub(crate) fn bytes(name: &str) -> Vec<u8> {
    let path = path(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Parses a golden in JSON.
///
/// # Panics
/// If the golden is missing or invalid.
pub(crate) fn json<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_slice(&bytes(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}
