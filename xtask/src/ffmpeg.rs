//! ffmpeg for a benchmark: the installed programs, or a package that is unpacked into the cache
//! with its missing dependencies.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

const PACKAGE: &str = "ffmpeg";
const PROGRAMS: [&str; 2] = ["ffmpeg", "ffprobe"];
/// The folder of the programs in the package.
const FOLDER: &str = "usr/bin";
/// The folders that contain those of the libraries.
const LIBRARY_FOLDERS: [&str; 2] = ["lib", "usr/lib"];
/// The text in front of the version in the output of `ffmpeg -version`.
const VERSION_PREFIX: &str = "ffmpeg version ";

/// The programs, as environment variables have them.
pub(crate) struct Ffmpeg {
    /// The folder of the programs; `None` if they are installed.
    pub(crate) folder: Option<PathBuf>,
    /// The folders of their libraries, separated by colons; empty if they are installed.
    pub(crate) libraries: OsString,
    pub(crate) version: String,
}

/// Returns the programs; unpacks their package if they are not installed.
pub(crate) fn ensure(setup: &Setup) -> Result<Ffmpeg, Error> {
    if let Some(version) = version(Path::new(""), &OsString::new()) {
        return Ok(Ffmpeg { folder: None, libraries: OsString::new(), version });
    }
    let dir = KeyedDir::new(&setup.workspace.cache, "ffmpeg", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| unpacked(path).is_ok_and(|found| found.is_some()),
        |path, lock| {
            let packages = debian::missing_packages(PACKAGE)?;
            debian::unpack_all(setup, &packages, path, lock)
        },
    )?;
    let found = unpacked(dir.path()).map_err(Error::io("list", dir.path()))?;
    found.ok_or_else(|| Error::MissingFile { path: dir.path().join(FOLDER).join(PACKAGE) })
}

/// Returns the programs of unpacked packages; `None` if they do not start.
fn unpacked(path: &Path) -> io::Result<Option<Ffmpeg>> {
    let mut folders = BTreeSet::new();
    for folder in LIBRARY_FOLDERS.map(|folder| path.join(folder)).iter().filter(|it| it.is_dir()) {
        add_library_folders(folder, &mut folders)?;
    }
    let libraries = env::join_paths(folders).map_err(io::Error::other)?;
    let folder = path.join(FOLDER);
    let version = version(&folder, &libraries);
    Ok(version.map(|version| Ffmpeg { folder: Some(folder), libraries, version }))
}

/// Adds the folders below `path` that contain shared libraries.
fn add_library_folders(path: &Path, folders: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            add_library_folders(&entry.path(), folders)?;
        } else if entry.file_name().to_string_lossy().contains(".so") {
            folders.insert(path.to_owned());
        }
    }
    Ok(())
}

/// Returns the version of the programs in a folder; `None` if one of them does not start.
fn version(folder: &Path, libraries: &OsString) -> Option<String> {
    let printed = PROGRAMS.map(|program| {
        let mut print_version = Command::new(folder.join(program));
        print_version.arg("-version").stdin(Stdio::null());
        if !libraries.is_empty() {
            print_version.env("LD_LIBRARY_PATH", libraries);
        }
        print_version.output().ok().filter(|output| output.status.success())
    });
    let [Some(ffmpeg), Some(_)] = printed else { return None };
    let text = String::from_utf8_lossy(&ffmpeg.stdout).into_owned();
    let version = text.strip_prefix(VERSION_PREFIX)?.split([' ', '-']).next()?;
    Some(version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_with_libraries_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for file in ["usr/lib/x/liba.so.1", "usr/lib/x/deep/libb.so", "usr/bin/a", "usr/share/b"] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let mut folders = BTreeSet::new();
        add_library_folders(dir.path(), &mut folders).unwrap();
        let found = ["usr/lib/x", "usr/lib/x/deep"].map(|folder| dir.path().join(folder));
        assert!(folders.iter().eq(&found), "{folders:?}");
    }

    #[test]
    fn program_that_does_not_start_has_no_version() {
        assert!(version(Path::new("/nowhere"), &OsString::new()).is_none());
    }
}
