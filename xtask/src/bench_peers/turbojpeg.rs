//! libturbojpeg for the peer `llm-multimodal`, which looks for it at run time and without it
//! decodes JPEG files to other pixels. Where the system has none, its package is unpacked into the
//! cache: no root is needed for that.

use std::fs;
use std::path::{Path, PathBuf};

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

/// Names of the package, in Debian and in Ubuntu.
const PACKAGES: [&str; 2] = ["libturbojpeg0", "libturbojpeg"];
/// What the peer asks the loader for.
const LIBRARY: &str = "libturbojpeg.so.0";

/// The directory to put on the loader's path. An error says why there is none.
pub(crate) fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    let dir = KeyedDir::new(&setup.workspace.cache, "turbojpeg", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| directory_of(LIBRARY, path).is_some(),
        |path, held| debian::unpack(setup, &PACKAGES, path, held),
    )?;
    directory_of(LIBRARY, dir.path())
        .ok_or_else(|| Error::MissingFile { path: dir.path().join(LIBRARY) })
}

/// The directory below `dir` that holds a file of this name. A package's libraries lie in one named
/// by the machine's kind.
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
    fn the_library_is_found_however_deep_it_lies() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("usr/lib/some-machine");
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(directory_of(LIBRARY, dir.path()), None);
        fs::write(deep.join(LIBRARY), "").unwrap();
        assert_eq!(directory_of(LIBRARY, dir.path()), Some(deep));
    }
}
