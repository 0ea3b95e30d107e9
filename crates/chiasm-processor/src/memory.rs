//! The memory of an item: its file, followed by the tensors that a child makes of it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::buffer::spare_capacity;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
use rustix::io::{Errno, pread};

/// The number of bytes of a region that are kept for the next item of the same child. Allocating
/// and clearing their pages again would take longer than writing them.
const MAX_SPARE_BYTES: u64 = 32 << 20;
/// The number of regions that are kept per child: one for the last item, and one for the previous
/// item, which may be read while the child is already busy again.
const MAX_SPARES: usize = 2;

/// The anonymous shared memory of one item.
///
/// It is open in this process and in one child. The child may reuse it for its next item; no other
/// child can access it. The child can change the contents at any time, so they are only read and
/// written by copies.
#[derive(Debug)]
pub(crate) struct Memory {
    /// `None` only while `self` is dropped.
    region: Option<Region>,
    spares: Weak<Spares>,
}

/// A memory file and its length.
#[derive(Debug)]
struct Region {
    file: File,
    length: u64,
}

/// The regions of a child's earlier items. They are freed with the child.
#[derive(Debug, Default)]
pub(crate) struct Spares(Mutex<Vec<Region>>);

impl Spares {
    /// Returns memory that begins with a file, given in `pieces`. Its size is `length` bytes, or
    /// more if the file is longer.
    pub(crate) fn allocate(
        self: &Arc<Self>,
        pieces: &[impl AsRef<[u8]>],
        length: u64,
    ) -> io::Result<Memory> {
        let file_bytes = pieces.iter().map(|piece| piece.as_ref().len() as u64).sum();
        let length = length.max(file_bytes);
        let spare = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let region = match spare.filter(|spare| spare.length == length && spare.has_full_length()) {
            Some(spare) => spare,
            None => Region::new(length)?,
        };
        let mut offset = 0;
        for piece in pieces {
            let piece = piece.as_ref();
            region.file.write_all_at(piece, offset)?;
            offset += piece.len() as u64;
        }
        Ok(Memory { region: Some(region), spares: Arc::downgrade(self) })
    }

    /// Keeps a region for the next item, unless there are enough spares.
    fn put_back(&self, region: Region) {
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spares.len() < MAX_SPARES && region.free_pages_beyond(MAX_SPARE_BYTES).is_ok() {
            spares.push(region);
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
        // A compromised child must not fill the machine's memory by growing the file.
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, length })
    }

    /// Returns `false` if a child has truncated the file.
    fn has_full_length(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.len() == self.length)
    }

    /// Frees the pages beyond the first `bytes` bytes.
    fn free_pages_beyond(&self, bytes: u64) -> io::Result<()> {
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
    /// Returns the size in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.region.as_ref().map_or(0, |region| region.length)
    }

    /// Returns the open file, for the child.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.region.as_ref().map(|region| region.file.as_fd())
    }

    /// Copies the bytes from `offset` on to `out`.
    pub(crate) fn read(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.region {
            Some(region) => region.file.read_exact_at(out, offset),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Returns a copy of `length` bytes from `offset` on.
    pub(crate) fn copy(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let region = self.region.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut copy = Vec::with_capacity(length);
        while copy.len() < length {
            let at = offset + copy.len() as u64;
            match pread(&region.file, spare_capacity(&mut copy), at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // The vector may have room for more, which was read as well.
        copy.truncate(length);
        Ok(copy)
    }

    #[cfg(test)]
    pub(crate) fn truncate(&self, length: u64) {
        self.region.as_ref().unwrap().file.set_len(length).unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Some(region), Some(spares)) = (self.region.take(), self.spares.upgrade()) {
            spares.put_back(region);
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

    /// Returns the allocated bytes of each spare region.
    fn allocated_bytes(spares: &Spares) -> Vec<u64> {
        spares
            .0
            .lock()
            .unwrap()
            .iter()
            .map(|region| region.file.metadata().unwrap().blocks() * 512)
            .collect()
    }

    #[test]
    fn dropped_memory_is_reused_by_the_same_child() {
        let spares = Arc::<Spares>::default();
        let first = spares.allocate(&[b"first"], 1 << 20).unwrap();
        let second = spares.allocate(&[b"second"], 1 << 20).unwrap();
        let third = spares.allocate(&[b"third"], 1 << 20).unwrap();
        let inodes = [inode(&first), inode(&second), inode(&third)];
        assert!(inodes[0] != inodes[1] && inodes[1] != inodes[2]);
        drop((first, second));
        let again = spares.allocate(&[b"a"], 1 << 20).unwrap();
        let mut out = [0; 2];
        again.read(&mut out, 0).unwrap();
        assert_eq!((inode(&again), &out), (inodes[1], b"ae"));
        drop((again, third));
        assert_eq!(allocated_bytes(&spares).len(), MAX_SPARES);
        let other = spares.allocate(&[b"a"], 2 << 20).unwrap();
        assert!(!inodes.contains(&inode(&other)) && other.length() == 2 << 20);
    }

    #[test]
    fn large_memory_is_trimmed_truncated_memory_is_freed() {
        let spares = Arc::<Spares>::default();
        let large =
            spares.allocate(&[vec![1; (MAX_SPARE_BYTES + (8 << 20)) as usize]], 64 << 20).unwrap();
        drop(large);
        assert_eq!(allocated_bytes(&spares), [MAX_SPARE_BYTES]);
        let again = spares.allocate(&[b""], 64 << 20).unwrap();
        let truncated = inode(&again);
        again.truncate(5);
        drop(again);
        assert_ne!(inode(&spares.allocate(&[b""], 64 << 20).unwrap()), truncated);
    }

    #[test]
    fn pieces_follow_each_other() {
        let memory = Arc::<Spares>::default().allocate(&["ab", "", "cde"], 8).unwrap();
        assert_eq!(memory.copy(1, 5).unwrap(), b"bcde\0");
        assert!(memory.copy(4, 5).is_err());
    }

    #[test]
    fn memory_outlives_its_child() {
        let spares = Arc::<Spares>::default();
        let memory = spares.allocate(&[b"abc"], 100).unwrap();
        drop(spares);
        let mut out = [0; 3];
        memory.read(&mut out, 0).unwrap();
        assert_eq!(&out, b"abc");
        drop(memory);
    }
}
