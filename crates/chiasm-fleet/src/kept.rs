//! Knowledge of KV caches that outlives this process: files that the next frontend goes on from.
//!
//! An engine replays only its last batches of events, which cover minutes of decoding. So a process
//! that shuts down in order writes a file for each engine that keeps running: what it knows of the
//! engine's cache, and the position in the stream of events up to which that is complete. The next
//! process removes the file, and asks the engine for the batches after that position. If the engine
//! has another batch at that position, or none any more, the file's content is dropped. A process
//! that crashes writes nothing.
//!
//! ```text
//! file  magic: 16 bytes  digest of the rest: 32  about: length u16, text  seq: u64  digest of that batch: 32  history known: u8  snapshot
//! ```
//! `about` has everything that must match for the block keys to match: [`about`]. The snapshot has
//! the format of [`chiasm_kv::Snapshot`].

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
const MAX_BYTES: u64 = 512 << 20;
/// The age at which an unused file is removed: its engine has ended, or has another address.
const MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// The ending of the files' names.
const SUFFIX: &str = "kv";

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
    /// Events had told of everything that the engine held.
    pub(crate) history_known: bool,
    /// The blocks that the engine held, as `chiasm-kv` writes them.
    pub(crate) snapshot: Vec<u8>,
}

/// The reason for which a file can't be used.
#[derive(Debug, thiserror::Error)]
enum KeptError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it has {0} bytes, more than the {MAX_BYTES} that are read")]
    TooLarge(u64),
    #[error("it is no file of this user's alone")]
    NotPrivate,
    #[error("it is none of these files, or of another version of Chiasm")]
    OtherForm,
    #[error("it is damaged")]
    Damaged,
    #[error("it is about another engine, model or secret of block keys")]
    OtherEngine,
}

impl KeptIndexes {
    /// Opens the folder, or makes it with mode 0700, and removes files that are too old.
    ///
    /// # Errors
    /// The folder can't be made, or it is not this user's alone.
    pub fn open(folder: impl Into<PathBuf>) -> io::Result<Self> {
        let folder = folder.into();
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let about = fs::metadata(&folder)?;
        if !about.is_dir() || !is_private(&about) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "it must be a folder of this user's alone",
            ));
        }
        let kept = Self { folder };
        kept.sweep();
        Ok(kept)
    }

    fn sweep(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let is_old = entry
                .metadata()
                .and_then(|about| about.modified())
                .is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age > MAX_AGE));
            if is_old {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Returns the path of the file about the engine that publishes this stream.
    fn path(&self, stream: &KvEventStream) -> PathBuf {
        let mut name = blake3::Hasher::new();
        name.update(stream.endpoint.as_bytes()).update(&[0]).update(stream.topic.as_bytes());
        self.folder.join(name.finalize().to_hex().as_str()).with_extension(SUFFIX)
    }

    /// Reads and removes the file about an engine of this class. A file that can't be used is
    /// removed with a warning.
    pub(crate) fn take(&self, stream: &KvEventStream, class: &PlanClass) -> Option<KeptIndex> {
        let path = self.path(stream);
        let read = read(&path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            // A file that stays could be used twice.
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "what was known of an engine's KV cache can't be taken");
                return None;
            }
            Ok(()) => {}
        }
        let kept = read.and_then(|bytes| decode(&bytes, &about(stream, class)));
        let warn = |error: &KeptError| {
            tracing::warn!(path = %path.display(), %error, "what was known of an engine's KV cache is ignored");
        };
        kept.inspect_err(warn).ok()
    }

    /// Writes the file about an engine of this class.
    ///
    /// # Errors
    /// The file can't be written, or is too large.
    pub(crate) fn leave(
        &self,
        stream: &KvEventStream,
        class: &PlanClass,
        kept: &KeptIndex,
    ) -> io::Result<()> {
        let bytes = encode(kept, &about(stream, class));
        if bytes.len() as u64 > MAX_BYTES {
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

/// Returns everything that must match for a file to be true of an engine: the address of its
/// events, and the way in which its blocks get their keys, which the key of a made-up prompt shows.
fn about(stream: &KvEventStream, class: &PlanClass) -> String {
    let tokens: Vec<TokenId> = (0..class.block_size.get() as u32).map(TokenId).collect();
    let media = [MediaSpan { hash: MmHash::new([7; 32]), offset: 0, length: 1 }];
    let prompt = PromptBlocks { tokens: &tokens, media: &media, lora: None, salt: Some("kept") };
    let key = keys_for(class, &prompt).first().map_or(0, |key| BlockKey::get(*key));
    let KvEventStream { endpoint, topic, .. } = stream;
    format!("{endpoint} {topic:?} {} {:?} {key:032x}", class.block_size.get(), class.keys)
}

fn encode(kept: &KeptIndex, about: &str) -> Vec<u8> {
    let KeptIndex { position: StreamPosition { seq, digest }, history_known, snapshot } = kept;
    let about = &about.as_bytes()[..about.len().min(usize::from(u16::MAX))];
    let mut bytes = Vec::with_capacity(128 + about.len() + snapshot.len());
    bytes.extend(MAGIC);
    bytes.extend([0; blake3::OUT_LEN]);
    bytes.extend((about.len() as u16).to_le_bytes());
    bytes.extend(about);
    bytes.extend(seq.to_le_bytes());
    bytes.extend(digest);
    bytes.push(u8::from(*history_known));
    bytes.extend(snapshot);
    let rest = MAGIC.len() + blake3::OUT_LEN;
    let all = blake3::hash(&bytes[rest..]);
    bytes[MAGIC.len()..rest].copy_from_slice(all.as_bytes());
    bytes
}

fn decode(bytes: &[u8], about: &str) -> Result<KeptIndex, KeptError> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(KeptError::OtherForm)?;
    let (all, rest) = rest.split_first_chunk::<{ blake3::OUT_LEN }>().ok_or(KeptError::Damaged)?;
    if blake3::hash(rest) != blake3::Hash::from_bytes(*all) {
        return Err(KeptError::Damaged);
    }
    let (length, rest) = rest.split_first_chunk().ok_or(KeptError::Damaged)?;
    let (told, rest) =
        rest.split_at_checked(u16::from_le_bytes(*length).into()).ok_or(KeptError::Damaged)?;
    if told != about.as_bytes() {
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
    // A link leads elsewhere; opening a pipe would wait for its other end.
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(KeptError::NotPrivate);
    }
    let file = File::open(path)?;
    let about = file.metadata()?;
    if !about.is_file() || !is_private(&about) {
        return Err(KeptError::NotPrivate);
    }
    if about.len() > MAX_BYTES {
        return Err(KeptError::TooLarge(about.len()));
    }
    let mut bytes = Vec::with_capacity(about.len() as usize);
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(path);
    File::options().write(true).create_new(true).mode(0o600).open(path)?.write_all(bytes)
}

/// Returns `true` if this user owns the file or folder, and no other user can read or change it.
fn is_private(about: &Metadata) -> bool {
    about.uid() == rustix::process::geteuid().as_raw() && about.mode() & 0o077 == 0
}

#[cfg(test)]
mod tests;
