//! `file:` URLs, confined to one directory.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use reqwest::Url;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::{ByteBudget, MediaError};

/// The directory below which files may be read.
#[derive(Clone, Debug)]
pub(crate) struct LocalFiles {
    /// The configured path, made absolute.
    given: PathBuf,
    /// The path of the same directory without symbolic links.
    canonical: PathBuf,
}

impl LocalFiles {
    /// Resolves the path of the directory. Opens no file.
    ///
    /// # Errors
    /// [`MediaError::LocalFileNotFound`] if the directory does not exist.
    pub(crate) fn new(root: &Path) -> Result<Self, MediaError> {
        let canonical = root.canonicalize().map_err(|_| MediaError::LocalFileNotFound)?;
        if !canonical.is_dir() {
            return Err(MediaError::LocalFileNotFound);
        }
        let given = std::path::absolute(root).map_err(|_| MediaError::LocalFileNotFound)?;
        Ok(Self { given, canonical })
    }

    /// Reads the file of a `file:` URL. Its bytes count towards `budget`. Blocks.
    pub(crate) fn read(
        &self,
        url: &Url,
        max_bytes: u64,
        budget: &ByteBudget,
    ) -> Result<Bytes, MediaError> {
        let path = url
            .to_file_path()
            .map_err(|()| MediaError::InvalidUrl { reason: "it has no local path" })?;
        // Checked before any system call, so that the error reveals nothing about files outside.
        let climbs = path.components().any(|component| component == Component::ParentDir);
        if climbs || !(path.starts_with(&self.given) || path.starts_with(&self.canonical)) {
            return Err(MediaError::LocalPathForbidden);
        }
        // Resolved first because `openat2` refuses all links with an absolute target, even those to
        // files below the directory.
        let path = path.canonicalize().map_err(|error| to_media_error(&error))?;
        let below = path.strip_prefix(&self.canonical);
        let below = below.map_err(|_| MediaError::LocalPathForbidden)?;
        // Only regular files are opened, because opening a device may have side effects. The
        // authoritative check is that of the open file, below.
        if !path.is_file() {
            return Err(MediaError::LocalFileNotFound);
        }
        let root = open_directory(CWD, &self.canonical).map_err(errno_to_media_error)?;
        let file = File::from(open_below(&root, below).map_err(errno_to_media_error)?);
        let metadata = file.metadata().map_err(|error| to_media_error(&error))?;
        if !metadata.is_file() {
            return Err(MediaError::LocalFileNotFound);
        }
        if metadata.len() > max_bytes {
            return Err(MediaError::TooManyBytes { limit: max_bytes });
        }
        // If the file shrinks now, reading fails. If the file grows, only its start is read.
        let mut buffer = budget.buffer();
        (&file)
            .read_exact(buffer.extend_zeroed(metadata.len() as usize)?)
            .map_err(|error| to_media_error(&error))?;
        Ok(buffer.freeze())
    }
}

/// Opens a file below `root` for reading.
///
/// Opens no file outside `root`, even if the path changes during the call. Opening a pipe does not
/// block.
#[cfg(target_os = "linux")]
fn open_below(root: &OwnedFd, below: &Path) -> Result<OwnedFd, Errno> {
    use rustix::fs::{ResolveFlags, openat2};

    /// The maximum number of calls of `openat2`. It fails with `EAGAIN` for a path through a link
    /// with `..` while a rename is in progress anywhere.
    const MAX_TRIES: usize = 8;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let mut opened = Err(Errno::AGAIN);
    for _ in 0..MAX_TRIES {
        opened = openat2(root, below, READ, Mode::empty(), resolve);
        if !matches!(opened, Err(Errno::AGAIN | Errno::INTR)) {
            break;
        }
    }
    match opened {
        // Kernels before 5.6, and seccomp filters without `openat2`.
        Err(Errno::NOSYS | Errno::PERM) => open_componentwise(root, below),
        opened => opened,
    }
}

/// Opens a file below `root` for reading, as on Linux.
#[cfg(not(target_os = "linux"))]
fn open_below(root: &OwnedFd, below: &Path) -> Result<OwnedFd, Errno> {
    open_componentwise(root, below)
}

/// The flags for opening a file for reading.
const READ: OFlags =
    OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Opens a file as [`open_below`] does, but without `openat2`: directory by directory, without
/// following links. A path that was just resolved has no links.
fn open_componentwise(root: &OwnedFd, below: &Path) -> Result<OwnedFd, Errno> {
    let mut directory: Option<OwnedFd> = None;
    let mut components = below.components().peekable();
    while let Some(component) = components.next() {
        let Component::Normal(name) = component else { return Err(Errno::XDEV) };
        let at = directory.as_ref().unwrap_or(root);
        if components.peek().is_none() {
            return openat(at, name, READ | OFlags::NOFOLLOW, Mode::empty());
        }
        directory = Some(open_directory(at.as_fd(), Path::new(name))?);
    }
    Err(Errno::ISDIR)
}

/// Opens a directory in which files are to be opened. Refuses a link to a directory.
fn open_directory(at: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    #[cfg(target_os = "linux")]
    let flags = flags | OFlags::PATH;
    openat(at, path, flags, Mode::empty())
}

fn errno_to_media_error(error: Errno) -> MediaError {
    match error {
        // A link that appeared after the path was resolved.
        Errno::XDEV | Errno::LOOP => MediaError::LocalPathForbidden,
        error => to_media_error(&error.into()),
    }
}

fn to_media_error(error: &std::io::Error) -> MediaError {
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
    fn path_outside_is_forbidden_even_if_missing() {
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
    fn links_are_followed_only_inside() {
        let fixture = fixture();
        let allowed = fixture.directory.path().join("allowed");
        std::os::unix::fs::symlink(fixture.directory.path().join("secret"), allowed.join("file"))
            .unwrap();
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

    type Open = fn(&OwnedFd, &Path) -> Result<OwnedFd, Errno>;
    /// Opening with `openat2`, and without it.
    const OPENERS: [Open; 2] = [open_below, open_componentwise];

    #[test]
    fn link_that_appears_late_is_refused() {
        let fixture = fixture();
        let allowed = fixture.directory.path().join("allowed");
        let link = |target: &Path, name: &str| {
            std::os::unix::fs::symlink(target, allowed.join(name)).unwrap();
        };
        link(&fixture.directory.path().join("secret"), "file");
        link(Path::new("../secret"), "relative");
        link(fixture.directory.path(), "folder");
        link(Path::new("/proc/self/root"), "magic");
        let root = open_directory(CWD, &allowed).unwrap();
        for open in OPENERS {
            let inside = open(&root, Path::new("sub dir/image")).unwrap();
            assert_eq!(std::io::read_to_string(File::from(inside)).unwrap(), "1234");
            for path in ["file", "relative", "folder/secret", "magic/etc/passwd", "../secret"] {
                let error = open(&root, Path::new(path)).unwrap_err();
                // `open_componentwise` fails with `ENOTDIR` for a link in place of a directory.
                assert!(
                    matches!(error, Errno::XDEV | Errno::LOOP | Errno::NOTDIR),
                    "{path}: {error}"
                );
            }
        }
        assert_eq!(errno_to_media_error(Errno::XDEV), MediaError::LocalPathForbidden);
    }

    #[test]
    fn pipe_is_opened_without_blocking() {
        let fixture = fixture();
        let allowed = fixture.directory.path().join("allowed");
        let pipe = std::process::Command::new("mkfifo").arg(allowed.join("pipe")).status();
        assert!(pipe.unwrap().success());
        let root = open_directory(CWD, &allowed).unwrap();
        for open in OPENERS {
            let opened = File::from(open(&root, Path::new("pipe")).unwrap());
            assert!(!opened.metadata().unwrap().is_file());
        }
    }

    #[test]
    fn absolute_link_that_stays_inside_is_followed() {
        let fixture = fixture();
        let allowed = fixture.directory.path().join("allowed").canonicalize().unwrap();
        let target = allowed.join("sub dir/image");
        std::os::unix::fs::symlink(target, allowed.join("absolute")).unwrap();
        assert_eq!(fixture.read("allowed/absolute").unwrap(), &b"1234"[..]);
    }

    #[test]
    fn file_over_the_byte_limit_is_refused() {
        let fixture = fixture();
        std::fs::write(fixture.directory.path().join("allowed/large"), [0; 11]).unwrap();
        assert_eq!(fixture.read("allowed/large"), Err(MediaError::TooManyBytes { limit: 10 }));
    }

    #[test]
    fn linked_directory_is_accepted_by_both_paths() {
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
    fn missing_directory_is_refused_at_creation() {
        assert!(LocalFiles::new(Path::new("/does/not/exist")).is_err());
    }
}
