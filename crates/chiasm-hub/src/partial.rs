//! A partly downloaded file and the hash of its bytes.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use ring::digest::{Context, Digest, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use tokio::sync::mpsc;

use crate::HubError;

/// The buffer size for hashing the bytes of an earlier download.
const READ_BYTES: usize = 1 << 20;

/// The hash that a file must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedHash {
    /// The SHA-256 of the file's bytes.
    Sha256(String),
    /// The SHA-1 of the git object: of `blob LENGTH\0` and the file's bytes.
    GitSha1(String),
    /// The hub sends no hash, so only the size is checked.
    Unknown,
}

impl ExpectedHash {
    /// Begins to hash a file of `size` bytes.
    fn start(&self, size: u64) -> Option<Context> {
        match self {
            Self::Sha256(_) => Some(Context::new(&SHA256)),
            Self::GitSha1(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                Some(context)
            }
            Self::Unknown => None,
        }
    }
}

/// A file that is being downloaded, `ETAG.incomplete`. All methods except [`Self::length`] block.
pub(crate) struct Partial {
    path: PathBuf,
    file: File,
    length: u64,
    size: u64,
    expected: ExpectedHash,
    hash: Option<Context>,
    /// The lock of the blob, held while the file may be written to.
    _lock: File,
}

impl Partial {
    /// Opens the file of an earlier download and hashes its bytes, or creates an empty file. This
    /// process must hold `lock`.
    pub(crate) fn open(
        blob: &Path,
        size: u64,
        expected: ExpectedHash,
        lock: File,
    ) -> Result<Self, HubError> {
        let mut name = blob.as_os_str().to_owned();
        name.push(".incomplete");
        let path = PathBuf::from(name);
        let opened = || {
            let file =
                File::options().create(true).truncate(false).read(true).write(true).open(&path)?;
            let length = file.metadata()?.len();
            io::Result::Ok((file, length))
        };
        let (file, length) = opened().map_err(|error| HubError::file(&path, error))?;
        let hash = expected.start(size);
        let mut partial = Self { path, file, length, size, expected, hash, _lock: lock };
        if length > size {
            partial.restart()?
        } else {
            partial.hash_existing()?
        }
        Ok(partial)
    }

    /// Returns the number of bytes so far.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Truncates the file to begin again.
    pub(crate) fn restart(&mut self) -> Result<(), HubError> {
        self.hash = self.expected.start(self.size);
        self.length = 0;
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map(|_| ()).map_err(|error| HubError::file(&self.path, error))
    }

    fn hash_existing(&mut self) -> Result<(), HubError> {
        let mut buffer = vec![0; READ_BYTES.min(self.length as usize)];
        let mut left = self.length;
        while left > 0 {
            let count = buffer.len().min(left as usize);
            self.file
                .read_exact(&mut buffer[..count])
                .map_err(|error| HubError::file(&self.path, error))?;
            if let Some(hash) = &mut self.hash {
                hash.update(&buffer[..count]);
            }
            left -= count as u64;
        }
        Ok(())
    }

    /// Appends chunks until the sender is dropped.
    pub(crate) fn append(mut self, mut chunks: mpsc::Receiver<Bytes>) -> Result<Self, HubError> {
        while let Some(chunk) = chunks.blocking_recv() {
            self.file.write_all(&chunk).map_err(|error| HubError::file(&self.path, error))?;
            if let Some(hash) = &mut self.hash {
                hash.update(&chunk);
            }
            self.length += chunk.len() as u64;
        }
        Ok(self)
    }

    /// Renames the file to the blob's path. The caller has to verify the file first.
    pub(crate) fn publish(self, blob: &Path) -> Result<(), HubError> {
        let renamed = self.file.sync_data().and_then(|()| fs::rename(&self.path, blob));
        renamed.map_err(|error| HubError::file(&self.path, error))
    }

    /// Deletes the file.
    pub(crate) fn remove(self) -> Result<(), HubError> {
        fs::remove_file(&self.path).map_err(|error| HubError::file(&self.path, error))
    }

    /// Checks the file's size and hash. `file` is the path for the error.
    ///
    /// # Errors
    /// [`HubError::Corrupt`] if either differs.
    pub(crate) fn verify(&self, file: &str) -> Result<(), HubError> {
        let corrupt = |property, expected: &str, got| HubError::Corrupt {
            file: file.to_owned(),
            property,
            expected: expected.to_owned(),
            got,
        };
        if self.length != self.size {
            return Err(corrupt("size", &self.size.to_string(), self.length.to_string()));
        }
        let (ExpectedHash::Sha256(expected) | ExpectedHash::GitSha1(expected)) = &self.expected
        else {
            return Ok(());
        };
        let got = self.hash.clone().map(|hash| hex(&hash.finish())).unwrap_or_default();
        if got == *expected { Ok(()) } else { Err(corrupt("hash", expected, got)) }
    }
}

fn hex(digest: &Digest) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock() -> File {
        tempfile::tempfile().unwrap()
    }

    /// The output of `git hash-object` and `sha256sum` for "hello\n".
    const HASHES: [fn() -> ExpectedHash; 2] = [
        || ExpectedHash::GitSha1("ce013625030ba8dba906f756967f9e9ca394464a".to_owned()),
        || {
            ExpectedHash::Sha256(
                "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03".to_owned(),
            )
        },
    ];

    fn append(partial: Partial, bytes: &'static [u8]) -> Partial {
        let (sender, receiver) = mpsc::channel(1);
        sender.try_send(Bytes::from_static(bytes)).unwrap();
        drop(sender);
        partial.append(receiver).unwrap()
    }

    #[test]
    fn resumed_file_is_verified_whole() {
        for expected in HASHES {
            let folder = tempfile::tempdir().unwrap();
            let blob = folder.path().join("e");
            drop(append(Partial::open(&blob, 6, expected(), lock()).unwrap(), b"hel"));
            let partial = Partial::open(&blob, 6, expected(), lock()).unwrap();
            assert_eq!(partial.length(), 3);
            let partial = append(partial, b"lo\n");
            partial.verify("f").unwrap();
            partial.publish(&blob).unwrap();
            assert_eq!(fs::read(&blob).unwrap(), b"hello\n");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        }
    }

    #[test]
    fn wrong_size_or_hash_is_refused() {
        for expected in HASHES {
            let folder = tempfile::tempdir().unwrap();
            let blob = folder.path().join("e");
            for (bytes, property) in [(&b"hullo\n"[..], "hash"), (&b"hello"[..], "size")] {
                let partial = append(Partial::open(&blob, 6, expected(), lock()).unwrap(), bytes);
                let error = partial.verify("f").unwrap_err();
                assert!(
                    matches!(error, HubError::Corrupt { property: wrong, .. } if wrong == property),
                    "{error}"
                );
                partial.remove().unwrap();
                assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
            }
            fs::write(folder.path().join("e.incomplete"), "longer than it can be").unwrap();
            assert_eq!(Partial::open(&blob, 6, expected(), lock()).unwrap().length(), 0);
        }
    }
}
