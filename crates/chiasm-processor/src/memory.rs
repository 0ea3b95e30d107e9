//! An item's memory: its file, and behind that the tensors that a child makes of it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};

/// Bytes of an item's memory that are kept for the next item of the same child: to find and clear
/// their pages again takes longer than to write them.
const KEPT_BYTES: u64 = 32 << 20;
/// Memories that are kept: of the item that a child made last, and of the one before, which is read
/// while the child is busy again.
const KEPT: usize = 2;

/// Memory that has no name. It is read and written by copies: whoever else has it open can change
/// its contents, but not what has been copied. It is open in this process and in one child, whose
/// next item may come in it; no other child ever sees it.
#[derive(Debug)]
pub(crate) struct Memory {
    /// There until this is dropped.
    region: Option<Region>,
    home: Weak<Spares>,
}

/// The bytes themselves.
#[derive(Debug)]
struct Region {
    file: File,
    length: u64,
}

/// Memory of a child's earlier items, gone with the child.
#[derive(Debug, Default)]
pub(crate) struct Spares(Mutex<Vec<Region>>);

impl Spares {
    /// Memory of `length` bytes, or more if the item's file has more, that begins with this file.
    pub(crate) fn memory(self: &Arc<Self>, file: &[u8], length: u64) -> io::Result<Memory> {
        let length = length.max(file.len() as u64);
        let spare = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let region = match spare.filter(|spare| spare.length == length && spare.is_whole()) {
            Some(spare) => spare,
            None => Region::new(length)?,
        };
        region.file.write_all_at(file, 0)?;
        Ok(Memory { region: Some(region), home: Arc::downgrade(self) })
    }

    fn keep(&self, region: Region) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT && region.give_back_beyond(KEPT_BYTES).is_ok() {
            kept.push(region);
        }
    }
}

impl Region {
    fn new(length: u64) -> io::Result<Self> {
        let file = File::from(memfd_create(
            "chiasm-item",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?);
        file.set_len(length)?;
        // A child that has been taken over can't fill the machine's memory with it.
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, length })
    }

    /// A child may have cut it off.
    fn is_whole(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.len() == self.length)
    }

    /// Lets the pages behind so many bytes go.
    fn give_back_beyond(&self, bytes: u64) -> io::Result<()> {
        let Some(rest) = self.length.checked_sub(bytes).filter(|&rest| rest > 0) else {
            return Ok(());
        };
        Ok(fallocate(
            &self.file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            bytes,
            rest,
        )?)
    }
}

impl Memory {
    pub(crate) fn length(&self) -> u64 {
        self.region.as_ref().map_or(0, |region| region.length)
    }

    /// The open file, for the child.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.region.as_ref().map(|region| region.file.as_fd())
    }

    /// Copies bytes from `offset` on.
    pub(crate) fn read(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.region {
            Some(region) => region.file.read_exact_at(out, offset),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    #[cfg(test)]
    pub(crate) fn cut_off(&self, length: u64) {
        self.region.as_ref().unwrap().file.set_len(length).unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Some(region), Some(home)) = (self.region.take(), self.home.upgrade()) {
            home.keep(region);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn inode(memory: &Memory) -> u64 {
        memory.region.as_ref().unwrap().file.metadata().unwrap().ino()
    }

    fn blocks(spares: &Spares) -> Vec<u64> {
        spares
            .0
            .lock()
            .unwrap()
            .iter()
            .map(|region| region.file.metadata().unwrap().blocks() * 512)
            .collect()
    }

    #[test]
    fn a_childs_memory_is_used_again_when_nobody_has_it_any_more() {
        let spares = Arc::<Spares>::default();
        let first = spares.memory(b"first", 1 << 20).unwrap();
        let second = spares.memory(b"second", 1 << 20).unwrap();
        let third = spares.memory(b"third", 1 << 20).unwrap();
        let (of_first, of_second, of_third) = (inode(&first), inode(&second), inode(&third));
        assert!(of_first != of_second && of_second != of_third);
        drop((first, second));
        let again = spares.memory(b"a", 1 << 20).unwrap();
        let mut out = [0; 2];
        again.read(&mut out, 0).unwrap();
        assert_eq!((inode(&again), &out), (of_second, b"ae"));
        drop((again, third));
        // Two are enough.
        assert_eq!(blocks(&spares).len(), KEPT);
        let other = spares.memory(b"a", 2 << 20).unwrap();
        assert!(
            ![of_first, of_second, of_third].contains(&inode(&other)) && other.length() == 2 << 20
        );
    }

    #[test]
    fn little_is_kept_of_a_large_one_and_nothing_of_one_that_was_cut_off() {
        let spares = Arc::<Spares>::default();
        let large = spares.memory(&vec![1; (KEPT_BYTES + (8 << 20)) as usize], 64 << 20).unwrap();
        drop(large);
        assert_eq!(blocks(&spares), [KEPT_BYTES]);
        let again = spares.memory(b"", 64 << 20).unwrap();
        let whole = inode(&again);
        again.cut_off(5);
        drop(again);
        assert_ne!(inode(&spares.memory(b"", 64 << 20).unwrap()), whole);
    }

    #[test]
    fn memory_goes_with_its_child() {
        let spares = Arc::<Spares>::default();
        let memory = spares.memory(b"abc", 100).unwrap();
        drop(spares);
        let mut out = [0; 3];
        memory.read(&mut out, 0).unwrap();
        assert_eq!(&out, b"abc");
        drop(memory);
    }
}
