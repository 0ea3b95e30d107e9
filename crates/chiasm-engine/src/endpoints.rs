//! The addresses at which a frontend listens for one engine.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use chiasm_transfer::SHM_DIR;
use tempfile::TempDir;

use crate::error::EngineError;
use crate::state::check_private;

/// Longest path of a Unix socket that every system takes, in bytes (`sun_path` has 104 on macOS,
/// 108 on Linux, and one is for the terminating zero).
const MAX_SOCKET_PATH: usize = 103;

/// The frontend's sockets in a [`SocketDir`].
const INPUT: &str = "in";
const OUTPUT: &str = "out";

/// The file in a [`SocketDir`] that whoever uses it has locked, unless it is kept.
const LOCK: &str = "lock";

/// The beginning of a [`SocketDir`]'s name.
const PREFIX: &str = "chiasm-";

/// Longest file name that is put into a [`SocketDir`].
const MAX_SOCKET_NAME: usize = 16;

/// Addresses that a frontend binds for one engine: `tcp://host:port` or `ipc://path`.
///
/// A port of 0 stands for any free one. The engine connects to `input` and `output` as they are
/// written here, so a TCP host must be one that it can reach, and no wildcard.
#[derive(Clone, Debug)]
pub struct EngineEndpoints {
    /// ROUTER, where the engine says hello. What `vllm serve --headless` calls the data-parallel
    /// RPC port.
    pub handshake: String,
    /// ROUTER, for requests.
    pub input: String,
    /// PULL, for outputs.
    pub output: String,
}

impl EngineEndpoints {
    /// Handshake by TCP, the rest by Unix sockets in `dir`: for an engine on the same machine.
    pub fn local(handshake: &str, dir: &SocketDir) -> Self {
        Self { handshake: handshake.to_owned(), input: dir.ipc(INPUT), output: dir.ipc(OUTPUT) }
    }

    /// Everything by TCP on one host, at ports that the system picks: for an engine that shares no
    /// file system.
    pub fn tcp(handshake: &str, host: &str) -> Self {
        let any = format!("tcp://{host}:0");
        Self { handshake: handshake.to_owned(), input: any.clone(), output: any }
    }
}

/// A directory for the Unix sockets of one start of one engine, or for other things of engines,
/// which nobody else can enter. Removed on drop, unless it is [kept](Self::keep).
///
/// Make a new one for each start: the engine of another start may still come to the addresses in
/// it.
#[derive(Debug)]
pub struct SocketDir {
    path: PathBuf,
    /// Removes it, and shows others that it is in use.
    temporary: Option<(TempDir, File)>,
}

impl SocketDir {
    /// Makes one in the system's directory for temporary files, or in `/tmp` when socket paths
    /// there would be too long.
    pub fn new() -> Result<Self, EngineError> {
        Self::new_in(&parent())
    }

    /// Removes those of this user that killed processes have left; how many.
    pub fn sweep() -> usize {
        // What engines have left for each other lies in memory.
        Self::sweep_in(&parent()) + Self::sweep_in(Path::new(SHM_DIR))
    }

    fn sweep_in(parent: &Path) -> usize {
        let Ok(entries) = fs::read_dir(parent) else { return 0 };
        let ours = entries
            .flatten()
            .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()));
        let mut removed = 0;
        for path in ours.map(|entry| entry.path()) {
            if !fs::symlink_metadata(&path).is_ok_and(|about| check_private(&about).is_ok()) {
                continue;
            }
            // Those that are kept have no such file.
            let Ok(lock) = File::open(path.join(LOCK)) else { continue };
            if lock.try_lock().is_ok() {
                match fs::remove_dir_all(&path) {
                    Ok(()) => removed += 1,
                    Err(error) => {
                        tracing::debug!(path = %path.display(), %error, "a folder of sockets was not removed")
                    }
                }
            }
        }
        removed
    }

    /// Makes one in `parent`.
    ///
    /// # Errors
    /// [`PathTooLong`](EngineError::PathTooLong) when the path of a socket in it could exceed what
    /// every system takes, [`PrivateDir`](EngineError::PrivateDir) when it can't be made.
    pub fn new_in(parent: &Path) -> Result<Self, EngineError> {
        let made = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent);
        let dir =
            made.map_err(|source| EngineError::PrivateDir { parent: parent.to_owned(), source })?;
        let longest = dir.path().join("x".repeat(MAX_SOCKET_NAME));
        if longest.as_os_str().len() > MAX_SOCKET_PATH {
            return Err(EngineError::PathTooLong { path: dir.path().to_owned() });
        }
        // Locked before it has its name, or a sweep could come first.
        let locked = || {
            let unnamed = dir.path().join("unnamed");
            let lock = File::create(&unnamed)?;
            lock.try_lock()?;
            fs::rename(&unnamed, dir.path().join(LOCK)).map(|()| lock)
        };
        let lock = locked()
            .map_err(|source| EngineError::PrivateDir { parent: parent.to_owned(), source })?;
        Ok(Self { path: dir.path().to_owned(), temporary: Some((dir, lock)) })
    }

    /// One that another process has made and kept. Its frontend's sockets are removed, those of its
    /// engine stay; if it is gone it is made anew.
    ///
    /// # Errors
    /// [`PrivateDir`](EngineError::PrivateDir): it is not only this user's any more, or can't be
    /// made.
    pub fn again(path: &Path) -> Result<Self, EngineError> {
        let taken = || {
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made,
            }
            check_private(&fs::symlink_metadata(path)?)?;
            [INPUT, OUTPUT].into_iter().try_for_each(|name| {
                match fs::remove_file(path.join(name)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                    _ => Ok(()),
                }
            })
        };
        taken().map_err(|source| EngineError::PrivateDir { parent: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), temporary: None })
    }

    /// Leaves the directory where it is when this is dropped, for an engine that outlives its
    /// frontend.
    pub fn keep(self) -> Self {
        if let Some((dir, lock)) = self.temporary {
            let kept = dir.keep();
            if let Err(error) = fs::remove_file(kept.join(LOCK)) {
                tracing::warn!(path = %kept.display(), %error, "a folder of sockets will not be kept");
            }
            drop(lock);
        }
        Self { path: self.path, temporary: None }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The address of a socket in it. `name` has at most 16 bytes.
    pub fn ipc(&self, name: &str) -> String {
        debug_assert!(name.len() <= MAX_SOCKET_NAME);
        let path = self.path.join(name);
        format!("ipc://{}", path.display())
    }
}

/// The system's directory for temporary files, or `/tmp` when socket paths there would be too long.
fn parent() -> PathBuf {
    let parent = std::env::temp_dir();
    // The name has six random characters behind its beginning; then come "/" and the name of a
    // socket.
    let longest = parent.as_os_str().len() + "/xxxxxx/".len() + PREFIX.len() + MAX_SOCKET_NAME;
    if longest <= MAX_SOCKET_PATH { parent } else { PathBuf::from("/tmp") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_dir_is_private_and_goes_away() {
        let dir = SocketDir::new().unwrap();
        let path = dir.path().to_owned();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(dir.ipc("in"), format!("ipc://{}/in", path.display()));
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn a_kept_socket_dir_is_taken_again_with_the_sockets_of_its_engine() {
        let parent = tempfile::tempdir().unwrap();
        let path = SocketDir::new_in(parent.path()).unwrap().keep().path().to_owned();
        for name in ["in", "out", "kv"] {
            fs::write(path.join(name), []).unwrap();
        }
        let again = SocketDir::again(&path).unwrap();
        assert_eq!(again.ipc("in"), format!("ipc://{}/in", path.display()));
        drop(again);
        let left: Vec<_> =
            fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["kv"]);
        fs::remove_dir_all(&path).unwrap();
        assert_eq!(SocketDir::again(&path).unwrap().path(), path);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn only_what_killed_processes_have_left_is_swept() {
        let parent = tempfile::tempdir().unwrap();
        let used = SocketDir::new_in(parent.path()).unwrap();
        let kept = SocketDir::new_in(parent.path()).unwrap().keep();
        let other = parent.path().join("chiasm-other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join(LOCK), []).unwrap();
        fs::set_permissions(&other, Permissions::from_mode(0o755)).unwrap();
        // A process that is killed leaves it like this: its lock ends with it.
        let left = SocketDir::new_in(parent.path()).unwrap();
        let (dir, lock) = left.temporary.unwrap();
        let left = dir.keep();
        drop(lock);
        assert_eq!(SocketDir::sweep_in(parent.path()), 1);
        assert!(!left.exists() && used.path().exists() && kept.path().exists() && other.exists());
    }

    #[test]
    fn a_directory_that_others_can_enter_is_not_taken() {
        let parent = tempfile::tempdir().unwrap();
        let (open, link) = (parent.path().join("open"), parent.path().join("link"));
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::symlink(parent.path(), &link).unwrap();
        for path in [open, link] {
            assert!(
                matches!(SocketDir::again(&path), Err(EngineError::PrivateDir { .. })),
                "{path:?}"
            );
        }
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let deep = parent.path().join("d".repeat(90));
        std::fs::create_dir(&deep).unwrap();
        assert!(matches!(SocketDir::new_in(&deep), Err(EngineError::PathTooLong { .. })));
    }

    #[test]
    fn every_socket_path_fits() {
        let dir = SocketDir::new().unwrap();
        assert!(dir.path().join("x".repeat(MAX_SOCKET_NAME)).as_os_str().len() <= MAX_SOCKET_PATH);
    }
}
