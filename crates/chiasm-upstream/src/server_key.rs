//! The key that a server of others is shown, out of a file that may be read again.

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
    /// The file has more than a key.
    #[error("{0}: a key is a line of printable characters")]
    NoKey(PathBuf),
}

/// A key, as the header that shows it.
#[derive(Debug)]
pub struct UpstreamKey {
    path: PathBuf,
    header: RwLock<HeaderValue>,
}

impl UpstreamKey {
    /// Reads a key out of a file.
    ///
    /// # Errors
    /// [`KeyFileError`] if it has none.
    pub(crate) fn load(path: PathBuf) -> Result<Self, KeyFileError> {
        let header = RwLock::new(read(&path)?);
        Ok(Self { path, header })
    }

    /// Reads the file again: requests from now on have what it has.
    ///
    /// # Errors
    /// [`KeyFileError`] if it has none. The key from before stays.
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
    let key = fs::read_to_string(path).map_err(|source| KeyFileError::File { path: path.to_owned(), source })?;
    let header = HeaderValue::from_str(&format!("Bearer {}", key.trim()));
    let mut header = header.map_err(|_| KeyFileError::NoKey(path.to_owned()))?;
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
        fs::write(&path, "th\nree").unwrap();
        assert!(matches!(key.reload(), Err(KeyFileError::NoKey(_))));
        fs::remove_file(&path).unwrap();
        assert!(matches!(key.reload(), Err(KeyFileError::File { .. })));
        assert_eq!(key.header(), "Bearer two");
    }
}
