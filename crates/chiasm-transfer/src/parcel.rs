//! Bytes for a process of this machine that copies them out of shared memory by a name, as Python's
//! `SharedMemory` does, and knows nothing of arenas.
//!
//! A parcel is a file of its own that is there until this end lets go of it. Its name and its lock
//! are those of an arena, so that [`sweep`](crate::sweep) removes what a killed process has left.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::owner::Owner;
use crate::segment;
use crate::shm::SHM_DIR;

/// Why bytes are in no parcel.
#[derive(Debug, thiserror::Error)]
pub enum NoParcel {
    /// Those that are under way take up the room.
    #[error("{wanted} bytes find no room beside the {taken} that are under way, of {most}")]
    Full {
        /// Bytes that were to be packed.
        wanted: u64,
        /// Bytes of all parcels that are there.
        taken: u64,
        /// Most bytes of all of them.
        most: u64,
    },
    /// The system's: no shared memory, or too little of it.
    #[error("shared memory can't be written: {0}")]
    System(#[from] io::Error),
}

impl NoParcel {
    /// A word for counters.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Full { .. } => "parcels_full",
            Self::System(_) => "no_shared_memory",
        }
    }
}

/// Room for parcels that are under way at a time. Clones are the same room.
#[derive(Clone, Debug)]
pub struct ParcelRoom {
    inner: Arc<Room>,
}

#[derive(Debug)]
struct Room {
    dir: PathBuf,
    most: u64,
    taken: AtomicU64,
}

impl ParcelRoom {
    /// Room for so many bytes of shared memory, which are taken from the system as they are needed.
    pub fn new(most: u64) -> Self {
        Self::within(Path::new(SHM_DIR), most)
    }

    fn within(dir: &Path, most: u64) -> Self {
        Self { inner: Arc::new(Room { dir: dir.to_owned(), most, taken: AtomicU64::new(0) }) }
    }

    /// Bytes of all parcels that are there.
    pub fn taken(&self) -> u64 {
        self.inner.taken.load(Relaxed)
    }

    /// Packs these bytes, one part after the other. It takes as long as copying them does.
    ///
    /// # Errors
    /// [`NoParcel`] says why they are to go another way.
    pub fn pack(&self, parts: &[impl AsRef<[u8]>]) -> Result<Parcel, NoParcel> {
        let bytes = parts.iter().map(|part| part.as_ref().len() as u64).sum();
        let share = Share::of(&self.inner, bytes)?;
        let name = segment::name(Owner::this(), rand::random());
        let file = segment::create_with(&self.inner.dir, &name, bytes, parts)?;
        Ok(Parcel { name, share, _locked: file })
    }
}

/// A part of the room, given back on drop.
#[derive(Debug)]
struct Share {
    room: Arc<Room>,
    bytes: u64,
}

impl Share {
    fn of(room: &Arc<Room>, wanted: u64) -> Result<Self, NoParcel> {
        let most = room.most;
        let more = |taken: u64| taken.checked_add(wanted).filter(|sum| *sum <= most);
        match room.taken.fetch_update(Relaxed, Relaxed, more) {
            Ok(_) => Ok(Self { room: room.clone(), bytes: wanted }),
            Err(taken) => Err(NoParcel::Full { wanted, taken, most }),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.bytes, Relaxed);
    }
}

/// Bytes in shared memory. Nobody finds them any more once this is dropped; whoever has opened them
/// by then goes on.
#[derive(Debug)]
pub struct Parcel {
    name: String,
    share: Share,
    /// Its lock says that this process lives.
    _locked: File,
}

impl Parcel {
    /// The name of the POSIX shared memory, without the slash in front.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> u64 {
        self.share.bytes
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        match fs::remove_file(self.share.room.dir.join(&self.name)) {
            Ok(()) => {}
            // Python's resource tracker removes what a process had open that ends.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(name = self.name, %error, "a parcel was not removed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::sweep_dir;

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_parcel_is_there_until_it_is_let_go_and_then_gives_its_room_back() {
        let dir = tempfile::tempdir_in(SHM_DIR).unwrap();
        let room = ParcelRoom::within(dir.path(), 10);
        let parcel = room.pack(&[&b"abc"[..], b"", b"defg"]).unwrap();
        assert_eq!(fs::read(dir.path().join(parcel.name())).unwrap(), b"abcdefg");
        assert_eq!((parcel.bytes(), room.taken()), (7, 7));
        let refused = room.pack(&[b"hijk"]).unwrap_err();
        assert!(matches!(refused, NoParcel::Full { wanted: 4, taken: 7, most: 10 }), "{refused}");
        let second = room.pack(&[b"hij"]).unwrap();
        assert_eq!((names(dir.path()).len(), sweep_dir(dir.path())), (2, 0), "it is in use");
        drop((parcel, second));
        assert_eq!((names(dir.path()).len(), room.taken()), (0, 0));
    }

    #[test]
    fn what_can_t_be_written_takes_no_room() {
        let room = ParcelRoom::within(Path::new("/dev/shm/chiasm-is-no-folder"), 10);
        let refused = room.pack(&[b"abc"]).unwrap_err();
        assert_eq!((refused.cause(), room.taken()), ("no_shared_memory", 0));
        assert!(ParcelRoom::within(Path::new(SHM_DIR), u64::MAX).pack(&[b"x"]).is_ok());
    }

    #[test]
    fn what_somebody_else_has_removed_is_gone_and_what_a_dead_process_left_is_swept() {
        let dir = tempfile::tempdir_in(SHM_DIR).unwrap();
        let room = ParcelRoom::within(dir.path(), 10);
        let parcel = room.pack(&[b"abc"]).unwrap();
        fs::remove_file(dir.path().join(parcel.name())).unwrap();
        drop(parcel);
        let left = segment::name(Owner { pid: u32::MAX, start: 7 }, 3);
        drop(segment::create_with(dir.path(), &left, 3, &[b"abc"]).unwrap());
        assert_eq!((sweep_dir(dir.path()), names(dir.path()).len()), (1, 0));
    }
}
