//! libturbojpeg for the peer `llm-multimodal`, which loads it at run time. Without it, the peer
//! decodes JPEG files to other pixels. If the system has no libturbojpeg, its package is unpacked
//! into the cache, which needs no root.

use std::fs;
use std::path::{Path, PathBuf};

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

/// The names of the package in Debian and in Ubuntu.
const PACKAGES: [&str; 2] = ["libturbojpeg0", "libturbojpeg"];
/// The name of the library that the peer loads.
const LIBRARY: &str = "libturbojpeg.so.0";

/// Returns the directory for the loader's path; unpacks the package if needed.
pub(crate) fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    let dir = KeyedDir::new(&setup.workspace.cache, "turbojpeg", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| directory_of(LIBRARY, path).is_some(),
        |path, lock| debian::unpack(setup, &PACKAGES, path, lock),
    )?;
    directory_of(LIBRARY, dir.path())
        .ok_or_else(|| Error::MissingFile { path: dir.path().join(LIBRARY) })
}

/// Returns the directory below `dir` that contains a file of this name. A package has its libraries
/// in a directory named after the architecture.
fn directory_of(name: &str, dir: &Path) -> Option<PathBuf> {
    if dir.join(name).exists() {
        return Some(dir.to_owned());
    }
    let entries = fs::read_dir(dir).ok()?;
    entries
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .find_map(|entry| directory_of(name, &entry.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_found_in_nested_folder() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("usr/lib/some-machine");
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(directory_of(LIBRARY, dir.path()), None);
        fs::write(deep.join(LIBRARY), "").unwrap();
        assert_eq!(directory_of(LIBRARY, dir.path()), Some(deep));
    }
}
