//! A cache directory whose name contains a hash of its inputs. It is either complete or rebuilt.
//!
//! A Python environment contains its own path, so it can't be built elsewhere and renamed. It is
//! built in place under a lock, and a marker file is written last. A directory without the marker
//! is left over from a killed run and is removed. The locks are file locks of the operating system,
//! which end with the processes that hold them.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use crate::child::{Cancel, Output};
use crate::error::Error;

const MARKER: &str = ".complete";
/// The interval between attempts to take a lock that another process holds.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// The directory `ROOT/NAME-KEY` and its lock file `ROOT/NAME-KEY.lock`.
#[derive(Clone, Debug)]
pub(crate) struct KeyedDir {
    path: PathBuf,
    lock_path: PathBuf,
}

/// The lock on a directory that is being built.
pub(crate) struct DirLock(File);

impl DirLock {
    /// Returns an empty standard input for a child process that writes into the directory.
    ///
    /// The handle shares the lock. If this process is killed and the child lives on, no other
    /// process rebuilds the directory while the child still writes.
    pub(crate) fn as_stdin(&self) -> Result<Stdio, Error> {
        let copy = self.0.try_clone();
        Ok(copy.map_err(Error::io("copy", "the lock's handle"))?.into())
    }
}

impl KeyedDir {
    /// Creates a handle; `inputs` is everything that the directory's contents depend on.
    pub(crate) fn new(root: &Path, name: &str, inputs: &[&[u8]]) -> Self {
        let stem = format!("{name}-{}", key(inputs));
        Self { path: root.join(&stem), lock_path: root.join(stem + ".lock") }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Builds the directory with `build` unless it is complete and `still_works`.
    ///
    /// Waits while another process builds it. `build` gets an empty directory. If it fails, the
    /// directory stays for inspection until the next call removes it.
    pub(crate) fn ensure(
        &self,
        output: &Output,
        cancel: &Cancel,
        still_works: impl FnOnce(&Path) -> bool,
        build: impl FnOnce(&Path, &DirLock) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if let Some(root) = self.lock_path.parent() {
            fs::create_dir_all(root).map_err(Error::io("create", root))?;
        }
        let lock = self.acquire(output, cancel)?;
        let marker = self.path.join(MARKER);
        if marker.is_file() && still_works(&self.path) {
            return Ok(());
        }
        // The marker is removed first: an interrupted removal must not leave a partial directory
        // that looks complete.
        remove_file(&marker)?;
        if self.path.exists() {
            fs::remove_dir_all(&self.path).map_err(Error::io("remove", &self.path))?;
        }
        fs::create_dir(&self.path).map_err(Error::io("create", &self.path))?;
        build(&self.path, &lock)?;
        let temporary = self.path.join(".complete.new");
        let file = File::create(&temporary).map_err(Error::io("create", &temporary))?;
        file.sync_all().map_err(Error::io("write", &temporary))?;
        fs::rename(&temporary, &marker).map_err(Error::io("create", &marker))
    }

    fn acquire(&self, output: &Output, cancel: &Cancel) -> Result<DirLock, Error> {
        // The lock file is never removed. Otherwise another process could hold a lock on a removed
        // file while this one locks a new file of the same name.
        let file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(&self.lock_path)
            .map_err(Error::io("open", &self.lock_path))?;
        let mut has_printed = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(DirLock(file)),
                Err(TryLockError::Error(source)) => {
                    return Err(Error::io("lock", &self.lock_path)(source));
                }
                Err(TryLockError::WouldBlock) => {}
            }
            if !has_printed {
                let path = self.path.display();
                output.print_line(&format!("waiting: another process is making {path}"))?;
                has_printed = true;
            }
            cancel.check()?;
            thread::sleep(LOCK_POLL);
        }
    }
}

/// Returns `true` if the directory at `path` was built to its end.
pub(crate) fn is_complete(path: &Path) -> bool {
    path.join(MARKER).is_file()
}

fn remove_file(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Hashes the inputs and their lengths to 12 hex digits, enough to tell one developer's
/// environments apart.
fn key(inputs: &[&[u8]]) -> String {
    let mut hasher = blake3::Hasher::new();
    for input in inputs {
        hasher.update(&(input.len() as u64).to_le_bytes());
        hasher.update(input);
    }
    hasher.finalize().to_hex()[..12].to_owned()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn ensure(
        dir: &KeyedDir,
        works: bool,
        build: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<(), Error> {
        dir.ensure(&Output::Terminal, &Cancel::default(), |_| works, |path, _| build(path))
    }

    #[test]
    fn name_depends_on_input_bytes_lengths_order() {
        let root = Path::new("/cache");
        let name = |inputs: &[&[u8]]| KeyedDir::new(root, "vllm-0.32.0", inputs).path().to_owned();
        let one = name(&[b"ab", b"c"]);
        let text = one.to_str().unwrap();
        let digits = text.strip_prefix("/cache/vllm-0.32.0-").unwrap();
        assert_eq!(digits.len(), 12);
        assert!(digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_eq!(one, name(&[b"ab", b"c"]));
        assert_ne!(one, name(&[b"a", b"bc"]));
        assert_ne!(one, name(&[b"ab", b"d"]));
        assert_ne!(one, name(&[b"ab", b"c", b""]));
    }

    #[test]
    fn complete_directory_is_rebuilt_only_when_broken() {
        let root = tempfile::tempdir().unwrap();
        let dir = KeyedDir::new(&root.path().join("not/there/yet"), "x", &[b"1"]);
        let built = Cell::new(0);
        let build = |path: &Path| {
            built.set(built.get() + 1);
            assert_eq!(fs::read_dir(path).unwrap().count(), 0, "not empty");
            fs::write(path.join("payload"), "p").unwrap();
            Ok(())
        };
        ensure(&dir, true, build).unwrap();
        ensure(&dir, true, build).unwrap();
        assert_eq!(built.get(), 1);
        assert!(dir.path().join("payload").is_file());
        ensure(&dir, false, build).unwrap();
        assert_eq!(built.get(), 2);
    }

    #[test]
    fn leftovers_of_failed_build_are_removed_by_next_build() {
        let root = tempfile::tempdir().unwrap();
        let dir = KeyedDir::new(root.path(), "x", &[b"1"]);
        let error = ensure(&dir, true, |path| {
            fs::write(path.join("half"), "h").unwrap();
            Err(Error::NoCacheDir)
        });
        assert!(error.is_err());
        assert!(dir.path().join("half").is_file());
        ensure(&dir, true, |path| {
            assert!(!path.join("half").exists());
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn concurrent_calls_build_once() {
        let root = tempfile::tempdir().unwrap();
        let dir = KeyedDir::new(root.path(), "x", &[b"1"]);
        let inside = AtomicUsize::new(0);
        let built = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    ensure(&dir, true, |path| {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        fs::write(path.join("payload"), "p").unwrap();
                        thread::yield_now();
                        built.fetch_add(1, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        Ok(())
                    })
                    .unwrap();
                    assert!(dir.path().join("payload").is_file());
                });
            }
        });
        assert_eq!(built.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn wait_for_lock_can_be_cancelled() {
        let root = tempfile::tempdir().unwrap();
        let dir = KeyedDir::new(root.path(), "x", &[b"1"]);
        let cancel = Cancel::default();
        cancel.cancel();
        ensure(&dir, true, |_| {
            let inner = dir.ensure(&Output::Terminal, &cancel, |_| true, |_, _| Ok(()));
            assert!(matches!(inner, Err(Error::Cancelled)));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn child_that_outlives_parent_keeps_lock() {
        let root = tempfile::tempdir().unwrap();
        let dir = KeyedDir::new(root.path(), "x", &[b"1"]);
        let mut orphan = None;
        let killed = dir.ensure(
            &Output::Terminal,
            &Cancel::default(),
            |_| true,
            |_, lock| {
                let child =
                    std::process::Command::new("sleep").arg("600").stdin(lock.as_stdin()?).spawn();
                orphan = Some(child.unwrap());
                Err(Error::Cancelled)
            },
        );
        assert!(matches!(killed, Err(Error::Cancelled)));
        let cancel = Cancel::default();
        cancel.cancel();
        let next = dir.ensure(&Output::Terminal, &cancel, |_| true, |_, _| Ok(()));
        assert!(matches!(next, Err(Error::Cancelled)), "the lock was free");
        let mut orphan = orphan.unwrap();
        orphan.kill().unwrap();
        orphan.wait().unwrap();
        ensure(&dir, true, |_| Ok(())).unwrap();
    }
}
