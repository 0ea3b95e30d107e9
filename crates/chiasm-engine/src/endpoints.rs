//! The addresses at which a frontend listens for one engine.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::EngineError;

/// Longest path of a Unix socket that every system takes, in bytes (`sun_path` has 104 on macOS, 108 on Linux,
/// and one is for the terminating zero).
const MAX_SOCKET_PATH: usize = 103;

/// Longest file name that is put into a [`SocketDir`].
const MAX_SOCKET_NAME: usize = 16;

/// Addresses that a frontend binds for one engine: `tcp://host:port` or `ipc://path`.
///
/// A port of 0 stands for any free one. The engine connects to `input` and `output` as they are written here, so
/// a TCP host must be one that it can reach, and no wildcard.
#[derive(Clone, Debug)]
pub struct EngineEndpoints {
    /// ROUTER, where the engine says hello. What `vllm serve --headless` calls the data-parallel RPC port.
    pub handshake: String,
    /// ROUTER, for requests.
    pub input: String,
    /// PULL, for outputs.
    pub output: String,
}

impl EngineEndpoints {
    /// Handshake by TCP, the rest by Unix sockets in `dir`: for an engine on the same machine.
    pub fn local(handshake: &str, dir: &SocketDir) -> Self {
        Self { handshake: handshake.to_owned(), input: dir.ipc("in"), output: dir.ipc("out") }
    }

    /// Everything by TCP on one host, at ports that the system picks: for an engine that shares no file system.
    pub fn tcp(handshake: &str, host: &str) -> Self {
        let any = format!("tcp://{host}:0");
        Self { handshake: handshake.to_owned(), input: any.clone(), output: any }
    }
}

/// A directory for the Unix sockets of one start of one engine, which nobody else can enter. Removed on drop.
///
/// Make a new one for each start: a path that is bound a second time can be unlinked by the closing of the first.
#[derive(Debug)]
pub struct SocketDir {
    dir: TempDir,
}

impl SocketDir {
    /// Makes one in the system's directory for temporary files, or in `/tmp` when socket paths there would be too long.
    pub fn new() -> Result<Self, EngineError> {
        let parent = std::env::temp_dir();
        // "/chiasm-" and six random characters, then "/" and a name
        let longest = parent.as_os_str().len() + "/chiasm-xxxxxx/".len() + MAX_SOCKET_NAME;
        if longest <= MAX_SOCKET_PATH { Self::new_in(&parent) } else { Self::new_in(Path::new("/tmp")) }
    }

    /// Makes one in `parent`.
    ///
    /// # Errors
    /// [`PathTooLong`](EngineError::PathTooLong) when the path of a socket in it could exceed what every system takes,
    /// [`PrivateDir`](EngineError::PrivateDir) when it can't be made.
    pub fn new_in(parent: &Path) -> Result<Self, EngineError> {
        let made =
            tempfile::Builder::new().prefix("chiasm-").permissions(Permissions::from_mode(0o700)).tempdir_in(parent);
        let dir = made.map_err(|source| EngineError::PrivateDir { parent: parent.to_owned(), source })?;
        let longest = dir.path().join("x".repeat(MAX_SOCKET_NAME));
        if longest.as_os_str().len() > MAX_SOCKET_PATH {
            return Err(EngineError::PathTooLong { path: dir.path().to_owned() });
        }
        Ok(Self { dir })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The address of a socket in it. `name` has at most 16 bytes.
    pub fn ipc(&self, name: &str) -> String {
        debug_assert!(name.len() <= MAX_SOCKET_NAME);
        let path: PathBuf = self.dir.path().join(name);
        format!("ipc://{}", path.display())
    }
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
