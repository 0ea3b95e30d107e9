//! Knowledge of KV caches in files, which the next frontend process resumes from.
//!
//! An engine replays only its last batches of events, which cover minutes of decoding. A process
//! that shuts down in order therefore writes a file for each engine that keeps running. The file
//! has a snapshot of the engine's cache, and the position in the stream of events up to which the
//! snapshot is complete. The next process removes the file, and requests the batches after that
//! position from the engine. If the engine has another batch at that position, or none any more,
//! the snapshot is dropped. A process that crashes writes nothing.
//!
//! ```text
//! magic             16 bytes
//! digest            32 bytes, of the rest
//! identity          length u16, then text
//! seq               u64, of the last batch in the snapshot
//! digest            32 bytes, of that batch
//! history known     u8
//! snapshot          the rest
//! ```
//! [`identity`] contains everything that must match for the block keys to match. The snapshot has
//! the format of [`chiasm_kv::Snapshot`]. Numbers are little-endian.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use chiasm_backend::{KvEventStream, PlanClass};
use chiasm_kv::{BlockKey, MediaSpan, PromptBlocks, StreamPosition};
use chiasm_types::{MmHash, TokenId};

use crate::keys::keys_for;

/// The first bytes of a file, with the version of its format.
const MAGIC: &[u8; 16] = b"chiasm kv kept 1";
/// The maximum size of a file: a worker may claim to hold 16,777,216 blocks, which take about 25
/// bytes each.
const MAX_FILE_BYTES: u64 = 512 << 20;
/// The age at which an unused file is removed. Its engine has ended, or has another address.
const MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// The extension of the files' names.
const EXTENSION: &str = "kv";

/// A private folder with one file per engine.
#[derive(Clone, Debug)]
pub struct KeptIndexes {
    folder: PathBuf,
}

/// The saved knowledge of one engine's KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeptIndex {
    /// The position in the engine's stream of events up to which the snapshot is complete.
    pub(crate) position: StreamPosition,
    /// `true` if events had covered everything that the engine held.
    pub(crate) history_known: bool,
    /// The blocks that the engine held, in the format of [`chiasm_kv::Snapshot`].
    pub(crate) snapshot: Vec<u8>,
}

/// A reason to ignore a file.
#[derive(Debug, thiserror::Error)]
enum KeptError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the file has {0} bytes, more than {MAX_FILE_BYTES}")]
    TooLarge(u64),
    #[error("other users can access the file")]
    NotPrivate,
    #[error("the file is of another kind, or of another version of Chiasm")]
    OtherFormat,
    #[error("the file is damaged")]
    Damaged,
    #[error("the file is of another engine, model or secret of block keys")]
    OtherEngine,
}

impl KeptIndexes {
    /// Opens the folder, or creates it with mode 0700, and removes files older than a day.
    ///
    /// # Errors
    /// Returns an error if the folder can't be created, or if other users can access it.
    pub fn open(folder: impl Into<PathBuf>) -> io::Result<Self> {
        let folder = folder.into();
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let metadata = fs::metadata(&folder)?;
        if !metadata.is_dir() || !is_private(&metadata) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "other users can access the folder",
            ));
        }
        let kept = Self { folder };
        kept.remove_old_files();
        Ok(kept)
    }

    fn remove_old_files(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let is_old = entry
                .metadata()
                .and_then(|metadata| metadata.modified())
                .is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age > MAX_AGE));
            if is_old {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Returns the path of the file for the engine that publishes this stream.
    fn path(&self, stream: &KvEventStream) -> PathBuf {
        let mut name = blake3::Hasher::new();
        name.update(stream.endpoint.as_bytes()).update(&[0]).update(stream.topic.as_bytes());
        self.folder.join(name.finalize().to_hex().as_str()).with_extension(EXTENSION)
    }

    /// Reads and removes the file for an engine of this class. Logs a warning and returns `None` if
    /// the file can't be used.
    pub(crate) fn take(&self, stream: &KvEventStream, class: &PlanClass) -> Option<KeptIndex> {
        let path = self.path(stream);
        let read = read(&path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            // A file that can't be removed could be used twice.
            Err(error) => {
                tracing::warn!(
                    path = %path.display(), %error,
                    "ignoring the saved index of a KV cache: can't remove the file"
                );
                return None;
            }
            Ok(()) => {}
        }
        let kept = read.and_then(|bytes| decode(&bytes, &identity(stream, class)));
        let warn = |error: &KeptError| {
            tracing::warn!(
                path = %path.display(), %error,
                "ignoring the saved index of a KV cache"
            );
        };
        kept.inspect_err(warn).ok()
    }

    /// Writes the file for an engine of this class.
    ///
    /// # Errors
    /// Returns an error if the file can't be written, or is too large.
    pub(crate) fn save(
        &self,
        stream: &KvEventStream,
        class: &PlanClass,
        kept: &KeptIndex,
    ) -> io::Result<()> {
        let bytes = encode(kept, &identity(stream, class));
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("{} bytes are too many", bytes.len()),
            ));
        }
        let path = self.path(stream);
        let new = path.with_extension(format!("{}.new", std::process::id()));
        let written = write(&new, &bytes).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }
}

/// Returns a text that changes with everything that a snapshot's validity depends on.
///
/// It depends on the address of the engine's events and on the computation of block keys. The key
/// of a made-up prompt stands for the latter.
fn identity(stream: &KvEventStream, class: &PlanClass) -> String {
    let tokens: Vec<TokenId> = (0..class.block_size.get() as u32).map(TokenId).collect();
    let media = [MediaSpan { hash: MmHash::new([7; 32]), offset: 0, length: 1 }];
    let prompt = PromptBlocks { tokens: &tokens, media: &media, lora: None, salt: Some("kept") };
    let key = keys_for(class, &prompt).first().map_or(0, |key| BlockKey::get(*key));
    let KvEventStream { endpoint, topic, .. } = stream;
    format!("{endpoint} {topic:?} {} {:?} {key:032x}", class.block_size.get(), class.keys)
}

fn encode(kept: &KeptIndex, identity: &str) -> Vec<u8> {
    let KeptIndex { position: StreamPosition { seq, digest }, history_known, snapshot } = kept;
    let identity = &identity.as_bytes()[..identity.len().min(usize::from(u16::MAX))];
    let mut bytes = Vec::with_capacity(128 + identity.len() + snapshot.len());
    bytes.extend(MAGIC);
    bytes.extend([0; blake3::OUT_LEN]);
    bytes.extend((identity.len() as u16).to_le_bytes());
    bytes.extend(identity);
    bytes.extend(seq.to_le_bytes());
    bytes.extend(digest);
    bytes.push(u8::from(*history_known));
    bytes.extend(snapshot);
    let payload_start = MAGIC.len() + blake3::OUT_LEN;
    let payload_digest = blake3::hash(&bytes[payload_start..]);
    bytes[MAGIC.len()..payload_start].copy_from_slice(payload_digest.as_bytes());
    bytes
}

fn decode(bytes: &[u8], identity: &str) -> Result<KeptIndex, KeptError> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(KeptError::OtherFormat)?;
    let (payload_digest, rest) =
        rest.split_first_chunk::<{ blake3::OUT_LEN }>().ok_or(KeptError::Damaged)?;
    if blake3::hash(rest) != blake3::Hash::from_bytes(*payload_digest) {
        return Err(KeptError::Damaged);
    }
    let (length, rest) = rest.split_first_chunk().ok_or(KeptError::Damaged)?;
    let (file_identity, rest) =
        rest.split_at_checked(u16::from_le_bytes(*length).into()).ok_or(KeptError::Damaged)?;
    if file_identity != identity.as_bytes() {
        return Err(KeptError::OtherEngine);
    }
    let (seq, rest) = rest.split_first_chunk().ok_or(KeptError::Damaged)?;
    let (digest, rest) = rest.split_first_chunk().ok_or(KeptError::Damaged)?;
    let (history_known, snapshot) = rest.split_first().ok_or(KeptError::Damaged)?;
    Ok(KeptIndex {
        position: StreamPosition { seq: u64::from_le_bytes(*seq), digest: *digest },
        history_known: *history_known != 0,
        snapshot: snapshot.to_owned(),
    })
}

fn read(path: &Path) -> Result<Vec<u8>, KeptError> {
    // Links are not followed, and opening a pipe would block until its other end is open.
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(KeptError::NotPrivate);
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || !is_private(&metadata) {
        return Err(KeptError::NotPrivate);
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(KeptError::TooLarge(metadata.len()));
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(path);
    File::options().write(true).create_new(true).mode(0o600).open(path)?.write_all(bytes)
}

/// Returns `true` if this user owns the file or folder, and no other user can read or change it.
fn is_private(metadata: &Metadata) -> bool {
    metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o077 == 0
}

#[cfg(test)]
mod tests;
