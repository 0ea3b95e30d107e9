//! The addresses on which a frontend listens for one engine.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use chiasm_transfer::SHM_DIR;
use tempfile::TempDir;

use crate::error::EngineError;
use crate::state::check_private;

/// The maximum length of a Unix socket's path on all systems, in bytes: `sun_path` has 104 on macOS
/// and 108 on Linux, including the terminating zero.
const MAX_SOCKET_PATH_BYTES: usize = 103;

/// The name of the frontend's input socket in a [`SocketDir`].
const INPUT_SOCKET: &str = "in";
/// The name of the frontend's output socket in a [`SocketDir`].
const OUTPUT_SOCKET: &str = "out";

/// The lock file in a [`SocketDir`], locked by the process that uses the directory. Kept
/// directories have none.
const LOCK_FILE: &str = "lock";

/// The prefix of a [`SocketDir`]'s name.
const DIR_PREFIX: &str = "chiasm-";

/// The maximum length of a socket's name in a [`SocketDir`].
const MAX_SOCKET_NAME_BYTES: usize = 16;

/// The addresses that a frontend binds for one engine: `tcp://host:port` or `ipc://path`.
///
/// Port 0 stands for any free port. The engine connects to `input` and `output` as written here,
/// so a TCP host must be reachable from the engine and not a wildcard.
#[derive(Clone, Debug)]
pub struct EngineEndpoints {
    /// The ROUTER socket for the handshake, which `vllm serve --headless` calls the data-parallel
    /// RPC port.
    pub handshake: String,
    /// The ROUTER socket for requests.
    pub input: String,
    /// The PULL socket for outputs.
    pub output: String,
}

impl EngineEndpoints {
    /// Creates addresses for an engine on the same machine: TCP for the handshake, and Unix sockets
    /// in `dir` for the rest.
    pub fn local(handshake: &str, dir: &SocketDir) -> Self {
        Self {
            handshake: handshake.to_owned(),
            input: dir.ipc(INPUT_SOCKET),
            output: dir.ipc(OUTPUT_SOCKET),
        }
    }

    /// Creates addresses for an engine without a common file system: TCP on one host, at ports that
    /// the system picks.
    pub fn tcp(handshake: &str, host: &str) -> Self {
        let any = format!("tcp://{host}:0");
        Self { handshake: handshake.to_owned(), input: any.clone(), output: any }
    }
}

/// A private directory for the Unix sockets of one start of one engine, or for other files of
/// engines. Removed on drop, unless it is [kept](Self::keep).
///
/// Create a new one for each start: the engine of an earlier start may still connect to the
/// addresses in its directory.
#[derive(Debug)]
pub struct SocketDir {
    path: PathBuf,
    /// The guard that removes the directory, and the lock that marks it as in use.
    temporary: Option<(TempDir, File)>,
}

impl SocketDir {
    /// Creates a directory in the system's directory for temporary files, or in `/tmp` if socket
    /// paths there would be too long.
    ///
    /// # Errors
    /// See [`new_in`](Self::new_in).
    pub fn new() -> Result<Self, EngineError> {
        Self::new_in(&parent())
    }

    /// Removes the directories of this user that killed processes left behind, and returns their
    /// number.
    pub fn sweep() -> usize {
        // Embedding stores are in shared memory.
        Self::sweep_in(&parent()) + Self::sweep_in(Path::new(SHM_DIR))
    }

    fn sweep_in(parent: &Path) -> usize {
        let Ok(entries) = fs::read_dir(parent) else { return 0 };
        let ours = entries.flatten().filter(|entry| {
            entry.file_name().as_encoded_bytes().starts_with(DIR_PREFIX.as_bytes())
        });
        let mut removed = 0;
        for path in ours.map(|entry| entry.path()) {
            if !fs::symlink_metadata(&path).is_ok_and(|metadata| check_private(&metadata).is_ok()) {
                continue;
            }
            // Kept directories have no lock file.
            let Ok(lock) = File::open(path.join(LOCK_FILE)) else { continue };
            if lock.try_lock().is_ok() {
                match fs::remove_dir_all(&path) {
                    Ok(()) => removed += 1,
                    Err(error) => {
                        tracing::debug!(
                            path = %path.display(),
                            %error,
                            "can't remove a socket directory that a killed process left"
                        );
                    }
                }
            }
        }
        removed
    }

    /// Creates a directory in `parent`.
    ///
    /// # Errors
    /// [`PathTooLong`](EngineError::PathTooLong) if the path of a socket in the directory could be
    /// longer than 103 bytes, [`PrivateDir`](EngineError::PrivateDir) if it can't be created.
    pub fn new_in(parent: &Path) -> Result<Self, EngineError> {
        let created = tempfile::Builder::new()
            .prefix(DIR_PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent);
        let dir = created
            .map_err(|source| EngineError::PrivateDir { parent: parent.to_owned(), source })?;
        let longest = dir.path().join("x".repeat(MAX_SOCKET_NAME_BYTES));
        if longest.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            return Err(EngineError::PathTooLong { path: dir.path().to_owned() });
        }
        // The file is locked before it gets its name, so that no sweep finds it unlocked.
        let create_lock = || {
            let unnamed = dir.path().join("unnamed");
            let lock = File::create(&unnamed)?;
            lock.try_lock()?;
            fs::rename(&unnamed, dir.path().join(LOCK_FILE)).map(|()| lock)
        };
        let lock = create_lock()
            .map_err(|source| EngineError::PrivateDir { parent: parent.to_owned(), source })?;
        Ok(Self { path: dir.path().to_owned(), temporary: Some((dir, lock)) })
    }

    /// Opens a directory that another process created and kept, or creates it if it is missing.
    /// Removes the frontend's sockets in it, but not the engine's.
    ///
    /// # Errors
    /// [`PrivateDir`](EngineError::PrivateDir): other users have access to the directory, or it
    /// can't be created.
    pub fn reopen(path: &Path) -> Result<Self, EngineError> {
        let open = || {
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => return created,
            }
            check_private(&fs::symlink_metadata(path)?)?;
            [INPUT_SOCKET, OUTPUT_SOCKET].into_iter().try_for_each(|name| {
                match fs::remove_file(path.join(name)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                    _ => Ok(()),
                }
            })
        };
        open().map_err(|source| EngineError::PrivateDir { parent: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), temporary: None })
    }

    /// Keeps the directory when this is dropped, for an engine that outlives its frontend.
    pub fn keep(self) -> Self {
        if let Some((dir, lock)) = self.temporary {
            let kept = dir.keep();
            if let Err(error) = fs::remove_file(kept.join(LOCK_FILE)) {
                tracing::warn!(
                    path = %kept.display(),
                    %error,
                    "can't keep a socket directory: the next sweep removes it"
                );
            }
            drop(lock);
        }
        Self { path: self.path, temporary: None }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the address of a socket in the directory. `name` has at most 16 bytes.
    pub fn ipc(&self, name: &str) -> String {
        debug_assert!(name.len() <= MAX_SOCKET_NAME_BYTES);
        let path = self.path.join(name);
        format!("ipc://{}", path.display())
    }
}

/// Returns the system's directory for temporary files, or `/tmp` if socket paths there would be too
/// long.
fn parent() -> PathBuf {
    let parent = std::env::temp_dir();
    // A path is parent, "/", prefix, six random characters, "/" and the name of a socket.
    let longest =
        parent.as_os_str().len() + "/xxxxxx/".len() + DIR_PREFIX.len() + MAX_SOCKET_NAME_BYTES;
    if longest <= MAX_SOCKET_PATH_BYTES { parent } else { PathBuf::from("/tmp") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_dir_is_private_until_dropped() {
        let dir = SocketDir::new().unwrap();
        let path = dir.path().to_owned();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(dir.ipc("in"), format!("ipc://{}/in", path.display()));
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn reopened_dir_keeps_sockets_of_engine() {
        let parent = tempfile::tempdir().unwrap();
        let path = SocketDir::new_in(parent.path()).unwrap().keep().path().to_owned();
        for name in ["in", "out", "kv"] {
            fs::write(path.join(name), []).unwrap();
        }
        let reopened = SocketDir::reopen(&path).unwrap();
        assert_eq!(reopened.ipc("in"), format!("ipc://{}/in", path.display()));
        drop(reopened);
        let left: Vec<_> =
            fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["kv"]);
        fs::remove_dir_all(&path).unwrap();
        assert_eq!(SocketDir::reopen(&path).unwrap().path(), path);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn sweep_removes_only_dirs_of_killed_processes() {
        let parent = tempfile::tempdir().unwrap();
        let used = SocketDir::new_in(parent.path()).unwrap();
        let kept = SocketDir::new_in(parent.path()).unwrap().keep();
        let other = parent.path().join("chiasm-other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join(LOCK_FILE), []).unwrap();
        fs::set_permissions(&other, Permissions::from_mode(0o755)).unwrap();
        // A killed process leaves the directory like this: its lock ends with the process.
        let left = SocketDir::new_in(parent.path()).unwrap();
        let (dir, lock) = left.temporary.unwrap();
        let left = dir.keep();
        drop(lock);
        assert_eq!(SocketDir::sweep_in(parent.path()), 1);
        assert!(!left.exists() && used.path().exists() && kept.path().exists() && other.exists());
    }

    #[test]
    fn reopening_accessible_dir_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let open = parent.path().join("open");
        let link = parent.path().join("link");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::symlink(parent.path(), &link).unwrap();
        for path in [open, link] {
            assert!(
                matches!(SocketDir::reopen(&path), Err(EngineError::PrivateDir { .. })),
                "{path:?}"
            );
        }
    }

    #[test]
    fn too_long_socket_path_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let deep = parent.path().join("d".repeat(90));
        std::fs::create_dir(&deep).unwrap();
        assert!(matches!(SocketDir::new_in(&deep), Err(EngineError::PathTooLong { .. })));
    }

    #[test]
    fn longest_socket_path_fits() {
        let dir = SocketDir::new().unwrap();
        let longest = dir.path().join("x".repeat(MAX_SOCKET_NAME_BYTES));
        assert!(longest.as_os_str().len() <= MAX_SOCKET_PATH_BYTES);
    }
}
