//! Reads workers from the files of a folder (`DYN_DISCOVERY_BACKEND=file`, `DYN_FILE_KV`).
//!
//! A key such as `v1/mdc/NAMESPACE/…` is the file `v1/mdc/NAMESPACE%2F…`, whose name has everything
//! but ASCII letters and digits percent-encoded. A worker touches its files every few seconds. A
//! file that was not touched for ten seconds belongs to a dead worker, although it stays in the
//! folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use percent_encoding::percent_decode_str;

/// The interval between two scans of the folder.
pub(crate) const SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// The time for which a file is valid after it was touched, which is Dynamo's own limit. The clocks
/// of machines that share a folder must differ by less.
const FILE_TTL: Duration = Duration::from_secs(10);
/// The maximum number of files of one kind.
const MAX_FILES: usize = chiasm_discovery::MAX_ADDRESSES;
/// The maximum size of a file.
const MAX_VALUE_BYTES: u64 = 1 << 20;

/// Keys and their values.
type KeyValues = BTreeMap<String, Arc<[u8]>>;

/// Reads the keys with each of these prefixes, `v1/KIND/…`. The folder of a kind may be missing.
///
/// # Errors
/// Returns the error of reading a folder or a file that exists.
pub(crate) fn read<const N: usize>(
    folder: &Path,
    prefixes: [String; N],
    now: SystemTime,
) -> io::Result<[KeyValues; N]> {
    let mut all = [const { KeyValues::new() }; N];
    for (keys, prefix) in all.iter_mut().zip(&prefixes) {
        *keys = read_kind(folder, prefix, now)?;
    }
    Ok(all)
}

fn read_kind(folder: &Path, prefix: &str, now: SystemTime) -> io::Result<KeyValues> {
    let mut keys = KeyValues::new();
    // The first two parts of a key are folders, the rest is the name of a file.
    let Some((kind, _)) = prefix.match_indices('/').nth(1).map(|(at, _)| prefix.split_at(at))
    else {
        return Ok(keys);
    };
    let files = match fs::read_dir(folder.join(kind)) {
        Ok(files) => files,
        Err(error) if error.kind() == io::ErrorKind::NotFound && folder.is_dir() => {
            return Ok(keys);
        }
        Err(error) => return Err(error),
    };
    for file in files {
        let file = file?;
        let name = file.file_name();
        let Some(name) = name.to_str().and_then(|name| percent_decode_str(name).decode_utf8().ok())
        else {
            continue;
        };
        let key = format!("{kind}/{name}");
        if !key.starts_with(prefix) || keys.len() == MAX_FILES {
            continue;
        }
        if let Some(value) = value(&file.path(), now)? {
            keys.insert(key, value);
        }
    }
    Ok(keys)
}

/// Returns the content of a valid file; `None` for one that is gone, was not touched lately, or is
/// too large.
fn value(path: &PathBuf, now: SystemTime) -> io::Result<Option<Arc<[u8]>>> {
    let none_if_missing = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(None),
        _ => Err(error),
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => return none_if_missing(error),
    };
    let metadata = file.metadata()?;
    // A time in the future comes from a clock that is ahead.
    let is_old = now.duration_since(metadata.modified()?).is_ok_and(|since| since > FILE_TTL);
    if !metadata.is_file() || is_old || metadata.len() > MAX_VALUE_BYTES {
        return Ok(None);
    }
    let mut content = Vec::new();
    file.take(MAX_VALUE_BYTES).read_to_end(&mut content)?;
    Ok(Some(content.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a folder with this file.
    fn folder(kind: &str, name: &str, content: &[u8]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let kind_folder = folder.path().join("v1").join(kind);
        fs::create_dir_all(&kind_folder).unwrap();
        fs::write(kind_folder.join(name), content).unwrap();
        folder
    }

    fn keys(folder: &Path, prefix: &str, now: SystemTime) -> Vec<String> {
        let [keys] = read(folder, [prefix.to_owned()], now).unwrap();
        keys.into_keys().collect()
    }

    #[test]
    fn file_name_is_the_key_of_its_content() {
        let folder = folder("instances", "ns%2Fbackend%2Fworker%5Fkv%2D1%2F304b", b"{}");
        let now = SystemTime::now();
        let [found] = read(folder.path(), ["v1/instances/ns/".to_owned()], now).unwrap();
        let expected =
            ("v1/instances/ns/backend/worker_kv-1/304b".to_owned(), Arc::from(&b"{}"[..]));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [expected]);
        assert!(keys(folder.path(), "v1/instances/n/", now).is_empty());
        assert!(keys(folder.path(), "v1/mdc/ns/", now).is_empty());
    }

    #[test]
    fn untouched_file_expires() {
        let folder = folder("mdc", "ns%2Fa", b"x");
        let now = SystemTime::now();
        assert_eq!(keys(folder.path(), "v1/mdc/ns/", now + Duration::from_secs(9)).len(), 1);
        assert!(keys(folder.path(), "v1/mdc/ns/", now + Duration::from_secs(12)).is_empty());
        assert_eq!(keys(folder.path(), "v1/mdc/ns/", now - Duration::from_secs(60)).len(), 1);
    }

    #[test]
    fn invalid_files_are_skipped_but_missing_folder_fails() {
        let large = folder("mdc", "ns%2Fa", &vec![0; MAX_VALUE_BYTES as usize + 1]);
        let now = SystemTime::now();
        assert!(keys(large.path(), "v1/mdc/ns/", now).is_empty());
        let not_utf8 = folder("mdc", "ns%2F%ff", b"x");
        assert!(keys(not_utf8.path(), "v1/mdc/ns/", now).is_empty());
        let gone = large.path().to_owned();
        drop(large);
        assert!(read(&gone, ["v1/mdc/ns/".to_owned()], now).is_err());
    }
}
