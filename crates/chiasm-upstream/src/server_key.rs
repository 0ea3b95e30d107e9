//! The API key for a server, from a file that can be reloaded.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use reqwest::header::HeaderValue;

/// An error of a key file.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file can't be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is empty, or has more than a key.
    #[error("{0}: expected one line of printable characters")]
    NoKey(PathBuf),
}

/// An API key as a header value.
#[derive(Debug)]
pub struct UpstreamKey {
    path: PathBuf,
    header: RwLock<HeaderValue>,
}

impl UpstreamKey {
    /// Reads a key from a file.
    ///
    /// # Errors
    /// Returns [`KeyFileError`] if the file has no key.
    pub(crate) fn load(path: PathBuf) -> Result<Self, KeyFileError> {
        let header = RwLock::new(read(&path)?);
        Ok(Self { path, header })
    }

    /// Reads the file again. Later requests use the new key.
    ///
    /// # Errors
    /// Returns [`KeyFileError`] if the file has no key; the old key then stays in use.
    pub fn reload(&self) -> Result<(), KeyFileError> {
        let header = read(&self.path)?;
        *self.header.write().unwrap_or_else(PoisonError::into_inner) = header;
        Ok(())
    }

    /// Returns the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn header(&self) -> HeaderValue {
        self.header.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn read(path: &Path) -> Result<HeaderValue, KeyFileError> {
    let key = fs::read_to_string(path)
        .map_err(|source| KeyFileError::File { path: path.to_owned(), source })?;
    let no_key = || KeyFileError::NoKey(path.to_owned());
    let key = key.trim();
    // The file may be empty while another program rewrites it.
    if key.is_empty() {
        return Err(no_key());
    }
    let mut header = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| no_key())?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_reload_keeps_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(&path, "one\n").unwrap();
        let key = UpstreamKey::load(path.clone()).unwrap();
        fs::write(&path, "two").unwrap();
        key.reload().unwrap();
        assert_eq!(key.header(), "Bearer two");
        for text in ["th\nree", "", " \n"] {
            fs::write(&path, text).unwrap();
            assert!(matches!(key.reload(), Err(KeyFileError::NoKey(_))), "{text:?}");
        }
        fs::remove_file(&path).unwrap();
        assert!(matches!(key.reload(), Err(KeyFileError::File { .. })));
        assert_eq!(key.header(), "Bearer two");
    }
}
