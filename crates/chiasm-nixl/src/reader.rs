//! The side that reads.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::library::Session;
use crate::pool::{Piece, Pool};
use crate::read_error::ReadError;
use crate::read_thread::{ReadJob, run};
use crate::{HEADER_BYTES, MAX_ABANDONED_READS, NixlError, Settings, TRAILER_BYTES};

/// The maximum length of a lender's metadata, which is usually some hundred bytes.
const MAX_METADATA_BYTES: usize = 64 << 10;
/// The time after a read's deadline in which the thread reports that the read has timed out.
const GRACE: Duration = Duration::from_millis(100);
/// The maximum time to shut down a reader, in which lenders are notified.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// A reader of lent memory. Reads run on a thread of its own.
pub struct Reader {
    pool: Pool,
    read_timeout: Duration,
    /// `None` once the reader is dropped.
    jobs: Option<Sender<ReadJob>>,
    /// The number of reads whose memory is never used again.
    abandoned: Arc<AtomicUsize>,
    /// Disconnected when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

/// A loan, as described to its reader.
#[derive(Clone, Debug)]
pub struct RemoteLoan {
    /// The lender's metadata.
    pub metadata: Bytes,
    /// The address of the loan in the lender's memory.
    pub address: u64,
    /// The number of the loan.
    pub number: u64,
    /// The number of lent bytes.
    pub bytes: u64,
    /// The duration of the loan from now.
    pub timeout: Duration,
}

impl Reader {
    /// Opens the library and registers memory with it. Takes about a second.
    ///
    /// # Errors
    /// If the library can't be opened or fails.
    pub fn start(settings: &Settings) -> Result<Self, NixlError> {
        let pool = Pool::new(settings.pool_bytes).map_err(NixlError::Pool)?;
        let name = format!("chiasm-reader-{:032x}", rand::random::<u128>());
        let session = Session::open(&settings.library, &name, settings.devices.as_deref(), &pool)?;
        let (jobs, received_jobs) = channel();
        let (ended_guard, ended) = channel();
        let abandoned = Arc::new(AtomicUsize::new(0));
        let thread_abandoned = abandoned.clone();
        let main = move || {
            let _ended_guard: Sender<()> = ended_guard;
            run(session, &received_jobs, &thread_abandoned);
        };
        thread::Builder::new().name("nixl".to_owned()).spawn(main).map_err(NixlError::Thread)?;
        Ok(Self {
            pool,
            read_timeout: settings.read_timeout,
            jobs: Some(jobs),
            abandoned,
            ended: Mutex::new(ended),
        })
    }

    /// Returns `true` if nothing is read any more, because too many reads have timed out.
    pub fn is_disabled(&self) -> bool {
        self.abandoned.load(Relaxed) >= MAX_ABANDONED_READS
    }

    /// Returns the number of abandoned reads, which have timed out or whose memory NIXL keeps.
    pub fn abandoned_reads(&self) -> usize {
        self.abandoned.load(Relaxed)
    }

    /// Reads a loan. The bytes occupy the pool until the last clone of the result is dropped.
    ///
    /// # Errors
    /// If the loan was not read in time. Bytes that arrive later are ignored.
    pub async fn read(&self, loan: RemoteLoan) -> Result<Bytes, ReadError> {
        let RemoteLoan { metadata, address, number, bytes, timeout: loan_timeout } = loan;
        let jobs = self.jobs.as_ref().filter(|_| !self.is_disabled()).ok_or(ReadError::Disabled)?;
        if metadata.len() > MAX_METADATA_BYTES {
            return Err(ReadError::InvalidMetadata);
        }
        if number == 0 {
            return Err(ReadError::LoanEnded);
        }
        let length = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| bytes.checked_add(HEADER_BYTES + TRAILER_BYTES));
        let into = length.and_then(|length| self.pool.allocate(length));
        let into = into.ok_or(ReadError::NoRoom(bytes))?;
        let read_timeout = loan_timeout.min(self.read_timeout);
        let (reply, replied) = oneshot::channel();
        let deadline = Instant::now() + read_timeout;
        let job = ReadJob { metadata, address, into, deadline, reply };
        // A second deadline, because the thread may be blocked in the library.
        let timed_out = || ReadError::TimedOut("the read took too long");
        jobs.send(job).map_err(|_| timed_out())?;
        let replied = timeout(read_timeout + GRACE, replied).await;
        let piece = replied.map_err(|_| timed_out())?.map_err(|_| timed_out())??;
        if !has_number(&piece, number) {
            return Err(ReadError::LoanEnded);
        }
        let end = piece.as_ref().len() - TRAILER_BYTES;
        Ok(Bytes::from_owner(piece).slice(HEADER_BYTES..end))
    }
}

/// Returns `true` if header and trailer have the number of a loan.
fn has_number(piece: &Piece, number: u64) -> bool {
    let memory = piece.as_ref();
    let number = number.to_le_bytes();
    memory[..TRAILER_BYTES] == number && memory[memory.len() - TRAILER_BYTES..] == number
}

impl Drop for Reader {
    /// Waits up to `SHUTDOWN_TIMEOUT` until lenders are notified. Their network cards may
    /// otherwise keep resources of this reader.
    fn drop(&mut self) {
        self.jobs = None;
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(SHUTDOWN_TIMEOUT);
    }
}
