//! What lies in an adapter's folder.

use std::fs::{self, Metadata};
use std::io::{ErrorKind, Read};
use std::num::NonZeroU32;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{AdapterSource, LoadError};

/// The file that says what an adapter is, as PEFT writes it.
const CONFIG: &str = "adapter_config.json";
/// It has some dozen settings, and a pattern for each module at most.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Files in a folder that are looked at. An adapter has a handful.
const MAX_FILES: usize = 1024;

/// An adapter as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterFiles {
    /// The folder, absolute.
    pub path: String,
    /// The largest rank of its matrices; `None` if it lies where only engines see it.
    pub rank: Option<u64>,
    pub(super) stamp: [u8; 8],
}

/// What tells an adapter's content from another's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stamps {
    /// Where its files lie and when they have last changed: nothing is read, as there may be
    /// gigabytes. Says nothing on another machine.
    #[default]
    Place,
    /// The bytes of its files: the same on every machine.
    Content,
}

/// What an adapter is. The rest is the engine's to judge.
#[derive(Deserialize)]
struct Config {
    r: u64,
    #[serde(default)]
    rank_pattern: Option<std::collections::BTreeMap<String, u64>>,
}

impl AdapterFiles {
    /// Looks at an adapter's folder. One that is not on this machine is taken as it is where
    /// `elsewhere` allows, as engines may run on another one.
    ///
    /// # Errors
    /// [`LoadError`] says what is wrong with name, path or files.
    pub fn look(
        source: &AdapterSource,
        elsewhere: bool,
        stamps: Stamps,
    ) -> Result<Self, LoadError> {
        if source.name.is_empty() {
            return Err(LoadError::Empty("lora_name"));
        }
        if source.path.is_empty() {
            return Err(LoadError::Empty("lora_path"));
        }
        let given = Path::new(&source.path);
        let folder = std::path::absolute(given).map_err(|error| fault(given, error))?;
        let path = folder.to_str().ok_or_else(|| fault(&folder, "is not UTF-8"))?.to_owned();
        match fs::metadata(&folder) {
            Ok(_) => {
                let rank = Some(rank(&folder)?);
                Ok(Self { stamp: stamp(source, &folder, stamps)?, path, rank })
            }
            // An engine would take a path that is not absolute for the id of a model on the hub.
            Err(error)
                if error.kind() == ErrorKind::NotFound && elsewhere && given.is_absolute() =>
            {
                Ok(Self { stamp: rand::random(), path, rank: None })
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(LoadError::Engine(chiasm_backend::AdapterError::NotFound(source.path.clone())))
            }
            Err(error) => Err(fault(&folder, error)),
        }
    }

    /// The id that follows from it.
    pub(super) fn id(&self) -> NonZeroU32 {
        let [first, second, third, fourth, ..] = self.stamp;
        following_or(u32::from_be_bytes([first, second, third, fourth]) >> 1)
    }
}

/// The id after this one. Engines keep ids in 31 bits.
pub(super) fn following(id: NonZeroU32) -> NonZeroU32 {
    following_or((id.get() + 1) & (u32::MAX >> 1))
}

fn following_or(id: u32) -> NonZeroU32 {
    NonZeroU32::new(id).unwrap_or(NonZeroU32::MIN)
}

fn fault(path: &Path, problem: impl ToString) -> LoadError {
    LoadError::Files { path: PathBuf::from(path), problem: problem.to_string() }
}

/// The largest rank that the adapter's configuration tells.
fn rank(folder: &Path) -> Result<u64, LoadError> {
    let path = folder.join(CONFIG);
    let file = match open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(fault(folder, format!("is no LoRA adapter: it has no {CONFIG}")));
        }
        Err(error) => return Err(fault(&path, error)),
    };
    let mut text = Vec::new();
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut text).map_err(|error| fault(&path, error))?;
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(fault(&path, "has more than a megabyte"));
    }
    let config: Config = serde_json::from_slice(&text).map_err(|error| fault(&path, error))?;
    let patterns = config.rank_pattern.unwrap_or_default();
    Ok(patterns.into_values().fold(config.r, u64::max))
}

/// Opens a regular file. A pipe in its place does not block.
fn open(path: &Path) -> std::io::Result<fs::File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(std::io::Error::new(ErrorKind::InvalidInput, "is not a regular file"))
}

/// A digest of what the folder holds.
fn stamp(source: &AdapterSource, folder: &Path, stamps: Stamps) -> Result<[u8; 8], LoadError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| fault(folder, error))?.take(MAX_FILES) {
        let entry = entry.map_err(|error| fault(folder, error))?;
        // `fs::metadata` follows links, which the cache of the hub is made of.
        let metadata = fs::metadata(entry.path()).map_err(|error| fault(&entry.path(), error))?;
        if metadata.is_file() {
            files.push((entry.file_name(), metadata));
        }
    }
    files.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut hasher = blake3::Hasher::new();
    put(&mut hasher, source.name.as_bytes());
    if stamps == Stamps::Place {
        put(&mut hasher, folder.as_os_str().as_encoded_bytes());
    }
    for (name, metadata) in &files {
        put(&mut hasher, name.as_encoded_bytes());
        match stamps {
            Stamps::Place => put(&mut hasher, &version(metadata)),
            Stamps::Content => put(&mut hasher, content(&folder.join(name))?.as_bytes()),
        }
    }
    let mut stamp = [0; 8];
    stamp.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    Ok(stamp)
}

fn put(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// The hash of all of a file.
fn content(path: &Path) -> Result<blake3::Hash, LoadError> {
    let mut hasher = blake3::Hasher::new();
    let read = open(path).and_then(|file| hasher.update_reader(file).map(drop));
    read.map_err(|error| fault(path, error))?;
    Ok(hasher.finalize())
}

/// Size and identity of a file, and the moment of its last change, which nobody can set.
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
