//! The side whose memory is read.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::library::Session;
use crate::pool::{Piece, Pool};
use crate::{HEADER_BYTES, NixlError, Settings, TRAILER_BYTES};

/// The allowance for the clocks of two machines and the network between them.
const SLACK: Duration = Duration::from_secs(1);

/// A pool of memory that readers on other machines may read.
pub struct Lender {
    pool: Pool,
    metadata: Bytes,
    read_timeout: Duration,
    /// The library serves readers on a thread of its own.
    _session: Mutex<Session>,
}

impl Lender {
    /// Opens the library and registers memory with it. Takes about a second.
    ///
    /// # Errors
    /// If the library can't be opened or fails.
    pub fn start(settings: &Settings) -> Result<Self, NixlError> {
        let pool = Pool::new(settings.pool_bytes).map_err(NixlError::Pool)?;
        let name = format!("chiasm-lender-{:032x}", rand::random::<u128>());
        let mut session =
            Session::open(&settings.library, &name, settings.devices.as_deref(), &pool)?;
        let metadata = session.metadata()?.into();
        let read_timeout = settings.read_timeout;
        Ok(Self { pool, metadata, read_timeout, _session: Mutex::new(session) })
    }

    /// Returns the metadata that readers need to access this memory, some hundred bytes.
    pub fn metadata(&self) -> &Bytes {
        &self.metadata
    }

    /// Returns the maximum duration of a read, from when the reader learns of the loan.
    pub fn read_timeout(&self) -> Duration {
        self.read_timeout
    }

    /// Copies the parts, one after the other, into memory that can be read. Returns `None` if there
    /// is no room for them now. Must not be called on async threads.
    pub fn lend(&self, parts: &[Bytes]) -> Option<Loan> {
        let bytes = parts.iter().try_fold(0_usize, |sum, part| sum.checked_add(part.len()))?;
        let mut piece = self.pool.allocate(bytes.checked_add(HEADER_BYTES + TRAILER_BYTES)?)?;
        // No loan has the number 0.
        let number = rand::random_range(1..=u64::MAX);
        let memory = piece.as_mut();
        let mut at = HEADER_BYTES;
        for part in parts {
            memory[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        write_number(memory, number);
        Some(Loan { piece: Some(piece), number, reuse_delay: self.read_timeout + SLACK })
    }
}

/// Writes the number of a loan into the header and the trailer of its memory.
fn write_number(memory: &mut [u8], number: u64) {
    let trailer = memory.len() - TRAILER_BYTES;
    memory[..TRAILER_BYTES].copy_from_slice(&number.to_le_bytes());
    memory[trailer..].copy_from_slice(&number.to_le_bytes());
}

/// Bytes that may be read until the loan is dropped.
///
/// Reads that have begun by then still get their bytes: after the drop the memory is not reused
/// until they must have ended.
pub struct Loan {
    piece: Option<Piece>,
    number: u64,
    /// The time for which the memory is not reused after the loan.
    reuse_delay: Duration,
}

impl Loan {
    /// Returns the address of the memory, for the reader.
    pub fn address(&self) -> u64 {
        self.piece.as_ref().map_or(0, |piece| piece.as_ref().as_ptr() as u64)
    }

    /// Returns the number of the loan, which is unique.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Ends the loan after the reader has reported that its read has ended, with or without
    /// success.
    ///
    /// The reader ignores whatever it may still read, so the memory is reused at once.
    pub fn release(mut self) {
        self.piece = None;
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(mut piece) = self.piece.take() {
            write_number(piece.as_mut(), 0);
            piece.release_at(Instant::now() + self.reuse_delay);
        }
    }
}
