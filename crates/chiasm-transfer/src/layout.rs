//! The bytes of an arena, version 1; the table is in `docs/shared-memory.md`.

use crate::ArenaProblem;

/// Version of the layout below.
pub const LAYOUT_VERSION: u32 = 1;

pub(crate) const PAGE: u64 = 4096;
/// Slots are whole cache lines.
pub(crate) const LINE: u64 = 64;
pub(crate) const MAGIC: [u8; 8] = *b"CHIASMSM";
/// The table of leases begins here.
pub(crate) const TABLE: u64 = PAGE;
/// Bytes of one lease.
pub(crate) const LEASE_BYTES: u64 = 32;

/// Offsets of a lease's fields.
pub(crate) mod lease {
    pub(crate) const STATE: u64 = 0;
    pub(crate) const GENERATION: u64 = 4;
    pub(crate) const OFFSET: u64 = 8;
    pub(crate) const LENGTH: u64 = 16;
    pub(crate) const RETURNED: u64 = 24;
}

/// Values of a lease's state.
pub(crate) mod state {
    pub(crate) const LENT: u32 = 1;
    pub(crate) const TAKEN_BACK: u32 = 2;
}

/// Slots of this size and more begin at a page.
const LARGE: u64 = 64 << 10;

/// Multiple at which a slot of this many bytes begins.
pub(crate) fn alignment(bytes: u64) -> u64 {
    if bytes >= LARGE { PAGE } else { LINE }
}

/// What a request carries in place of a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    /// The arena's number.
    pub arena: u64,
    /// Index into its table of leases.
    pub lease: u32,
    /// The lease's generation.
    pub generation: u32,
    /// The slot's beginning, in bytes from the start of the arena.
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

/// Bytes of the header that have a meaning.
pub(crate) const HEADER_BYTES: usize = 56;

impl Header {
    /// The header of an arena with so many leases, and so many bytes for slots behind the table.
    pub(crate) fn new(
        leases: u32,
        slot_bytes: u64,
        owner_pid: u32,
        owner_start: u64,
        number: u64,
    ) -> Self {
        let slots = (TABLE + u64::from(leases) * LEASE_BYTES).next_multiple_of(PAGE);
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

    /// Reads a header. `file_length` is the length that the file really has.
    ///
    /// # Errors
    /// What is wrong with it.
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
        let table_end = TABLE + u64::from(header.leases) * LEASE_BYTES;
        let fits = header.length == file_length
            && table_end <= header.slots
            && header.slots <= header.length;
        if !fits || !header.slots.is_multiple_of(PAGE) {
            return Err(ArenaProblem::Size);
        }
        Ok(header)
    }

    /// The offset at which a lease's entry begins; `None` if it is not in the table.
    pub(crate) fn lease_at(&self, index: u32) -> Option<u64> {
        (index < self.leases).then(|| TABLE + u64::from(index) * LEASE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let header = Header::new(1000, 1 << 20, 4711, 99, 0xfeed_0000_0000_beef);
        assert_eq!(header.slots, 36_864);
        assert_eq!(Header::decode(&header.encode(), header.length), Ok(header));
    }

    #[test]
    fn a_header_that_does_not_fit_its_file_is_refused() {
        let header = Header::new(10, 1 << 20, 1, 1, 1);
        assert!(Header::decode(&header.encode(), header.length - 1).is_err());
        for wrong in [
            Header { leases: 1000, ..header },
            Header { slots: header.slots + 1, ..header },
            Header { slots: header.length + PAGE, ..header },
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
