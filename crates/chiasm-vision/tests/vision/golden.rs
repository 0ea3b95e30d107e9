//! The goldens' files.

use std::path::PathBuf;

use serde::de::DeserializeOwned;

/// A file below `tests/goldens`.
pub(crate) fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

/// A golden's bytes. A missing golden fails the test.
pub(crate) fn bytes(name: &str) -> Vec<u8> {
    let path = path(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A golden in JSON.
pub(crate) fn json<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_slice(&bytes(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}
