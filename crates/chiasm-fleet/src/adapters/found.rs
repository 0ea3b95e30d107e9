//! Inspection of an adapter's folder: its rank and the stamp of its content.

use std::fs::{self, Metadata};
use std::io::{ErrorKind, Read};
use std::num::NonZeroU32;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{AdapterSource, LoadError};

/// The adapter's configuration file, as PEFT writes it.
const CONFIG_FILE: &str = "adapter_config.json";
/// The maximum size of the configuration. It has about a dozen settings, and at most one pattern
/// per module.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The maximum number of folder entries that are inspected. An adapter has a handful.
const MAX_FILES: usize = 1024;

/// An adapter's files, as found in its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterFiles {
    /// The folder, absolute.
    pub path: String,
    /// The largest rank of the adapter's matrices; `None` if only engines can read the files.
    pub rank: Option<u64>,
    pub(super) stamp: [u8; 8],
}

/// The source of the stamp that distinguishes adapters' contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StampSource {
    /// The paths, sizes, inodes and change times of the files. Their content, possibly gigabytes,
    /// is not read. The stamp is meaningless on other machines.
    #[default]
    Metadata,
    /// The content of the files. The stamp is the same on every machine.
    Content,
}

/// The settings that are read from the configuration. The engine checks the others.
#[derive(Deserialize)]
struct Config {
    r: u64,
    #[serde(default)]
    rank_pattern: Option<std::collections::BTreeMap<String, u64>>,
}

impl AdapterFiles {
    /// Inspects an adapter's folder. If `allow_missing`, a folder that does not exist here is
    /// accepted unseen, because engines may run on another machine.
    ///
    /// # Errors
    /// Returns an error if the name, the path or the files are invalid.
    pub fn inspect(
        source: &AdapterSource,
        allow_missing: bool,
        stamp_source: StampSource,
    ) -> Result<Self, LoadError> {
        if source.name.is_empty() {
            return Err(LoadError::Empty("lora_name"));
        }
        if source.path.is_empty() {
            return Err(LoadError::Empty("lora_path"));
        }
        let given = Path::new(&source.path);
        let folder = std::path::absolute(given).map_err(|error| files_error(given, error))?;
        let path = folder.to_str().ok_or_else(|| files_error(&folder, "is not UTF-8"))?.to_owned();
        match fs::metadata(&folder) {
            Ok(_) => {
                let rank = Some(rank(&folder)?);
                Ok(Self { stamp: stamp(source, &folder, stamp_source)?, path, rank })
            }
            // An engine would interpret a relative path as the id of a model on the hub.
            Err(error)
                if error.kind() == ErrorKind::NotFound && allow_missing && given.is_absolute() =>
            {
                Ok(Self { stamp: rand::random(), path, rank: None })
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(LoadError::Engine(chiasm_backend::AdapterError::NotFound(source.path.clone())))
            }
            Err(error) => Err(files_error(&folder, error)),
        }
    }

    /// Returns the adapter's preferred id: the first 31 bits of its stamp, or 1 if they are zero.
    pub(super) fn id(&self) -> NonZeroU32 {
        let [first, second, third, fourth, ..] = self.stamp;
        nonzero_id(u32::from_be_bytes([first, second, third, fourth]) >> 1)
    }
}

/// Returns the id after `id`, wrapping to 1. Engines keep ids in 31 bits.
pub(super) fn next_id(id: NonZeroU32) -> NonZeroU32 {
    nonzero_id((id.get() + 1) & (u32::MAX >> 1))
}

fn nonzero_id(id: u32) -> NonZeroU32 {
    NonZeroU32::new(id).unwrap_or(NonZeroU32::MIN)
}

fn files_error(path: &Path, problem: impl ToString) -> LoadError {
    LoadError::Files { path: PathBuf::from(path), problem: problem.to_string() }
}

/// Reads the largest rank from the adapter's configuration.
fn rank(folder: &Path) -> Result<u64, LoadError> {
    let path = folder.join(CONFIG_FILE);
    let file = match open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(files_error(
                folder,
                format!("is not a LoRA adapter: {CONFIG_FILE} is missing"),
            ));
        }
        Err(error) => return Err(files_error(&path, error)),
    };
    let mut text = Vec::new();
    file.take(MAX_CONFIG_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|error| files_error(&path, error))?;
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(files_error(&path, "has more than a megabyte"));
    }
    let config: Config =
        serde_json::from_slice(&text).map_err(|error| files_error(&path, error))?;
    let patterns = config.rank_pattern.unwrap_or_default();
    Ok(patterns.into_values().fold(config.r, u64::max))
}

/// Opens a regular file. Does not block if the path is a pipe.
fn open(path: &Path) -> std::io::Result<fs::File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(std::io::Error::new(ErrorKind::InvalidInput, "is not a regular file"))
}

/// Hashes the adapter's name and the files in its folder.
fn stamp(
    source: &AdapterSource,
    folder: &Path,
    stamp_source: StampSource,
) -> Result<[u8; 8], LoadError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| files_error(folder, error))?.take(MAX_FILES) {
        let entry = entry.map_err(|error| files_error(folder, error))?;
        // `fs::metadata` follows links, which the cache of the hub is made of.
        let metadata =
            fs::metadata(entry.path()).map_err(|error| files_error(&entry.path(), error))?;
        if metadata.is_file() {
            files.push((entry.file_name(), metadata));
        }
    }
    files.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut hasher = blake3::Hasher::new();
    put(&mut hasher, source.name.as_bytes());
    if stamp_source == StampSource::Metadata {
        put(&mut hasher, folder.as_os_str().as_encoded_bytes());
    }
    for (name, metadata) in &files {
        put(&mut hasher, name.as_encoded_bytes());
        match stamp_source {
            StampSource::Metadata => put(&mut hasher, &version(metadata)),
            StampSource::Content => put(&mut hasher, content_hash(&folder.join(name))?.as_bytes()),
        }
    }
    let mut stamp = [0; 8];
    stamp.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    Ok(stamp)
}

/// Hashes `bytes` with their length, so that concatenations differ.
fn put(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// Returns the hash of a file's content.
fn content_hash(path: &Path) -> Result<blake3::Hash, LoadError> {
    let mut hasher = blake3::Hasher::new();
    let read = open(path).and_then(|file| hasher.update_reader(file).map(drop));
    read.map_err(|error| files_error(path, error))?;
    Ok(hasher.finalize())
}

/// Returns the size, identity and change time of a file. Programs can't set the change time.
fn version(metadata: &Metadata) -> [u8; 40] {
    let numbers = [
        metadata.dev(),
        metadata.ino(),
        metadata.size(),
        metadata.ctime().cast_unsigned(),
        metadata.ctime_nsec().cast_unsigned(),
    ];
    let mut version = [0; 40];
    for (place, number) in version.chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    version
}
