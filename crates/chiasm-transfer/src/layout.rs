//! The memory layout of an arena, version 1, as in `docs/shared-memory.md`.

use crate::ArenaProblem;

/// The version of the layout.
pub const LAYOUT_VERSION: u32 = 1;

pub(crate) const PAGE_BYTES: u64 = 4096;
/// The size of a cache line. Slots consist of whole lines.
pub(crate) const LINE_BYTES: u64 = 64;
pub(crate) const MAGIC: [u8; 8] = *b"CHIASMSM";
/// The offset of the table of leases.
pub(crate) const TABLE_OFFSET: u64 = PAGE_BYTES;
/// The size of a lease's entry.
pub(crate) const LEASE_BYTES: u64 = 32;

/// The offsets of the fields in a lease's entry.
pub(crate) mod lease {
    pub(crate) const STATE: u64 = 0;
    pub(crate) const GENERATION: u64 = 4;
    pub(crate) const OFFSET: u64 = 8;
    pub(crate) const LENGTH: u64 = 16;
    pub(crate) const RETURNED: u64 = 24;
}

/// The values of a lease's state.
pub(crate) mod state {
    pub(crate) const LENT: u32 = 1;
    pub(crate) const ENDED: u32 = 2;
}

/// The minimum size of slots that begin at a page boundary.
const LARGE_SLOT_BYTES: u64 = 64 << 10;

/// Returns the alignment of a slot of `bytes` bytes.
pub(crate) fn alignment(bytes: u64) -> u64 {
    if bytes >= LARGE_SLOT_BYTES { PAGE_BYTES } else { LINE_BYTES }
}

/// A reference to a lent slot. A request carries it instead of a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    /// The arena's number.
    pub arena: u64,
    /// The index in the arena's table of leases.
    pub lease: u32,
    /// The lease's generation.
    pub generation: u32,
    /// The slot's offset in the arena, in bytes.
    pub offset: u64,
    /// The slot's length in bytes.
    pub length: u64,
}

/// The first page of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) leases: u32,
    pub(crate) length: u64,
    pub(crate) slots: u64,
    pub(crate) owner_pid: u32,
    pub(crate) owner_start: u64,
    pub(crate) number: u64,
}

/// The size of the header's fields.
pub(crate) const HEADER_BYTES: usize = 56;

impl Header {
    /// Creates the header of an arena with `leases` leases, and `slot_bytes` bytes for slots after
    /// the table.
    pub(crate) fn new(
        leases: u32,
        slot_bytes: u64,
        owner_pid: u32,
        owner_start: u64,
        number: u64,
    ) -> Self {
        let table_end = TABLE_OFFSET + u64::from(leases) * LEASE_BYTES;
        let slots = table_end.next_multiple_of(PAGE_BYTES);
        Self { leases, length: slots + slot_bytes, slots, owner_pid, owner_start, number }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&LAYOUT_VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.leases.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.slots.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.owner_pid.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.owner_start.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// Decodes a header. `file_length` is the actual length of the file.
    ///
    /// # Errors
    /// [`ArenaProblem`] if the header is invalid.
    pub(crate) fn decode(
        bytes: &[u8; HEADER_BYTES],
        file_length: u64,
    ) -> Result<Self, ArenaProblem> {
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if bytes[0..8] != MAGIC {
            return Err(ArenaProblem::NotAnArena);
        }
        if u32_at(8) != LAYOUT_VERSION {
            return Err(ArenaProblem::Version);
        }
        let header = Self {
            leases: u32_at(12),
            length: u64_at(16),
            slots: u64_at(24),
            owner_pid: u32_at(32),
            owner_start: u64_at(40),
            number: u64_at(48),
        };
        let table_end = TABLE_OFFSET + u64::from(header.leases) * LEASE_BYTES;
        let fits = header.length == file_length
            && table_end <= header.slots
            && header.slots <= header.length;
        if !fits || !header.slots.is_multiple_of(PAGE_BYTES) {
            return Err(ArenaProblem::Size);
        }
        Ok(header)
    }

    /// Returns the offset of a lease's entry; `None` if the index is not in the table.
    pub(crate) fn entry_offset(&self, index: u32) -> Option<u64> {
        (index < self.leases).then(|| TABLE_OFFSET + u64::from(index) * LEASE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_header_decodes_to_itself() {
        let header = Header::new(1000, 1 << 20, 4711, 99, 0xfeed_0000_0000_beef);
        assert_eq!(header.slots, 36_864);
        assert_eq!(Header::decode(&header.encode(), header.length), Ok(header));
    }

    #[test]
    fn header_that_does_not_fit_its_file_is_refused() {
        let header = Header::new(10, 1 << 20, 1, 1, 1);
        assert!(Header::decode(&header.encode(), header.length - 1).is_err());
        for wrong in [
            Header { leases: 1000, ..header },
            Header { slots: header.slots + 1, ..header },
            Header { slots: header.length + PAGE_BYTES, ..header },
        ] {
            assert!(Header::decode(&wrong.encode(), header.length).is_err(), "{wrong:?}");
        }
        let mut bytes = header.encode();
        bytes[8] = 2;
        assert_eq!(Header::decode(&bytes, header.length), Err(ArenaProblem::Version));
        bytes[0] = b'X';
        assert_eq!(Header::decode(&bytes, header.length), Err(ArenaProblem::NotAnArena));
    }
}
