//! What of a file is there so far, and its hash.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use ring::digest::{Context, Digest, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use tokio::sync::mpsc;

use crate::HubError;

/// Bytes that are read at once from what is there.
const READ: usize = 1 << 20;

/// What a file's hash has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// Of its bytes.
    Sha256(String),
    /// Of `blob LENGTH\0` and its bytes, as git has it.
    GitSha1(String),
    /// The hub says none: only the size is checked.
    Nothing,
}

impl Expected {
    fn start(&self, size: u64) -> Option<Context> {
        match self {
            Self::Sha256(_) => Some(Context::new(&SHA256)),
            Self::GitSha1(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                Some(context)
            }
            Self::Nothing => None,
        }
    }
}

/// A file that is being downloaded, `ETAG.incomplete`. All that it does takes time: call it on
/// threads for that.
pub(crate) struct Partial {
    path: PathBuf,
    file: File,
    length: u64,
    size: u64,
    expected: Expected,
    hash: Option<Context>,
    /// Held for as long as anybody may write.
    _lock: File,
}

impl Partial {
    /// Opens what an earlier try has left, or begins. `lock` has to be held by this process.
    pub(crate) fn open(
        blob: &Path,
        size: u64,
        expected: Expected,
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
            partial.begin_again()?
        } else {
            partial.hash_what_is_there()?
        }
        Ok(partial)
    }

    /// Bytes that are there.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Forgets what is there.
    pub(crate) fn begin_again(&mut self) -> Result<(), HubError> {
        self.hash = self.expected.start(self.size);
        self.length = 0;
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map(|_| ()).map_err(|error| HubError::file(&self.path, error))
    }

    fn hash_what_is_there(&mut self) -> Result<(), HubError> {
        let mut buffer = vec![0; READ.min(self.length as usize)];
        let mut left = self.length;
        while left > 0 {
            let part = buffer.len().min(left as usize);
            self.file
                .read_exact(&mut buffer[..part])
                .map_err(|error| HubError::file(&self.path, error))?;
            if let Some(hash) = &mut self.hash {
                hash.update(&buffer[..part]);
            }
            left -= part as u64;
        }
        Ok(())
    }

    /// Appends what comes until the other end is dropped, and gives the file back.
    pub(crate) fn append(mut self, mut parts: mpsc::Receiver<Bytes>) -> Result<Self, HubError> {
        while let Some(part) = parts.blocking_recv() {
            self.file.write_all(&part).map_err(|error| HubError::file(&self.path, error))?;
            if let Some(hash) = &mut self.hash {
                hash.update(&part);
            }
            self.length += part.len() as u64;
        }
        Ok(self)
    }

    /// Makes it the blob; it should be verified.
    pub(crate) fn publish(self, blob: &Path) -> Result<(), HubError> {
        let renamed = self.file.sync_data().and_then(|()| fs::rename(&self.path, blob));
        renamed.map_err(|error| HubError::file(&self.path, error))
    }

    /// Removes it, as what is there is worth nothing.
    pub(crate) fn remove(self) -> Result<(), HubError> {
        fs::remove_file(&self.path).map_err(|error| HubError::file(&self.path, error))
    }

    /// Whether it is the whole file that it has to be.
    ///
    /// # Errors
    /// [`HubError::Corrupt`] names the file by what it is called here.
    pub(crate) fn verify(&self, file: &str) -> Result<(), HubError> {
        let corrupt = |what, expected: &str, got| HubError::Corrupt {
            file: file.to_owned(),
            what,
            expected: expected.to_owned(),
            got,
        };
        if self.length != self.size {
            return Err(corrupt("size", &self.size.to_string(), self.length.to_string()));
        }
        let (Expected::Sha256(expected) | Expected::GitSha1(expected)) = &self.expected else {
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

    /// What `git hash-object` and `sha256sum` say of "hello\n".
    const HASHES: [fn() -> Expected; 2] = [
        || Expected::GitSha1("ce013625030ba8dba906f756967f9e9ca394464a".to_owned()),
        || {
            Expected::Sha256(
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
    fn a_file_is_verified_over_several_tries() {
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
    fn what_is_wrong_is_not_taken() {
        for expected in HASHES {
            let folder = tempfile::tempdir().unwrap();
            let blob = folder.path().join("e");
            for (bytes, what) in [(&b"hullo\n"[..], "hash"), (&b"hello"[..], "size")] {
                let partial = append(Partial::open(&blob, 6, expected(), lock()).unwrap(), bytes);
                let error = partial.verify("f").unwrap_err();
                assert!(
                    matches!(error, HubError::Corrupt { what: wrong, .. } if wrong == what),
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
