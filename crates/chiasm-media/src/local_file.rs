//! `file:` URLs, below one directory only.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use reqwest::Url;

use crate::{ByteBudget, MediaError};

/// The directory that may be read from.
#[derive(Clone, Debug)]
pub(crate) struct LocalFiles {
    /// The configured path, made absolute.
    given: PathBuf,
    /// The same directory by a path without symbolic links.
    canonical: PathBuf,
}

impl LocalFiles {
    /// Opens nothing yet.
    ///
    /// # Errors
    /// [`MediaError::LocalFileNotFound`] when there is no such directory.
    pub(crate) fn new(root: &Path) -> Result<Self, MediaError> {
        let canonical = root.canonicalize().map_err(|_| MediaError::LocalFileNotFound)?;
        if !canonical.is_dir() {
            return Err(MediaError::LocalFileNotFound);
        }
        let given = std::path::absolute(root).map_err(|_| MediaError::LocalFileNotFound)?;
        Ok(Self { given, canonical })
    }

    /// Reads the file of a `file:` URL. Blocks.
    pub(crate) fn read(&self, url: &Url, max_bytes: u64, budget: &ByteBudget) -> Result<Bytes, MediaError> {
        let path = url.to_file_path().map_err(|()| MediaError::InvalidUrl { reason: "it has no local path" })?;
        // Before the file system is asked, so that answers tell nothing about what lies outside.
        let climbs = path.components().any(|component| component == Component::ParentDir);
        if climbs || !(path.starts_with(&self.given) || path.starts_with(&self.canonical)) {
            return Err(MediaError::LocalPathForbidden);
        }
        let path = path.canonicalize().map_err(|error| fault_of(&error))?;
        if !path.starts_with(&self.canonical) {
            return Err(MediaError::LocalPathForbidden);
        }
        // Opening a pipe would block; the same check on the open file closes the gap between the two.
        if !path.is_file() {
            return Err(MediaError::LocalFileNotFound);
        }
        let file = File::open(&path).map_err(|error| fault_of(&error))?;
        let about = file.metadata().map_err(|error| fault_of(&error))?;
        if !about.is_file() {
            return Err(MediaError::LocalFileNotFound);
        }
        if about.len() > max_bytes {
            return Err(MediaError::TooManyBytes { limit: max_bytes });
        }
        // A file that shrinks meanwhile is unreadable; of one that grows this is the beginning.
        let mut buffer = budget.buffer();
        (&file).read_exact(buffer.extend_zeroed(about.len() as usize)?).map_err(|error| fault_of(&error))?;
        Ok(buffer.freeze())
    }
}

fn fault_of(error: &std::io::Error) -> MediaError {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => MediaError::LocalFileNotFound,
        _ => MediaError::LocalFileUnreadable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture {
        directory: tempfile::TempDir,
        files: LocalFiles,
    }

    fn fixture() -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let allowed = directory.path().join("allowed");
        std::fs::create_dir_all(allowed.join("sub dir")).unwrap();
        std::fs::write(allowed.join("sub dir/image"), b"1234").unwrap();
        std::fs::create_dir(directory.path().join("allowed-too")).unwrap();
        std::fs::write(directory.path().join("allowed-too/image"), b"secret").unwrap();
        std::fs::write(directory.path().join("secret"), b"secret").unwrap();
        let files = LocalFiles::new(&allowed).unwrap();
        Fixture { directory, files }
    }

    impl Fixture {
        fn read(&self, path: &str) -> Result<Bytes, MediaError> {
            let url = format!("file://{}/{path}", self.directory.path().display());
            self.files.read(&Url::parse(&url).unwrap(), 10, &ByteBudget::new(100))
        }
    }

    #[test]
    fn files_below_the_directory_are_read() {
        assert_eq!(fixture().read("allowed/sub%20dir/image").unwrap(), &b"1234"[..]);
    }

    #[test]
    fn what_is_outside_is_forbidden_whether_it_exists_or_not() {
        let fixture = fixture();
        for path in [
            "secret",
            "missing",
            "allowed/../secret",
            "allowed/%2e%2e/secret",
            "allowed-too/image",
            "allowed/..%2fsecret",
        ] {
            assert_eq!(fixture.read(path), Err(MediaError::LocalPathForbidden), "{path}");
        }
    }

    #[test]
    fn links_that_lead_outside_are_forbidden_and_others_are_followed() {
        let fixture = fixture();
        let allowed = fixture.directory.path().join("allowed");
        std::os::unix::fs::symlink(fixture.directory.path().join("secret"), allowed.join("file")).unwrap();
        std::os::unix::fs::symlink(fixture.directory.path(), allowed.join("directory")).unwrap();
        std::os::unix::fs::symlink("sub dir/image", allowed.join("inside")).unwrap();
        assert_eq!(fixture.read("allowed/file"), Err(MediaError::LocalPathForbidden));
        assert_eq!(fixture.read("allowed/directory/secret"), Err(MediaError::LocalPathForbidden));
        assert_eq!(fixture.read("allowed/inside").unwrap(), &b"1234"[..]);
    }

    #[test]
    fn only_regular_files_are_found() {
        let fixture = fixture();
        assert_eq!(fixture.read("allowed/missing"), Err(MediaError::LocalFileNotFound));
        assert_eq!(fixture.read("allowed/sub%20dir"), Err(MediaError::LocalFileNotFound));
        assert_eq!(fixture.read("allowed/sub%20dir/image/x"), Err(MediaError::LocalFileNotFound));
        let pipe = fixture.directory.path().join("allowed/pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert_eq!(fixture.read("allowed/pipe"), Err(MediaError::LocalFileNotFound));
    }

    #[test]
    fn the_byte_limit_holds() {
        let fixture = fixture();
        std::fs::write(fixture.directory.path().join("allowed/large"), [0; 11]).unwrap();
        assert_eq!(fixture.read("allowed/large"), Err(MediaError::TooManyBytes { limit: 10 }));
    }

    #[test]
    fn a_directory_behind_a_link_may_be_named_either_way() {
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().join("real");
        std::fs::create_dir(&real).unwrap();
        std::fs::write(real.join("image"), b"1").unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let files = LocalFiles::new(&link).unwrap();
        for path in [&link, &real] {
            let url = Url::from_file_path(path.canonicalize().unwrap().join("image")).unwrap();
            assert_eq!(files.read(&url, 10, &ByteBudget::new(100)).unwrap(), &b"1"[..]);
            let url = Url::from_file_path(path.join("image")).unwrap();
            assert_eq!(files.read(&url, 10, &ByteBudget::new(100)).unwrap(), &b"1"[..]);
        }
    }

    #[test]
    fn a_missing_directory_is_an_error_at_the_start() {
        assert!(LocalFiles::new(Path::new("/does/not/exist")).is_err());
    }
}
