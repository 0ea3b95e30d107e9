//! The key that is sent to a server, read from a file that can be reloaded.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use reqwest::header::HeaderValue;

/// An error of a key's file.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file can't be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is empty, or has more than a key.
    #[error("{0}: a key is a line of printable characters")]
    NoKey(PathBuf),
}

/// A key, as the value of its header.
#[derive(Debug)]
pub struct UpstreamKey {
    path: PathBuf,
    header: RwLock<HeaderValue>,
}

impl UpstreamKey {
    /// Reads a key from a file.
    ///
    /// # Errors
    /// [`KeyFileError`] if the file has no key.
    pub(crate) fn load(path: PathBuf) -> Result<Self, KeyFileError> {
        let header = RwLock::new(read(&path)?);
        Ok(Self { path, header })
    }

    /// Reads the file again. Later requests have the new key.
    ///
    /// # Errors
    /// [`KeyFileError`] if the file has no key. The old key stays then.
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
    // A file is empty while another program writes it anew.
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
    fn reload_that_fails_keeps_the_key() {
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
