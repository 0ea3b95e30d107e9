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
use crate::not_read::NotRead;
use crate::pool::{Piece, Pool};
use crate::reading::{Order, run};
use crate::{HEAD, MOST_ABANDONED, NixlError, Settings, TAIL};

/// Of what a lender says of its memory, which is some hundred bytes.
const MOST_METADATA: usize = 64 << 10;
/// How much later than its deadline a reading is known to have missed it.
const GRACE: Duration = Duration::from_millis(100);
/// How long the end of a reader may take, in which lenders are told.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// Reads what lenders lend, on a thread of its own.
pub struct Reader {
    pool: Pool,
    within: Duration,
    /// `None` once it ends.
    orders: Option<Sender<Order>>,
    /// Readings whose memory is never used again.
    abandoned: Arc<AtomicUsize>,
    /// Fails when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

/// A loan, as its reader is told of it.
#[derive(Clone, Debug)]
pub struct Lent {
    /// What the lender says of its memory.
    pub metadata: Bytes,
    /// Where the loan lies in it.
    pub address: u64,
    /// Which loan it is.
    pub number: u64,
    /// How many bytes are lent.
    pub bytes: u64,
    /// For how long from now.
    pub within: Duration,
}

impl Reader {
    /// Opens the library and makes memory known to it. Takes about a second.
    ///
    /// # Errors
    /// The library is none, or refuses.
    pub fn start(settings: &Settings) -> Result<Self, NixlError> {
        let pool = Pool::new(settings.pool_bytes).map_err(NixlError::Pool)?;
        let name = format!("chiasm-reader-{:032x}", rand::random::<u128>());
        let session = Session::open(&settings.library, &name, settings.devices.as_deref(), &pool)?;
        let (orders, taken) = channel();
        let (ending, ended) = channel();
        let abandoned = Arc::new(AtomicUsize::new(0));
        let counted = abandoned.clone();
        let reads = move || {
            let _ending: Sender<()> = ending;
            run(session, &taken, &counted);
        };
        thread::Builder::new().name("nixl".to_owned()).spawn(reads).map_err(NixlError::Thread)?;
        Ok(Self {
            pool,
            within: settings.within,
            orders: Some(orders),
            abandoned,
            ended: Mutex::new(ended),
        })
    }

    /// Whether so many readings have missed their deadline that nothing is read any more.
    pub fn is_off(&self) -> bool {
        self.abandoned.load(Relaxed) >= MOST_ABANDONED
    }

    /// How many readings have missed their deadline.
    pub fn abandoned(&self) -> usize {
        self.abandoned.load(Relaxed)
    }

    /// Reads a loan. Its bytes are the pool's until the last clone of what is returned is dropped.
    ///
    /// # Errors
    /// Nothing was read, and what may come later is not taken.
    pub async fn read(&self, lent: Lent) -> Result<Bytes, NotRead> {
        let Lent { metadata, address, number, bytes, within } = lent;
        let orders = self.orders.as_ref().filter(|_| !self.is_off()).ok_or(NotRead::Off)?;
        if metadata.len() > MOST_METADATA {
            return Err(NotRead::Nonsense);
        }
        if number == 0 {
            return Err(NotRead::Over);
        }
        let room = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_add(HEAD + TAIL));
        let into = room.and_then(|room| self.pool.take(room)).ok_or(NotRead::NoRoom(bytes))?;
        let within = within.min(self.within);
        let (answer, answered) = oneshot::channel();
        let order = Order { metadata, address, into, until: Instant::now() + within, answer };
        // Its thread may be held up in the library: whoever waits has a deadline all the same.
        let gone = || NotRead::Slow("it took too long");
        orders.send(order).map_err(|_| gone())?;
        let read = timeout(within + GRACE, answered).await;
        let piece = read.map_err(|_| gone())?.map_err(|_| gone())??;
        let end = piece.as_ref().len() - TAIL;
        match is_of(&piece, number) {
            true => Ok(Bytes::from_owner(piece).slice(HEAD..end)),
            false => Err(NotRead::Over),
        }
    }
}

fn is_of(piece: &Piece, number: u64) -> bool {
    let (piece, number) = (piece.as_ref(), number.to_le_bytes());
    piece[..TAIL] == number && piece[piece.len() - TAIL..] == number
}

impl Drop for Reader {
    /// Waits a moment until lenders have been told, whose network cards may otherwise keep what
    /// belongs to this reader.
    fn drop(&mut self) {
        self.orders = None;
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(ENDS_WITHIN);
    }
}
