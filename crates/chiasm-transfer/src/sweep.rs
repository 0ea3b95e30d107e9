//! Removal of arenas whose owners were killed before the engine had opened them.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::segment;
use crate::shm::SHM_DIR;

/// Removes this user's arenas that no live process owns, and returns their number. Their memory is
/// freed once no engine maps them.
pub fn sweep() -> usize {
    sweep_dir(Path::new(SHM_DIR))
}

pub(crate) fn sweep_dir(dir: &Path) -> usize {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let mut removed = 0;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(segment::parse_name).map(|(owner, _)| owner);
        if owner.is_some_and(|owner| !owner.is_alive()) && has_no_owner(&entry.path()) {
            match fs::remove_file(entry.path()) {
                Ok(()) => {
                    tracing::info!(name = ?name, "removed an arena that a killed process had left");
                    removed += 1;
                }
                Err(error) => {
                    tracing::debug!(name = ?name, %error, "an abandoned arena was not removed")
                }
            }
        }
    }
    removed
}

/// Returns `true` if no process holds the arena's lock. This protects owners in other PID
/// namespaces, whose ids are meaningless here. Arenas of other users can't be opened.
fn has_no_owner(path: &Path) -> bool {
    let no_follow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    let file = OpenOptions::new().read(true).write(true).custom_flags(no_follow).open(path);
    file.is_ok_and(|file| file.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use crate::owner::Owner;

    #[test]
    fn only_arenas_without_an_owner_are_removed() {
        let dir = tempfile::tempdir_in(SHM_DIR).unwrap();
        let ours = Arena::create_in(dir.path(), 4096, 1024).unwrap();
        let dead = Owner { pid: u32::MAX, start: 7 };
        let abandoned = segment::name(dead, 1);
        fs::write(dir.path().join(&abandoned), [0; 64]).unwrap();
        // Simulates a process in another PID namespace: its id is unknown here, but its lock is
        // held.
        let elsewhere = dir.path().join(segment::name(dead, 2));
        fs::write(&elsewhere, [0; 64]).unwrap();
        let locked = fs::File::open(&elsewhere).unwrap();
        locked.try_lock().unwrap();
        fs::write(dir.path().join("chiasm.other"), []).unwrap();
        assert_eq!(sweep_dir(dir.path()), 1);
        assert!(!dir.path().join(abandoned).exists());
        assert!(elsewhere.exists() && dir.path().join(ours.name()).exists());
        drop(locked);
        assert_eq!(sweep_dir(dir.path()), 1);
        assert!(!elsewhere.exists());
    }
}
