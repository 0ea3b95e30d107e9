//! A directory in the cache that is named by what it is made from, and is either complete or made
//! again.
//!
//! Things that can't be moved once made (a Python environment has its own path in it) can't be
//! built elsewhere and renamed. So they are built in place, under a lock, and a marker file is
//! written last: without the marker a directory is what a killed run left behind, and is removed.
//! Locks are the operating system's and go away with the processes that hold them.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use crate::child::{Cancel, Output};
use crate::error::Error;

const MARKER: &str = ".complete";
/// How often a lock that somebody else holds is tried again.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// `ROOT/NAME-KEY`, with its lock file `ROOT/NAME-KEY.lock` beside it.
#[derive(Clone, Debug)]
pub(crate) struct KeyedDir {
    path: PathBuf,
    lock: PathBuf,
}

/// The lock, while a directory is made.
pub(crate) struct Held(File);

impl Held {
    /// An empty input for a child that writes into the directory.
    ///
    /// It holds the lock too: should this process be killed while the child lives on, nobody starts
    /// over beneath it.
    pub(crate) fn as_input(&self) -> Result<Stdio, Error> {
        let copy = self.0.try_clone();
        Ok(copy.map_err(Error::io("copy", "the lock's handle"))?.into())
    }
}

impl KeyedDir {
    /// `inputs` is everything that the directory's contents depend on.
    pub(crate) fn new(root: &Path, name: &str, inputs: &[&[u8]]) -> Self {
        let stem = format!("{name}-{}", key(inputs));
        Self { path: root.join(&stem), lock: root.join(stem + ".lock") }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the directory with `build` unless it is complete and `still_works`.
    ///
    /// Waits while another process makes it. `build` finds an empty directory; when it fails, the
    /// directory stays as it is for a look at it, and the next call removes it.
    pub(crate) fn ensure(
        &self,
        output: &Output,
        cancel: &Cancel,
        still_works: impl FnOnce(&Path) -> bool,
        build: impl FnOnce(&Path, &Held) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if let Some(root) = self.lock.parent() {
            fs::create_dir_all(root).map_err(Error::io("create", root))?;
        }
        let held = self.acquire(output, cancel)?;
        let marker = self.path.join(MARKER);
        if marker.is_file() && still_works(&self.path) {
            return Ok(());
        }
        // The marker goes first: a removal that is cut short must not leave a torso that looks
        // complete.
        remove_file(&marker)?;
        if self.path.exists() {
            fs::remove_dir_all(&self.path).map_err(Error::io("remove", &self.path))?;
        }
        fs::create_dir(&self.path).map_err(Error::io("create", &self.path))?;
        build(&self.path, &held)?;
        let unnamed = self.path.join(".complete.new");
        let file = File::create(&unnamed).map_err(Error::io("create", &unnamed))?;
        file.sync_all().map_err(Error::io("write", &unnamed))?;
        fs::rename(&unnamed, &marker).map_err(Error::io("create", &marker))
    }

    fn acquire(&self, output: &Output, cancel: &Cancel) -> Result<Held, Error> {
        // Never removed: another process may hold a lock on the file that this name stood for a
        // moment ago.
        let file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(&self.lock)
            .map_err(Error::io("open", &self.lock))?;
        let mut said = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Held(file)),
                Err(TryLockError::Error(source)) => {
                    return Err(Error::io("lock", &self.lock)(source));
                }
                Err(TryLockError::WouldBlock) => {}
            }
            if !said {
                let path = self.path.display();
                output.say(&format!("waiting: another process is making {path}"))?;
                said = true;
            }
            cancel.check()?;
            thread::sleep(LOCK_POLL);
        }
    }
}

/// Whether the directory at `path` was made to its end.
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

/// 12 hex digits over the inputs and their borders: enough that two of a developer's environments
/// don't meet.
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
    fn the_name_holds_the_key_and_the_key_every_byte_and_border() {
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
    fn a_complete_directory_is_made_once_and_again_when_it_stopped_working() {
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
    fn what_a_failed_build_left_is_removed_by_the_next() {
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
    fn of_several_at_once_one_builds_and_the_others_wait_for_it() {
        let root = tempfile::tempdir().unwrap();
        let dir = KeyedDir::new(root.path(), "x", &[b"1"]);
        let (inside, built) = (AtomicUsize::new(0), AtomicUsize::new(0));
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
    fn waiting_for_a_lock_can_be_cancelled() {
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
    fn a_child_that_outlives_its_parent_keeps_the_lock() {
        let root = tempfile::tempdir().unwrap();
        let dir = KeyedDir::new(root.path(), "x", &[b"1"]);
        let mut orphan = None;
        let killed = dir.ensure(
            &Output::Terminal,
            &Cancel::default(),
            |_| true,
            |_, held| {
                let child =
                    std::process::Command::new("sleep").arg("600").stdin(held.as_input()?).spawn();
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
