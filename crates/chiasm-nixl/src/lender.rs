//! The side whose memory is read.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::library::Session;
use crate::pool::{Piece, Pool};
use crate::{HEAD, NixlError, Settings, TAIL};

/// What clocks of two machines and the way between them may differ by while a loan is read.
const SLACK: Duration = Duration::from_secs(1);

/// Memory that readers on other machines may read, and what is lent of it.
pub struct Lender {
    pool: Pool,
    metadata: Bytes,
    within: Duration,
    /// The library answers readers by a thread of its own.
    _session: Mutex<Session>,
}

impl Lender {
    /// Opens the library and makes memory known to it. Takes about a second.
    ///
    /// # Errors
    /// The library is none, or refuses.
    pub fn start(settings: &Settings) -> Result<Self, NixlError> {
        let pool = Pool::new(settings.pool_bytes).map_err(NixlError::Pool)?;
        let name = format!("chiasm-lender-{:032x}", rand::random::<u128>());
        let mut session =
            Session::open(&settings.library, &name, settings.devices.as_deref(), &pool)?;
        let metadata = session.metadata()?.into();
        Ok(Self { pool, metadata, within: settings.within, _session: Mutex::new(session) })
    }

    /// What readers need to know of this memory, some hundred bytes.
    pub fn metadata(&self) -> &Bytes {
        &self.metadata
    }

    /// How long a reading of a loan may take, from when its reader hears of it.
    pub fn within(&self) -> Duration {
        self.within
    }

    /// Copies bytes, one after the other, to where they can be read; `None` if there is no room for
    /// them now. Not for async threads.
    pub fn lend(&self, parts: &[Bytes]) -> Option<Loan> {
        let bytes = parts.iter().try_fold(0_usize, |sum, part| sum.checked_add(part.len()))?;
        let mut piece = self.pool.take(bytes.checked_add(HEAD + TAIL)?)?;
        // 0 is that of no loan.
        let number = rand::random_range(1..=u64::MAX);
        let memory = piece.as_mut();
        let mut at = HEAD;
        for part in parts {
            memory[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        sign(memory, number);
        Some(Loan { piece: Some(piece), number, rests: self.within + SLACK })
    }
}

fn sign(memory: &mut [u8], number: u64) {
    let tail = memory.len() - TAIL;
    memory[..TAIL].copy_from_slice(&number.to_le_bytes());
    memory[tail..].copy_from_slice(&number.to_le_bytes());
}

/// Bytes that may be read, until this is dropped: readings that have begun by then read what they
/// were to, and their memory rests for as long as that may take.
pub struct Loan {
    piece: Option<Piece>,
    number: u64,
    rests: Duration,
}

impl Loan {
    /// Where it lies, for the reader.
    pub fn address(&self) -> u64 {
        self.piece.as_ref().map_or(0, |piece| piece.as_ref().as_ptr() as u64)
    }

    /// What tells it from all others.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The reader has said that it is done with it, whatever came of it: what it may still read it
    /// does not take. So the memory is free at once.
    pub fn returned(mut self) {
        self.piece = None;
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(mut piece) = self.piece.take() {
            sign(piece.as_mut(), 0);
            piece.rest(Instant::now() + self.rests);
        }
    }
}
