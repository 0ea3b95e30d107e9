//! Workers that are named by the files of a folder (`DYN_DISCOVERY_BACKEND=file`, `DYN_FILE_KV`).
//!
//! A key such as `v1/mdc/NAMESPACE/…` is the file `v1/mdc/NAMESPACE%2F…`, whose name has all but
//! ASCII letters and digits percent-encoded. Its worker touches it every few seconds; one that was
//! not touched for ten is of a worker that is gone, though it stays in the folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use percent_encoding::percent_decode_str;

/// How often the folder is looked at.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A file counts for so long after it was touched, which is Dynamo's own limit. Clocks of machines
/// that share a folder must differ by less.
const LASTS: Duration = Duration::from_secs(10);
/// Most files of a kind that are read.
const MOST_FILES: usize = chiasm_discovery::MOST_ADDRESSES;
/// Most bytes of a file that is read.
const LONGEST_VALUE: u64 = 1 << 20;

/// Keys and their values.
type Told = BTreeMap<String, Arc<[u8]>>;

/// What the files of a folder say that begin with each of these prefixes, `v1/KIND/…`. A folder of
/// a kind that is not there yet has none.
///
/// # Errors
/// A folder that is there can't be read, or not all of it.
pub(crate) fn read<const N: usize>(
    folder: &Path,
    prefixes: [String; N],
    now: SystemTime,
) -> io::Result<[Told; N]> {
    let mut all = [const { Told::new() }; N];
    for (told, prefix) in all.iter_mut().zip(&prefixes) {
        *told = read_kind(folder, prefix, now)?;
    }
    Ok(all)
}

fn read_kind(folder: &Path, prefix: &str, now: SystemTime) -> io::Result<Told> {
    let mut told = Told::new();
    // The first two parts are folders, the rest is in the names of files.
    let Some((kind, _)) = prefix.match_indices('/').nth(1).map(|(at, _)| prefix.split_at(at))
    else {
        return Ok(told);
    };
    let files = match fs::read_dir(folder.join(kind)) {
        Ok(files) => files,
        Err(error) if error.kind() == io::ErrorKind::NotFound && folder.is_dir() => {
            return Ok(told);
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
        if !key.starts_with(prefix) || told.len() == MOST_FILES {
            continue;
        }
        if let Some(value) = value(&file.path(), now)? {
            told.insert(key, value);
        }
    }
    Ok(told)
}

/// The content of a file that counts; `None` for one that is gone, that nobody has touched lately,
/// or that is too large.
fn value(path: &PathBuf, now: SystemTime) -> io::Result<Option<Arc<[u8]>>> {
    let gone = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(None),
        _ => Err(error),
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => return gone(error),
    };
    let about = file.metadata()?;
    // A time in the future is of a clock that is ahead.
    let is_old = now.duration_since(about.modified()?).is_ok_and(|since| since > LASTS);
    if !about.is_file() || is_old || about.len() > LONGEST_VALUE {
        return Ok(None);
    }
    let mut content = Vec::new();
    file.take(LONGEST_VALUE).read_to_end(&mut content)?;
    Ok(Some(content.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with this file.
    fn folder(kind: &str, name: &str, content: &[u8]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let of_kind = folder.path().join("v1").join(kind);
        fs::create_dir_all(&of_kind).unwrap();
        fs::write(of_kind.join(name), content).unwrap();
        folder
    }

    fn keys(folder: &Path, prefix: &str, now: SystemTime) -> Vec<String> {
        let [told] = read(folder, [prefix.to_owned()], now).unwrap();
        told.into_keys().collect()
    }

    #[test]
    fn a_file_is_a_key_and_its_content_the_value() {
        let folder = folder("instances", "ns%2Fbackend%2Fworker%5Fkv%2D1%2F304b", b"{}");
        let now = SystemTime::now();
        let [told] = read(folder.path(), ["v1/instances/ns/".to_owned()], now).unwrap();
        let expected =
            ("v1/instances/ns/backend/worker_kv-1/304b".to_owned(), Arc::from(&b"{}"[..]));
        assert_eq!(told.into_iter().collect::<Vec<_>>(), [expected]);
        assert!(keys(folder.path(), "v1/instances/n/", now).is_empty());
        assert!(keys(folder.path(), "v1/mdc/ns/", now).is_empty());
    }

    #[test]
    fn what_nobody_touches_any_more_is_gone() {
        let folder = folder("mdc", "ns%2Fa", b"x");
        let now = SystemTime::now();
        assert_eq!(keys(folder.path(), "v1/mdc/ns/", now + Duration::from_secs(9)).len(), 1);
        assert!(keys(folder.path(), "v1/mdc/ns/", now + Duration::from_secs(12)).is_empty());
        assert_eq!(keys(folder.path(), "v1/mdc/ns/", now - Duration::from_secs(60)).len(), 1);
    }

    #[test]
    fn names_and_sizes_that_none_has_are_passed_over_and_a_folder_that_is_away_is_an_error() {
        let large = folder("mdc", "ns%2Fa", &vec![0; LONGEST_VALUE as usize + 1]);
        let now = SystemTime::now();
        assert!(keys(large.path(), "v1/mdc/ns/", now).is_empty());
        let no_text = folder("mdc", "ns%2F%ff", b"x");
        assert!(keys(no_text.path(), "v1/mdc/ns/", now).is_empty());
        let gone = large.path().to_owned();
        drop(large);
        assert!(read(&gone, ["v1/mdc/ns/".to_owned()], now).is_err());
    }
}
