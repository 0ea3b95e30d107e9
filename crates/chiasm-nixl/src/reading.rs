//! The thread of a reader: what is under way, and what was abandoned.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::library::{Reading, Session};
use crate::not_read::NotRead;
use crate::pool::Piece;
use crate::{MOST_ABANDONED, NixlError};

/// Lenders whose memory is known at a time: frontends, and those before them that are gone.
const MOST_LENDERS: usize = 256;
/// How long nothing is read from a lender after a reading of its memory has missed its deadline:
/// each would cost as much.
const PAUSE: Duration = Duration::from_secs(30);
/// How soon a reading is looked at again: after an eighth of the time that it has taken, within
/// these bounds.
const SOONEST: Duration = Duration::from_micros(20);
const LATEST: Duration = Duration::from_millis(1);

/// A reading that is asked for.
pub(crate) struct Order {
    pub(crate) metadata: Bytes,
    pub(crate) address: u64,
    pub(crate) into: Piece,
    pub(crate) until: Instant,
    pub(crate) answer: oneshot::Sender<Result<Piece, NotRead>>,
}

struct UnderWay {
    reading: Reading,
    metadata: Bytes,
    since: Instant,
    until: Instant,
    answer: oneshot::Sender<Result<Piece, NotRead>>,
}

/// Somebody else's memory.
struct Lender {
    name: CString,
    used: Instant,
    under_way: usize,
    paused_until: Option<Instant>,
    /// A reading has failed: it is forgotten when none is under way.
    has_failed: bool,
}

/// Reads until nobody can order any more.
pub(crate) fn run(session: Session, orders: &Receiver<Order>, abandoned: &AtomicUsize) {
    let mut desk = Desk { session, lenders: HashMap::new(), under_way: Vec::new(), abandoned };
    loop {
        let order = match desk.next_look() {
            None => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(pause) => orders.recv_timeout(pause),
        };
        match order {
            Ok(order) => desk.begin(order),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if desk.under_way.is_empty() => break,
            // What is under way ends or misses its deadline.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(LATEST),
        }
        desk.look();
    }
    desk.forget_all();
}

struct Desk<'a> {
    session: Session,
    /// By what they say of themselves.
    lenders: HashMap<Bytes, Lender>,
    under_way: Vec<UnderWay>,
    abandoned: &'a AtomicUsize,
}

impl Desk<'_> {
    /// After which time there may be something to see; `None` if nothing is under way.
    fn next_look(&self) -> Option<Duration> {
        let ages = self.under_way.iter().map(|under_way| under_way.since.elapsed());
        ages.min().map(|age| (age / 8).clamp(SOONEST, LATEST))
    }

    fn begin(&mut self, order: Order) {
        let Order { metadata, address, into, until, answer } = order;
        let since = Instant::now();
        match self.try_begin(&metadata, address, into, until) {
            Ok(reading) => {
                self.under_way.push(UnderWay { reading, metadata, since, until, answer })
            }
            Err(why) => drop(answer.send(Err(why))),
        }
    }

    fn try_begin(
        &mut self,
        metadata: &Bytes,
        address: u64,
        into: Piece,
        until: Instant,
    ) -> Result<Reading, NotRead> {
        let now = Instant::now();
        if now >= until {
            return Err(NotRead::Slow("others took too long"));
        }
        if !self.lenders.contains_key(metadata) {
            self.make_room()?;
            let name = self.session.load(metadata)?;
            let lender =
                Lender { name, used: now, under_way: 0, paused_until: None, has_failed: false };
            self.lenders.insert(metadata.clone(), lender);
        }
        let Some(lender) = self.lenders.get_mut(metadata) else { return Err(NotRead::Off) };
        if lender.paused_until.is_some_and(|until| now < until) {
            return Err(NotRead::Slow("a reading of that memory took too long a moment ago"));
        }
        lender.used = now;
        match self.session.read(into, &lender.name, address) {
            Ok(reading) => {
                lender.under_way += 1;
                Ok(reading)
            }
            Err(error) => {
                lender.has_failed = true;
                if matches!(error, NixlError::Kept) {
                    self.count_abandoned();
                }
                self.settle(metadata);
                Err(error.into())
            }
        }
    }

    /// Looks after all that is under way.
    fn look(&mut self) {
        let mut at = 0;
        while let Some(under_way) = self.under_way.get(at) {
            let ended = match Instant::now() >= under_way.until {
                // Whatever NIXL says: what is read later may be something else.
                true => None,
                false => match self.session.has_ended(&under_way.reading) {
                    Ok(false) => {
                        at += 1;
                        continue;
                    }
                    // This process may have been stopped in between.
                    Ok(true) if Instant::now() >= under_way.until => None,
                    Ok(true) => Some(Ok(())),
                    Err(error) => Some(Err(error)),
                },
            };
            let under_way = self.under_way.swap_remove(at);
            self.ended(under_way, ended);
        }
    }

    /// A reading has ended, or missed its deadline if there is no end.
    fn ended(&mut self, under_way: UnderWay, ended: Option<Result<(), NixlError>>) {
        let UnderWay { reading, metadata, answer, .. } = under_way;
        let lender = self.lenders.get_mut(&metadata);
        let answered = match ended {
            None => {
                if let Some(lender) = lender {
                    lender.under_way -= 1;
                    lender.paused_until = Some(Instant::now() + PAUSE);
                }
                reading.abandon();
                self.count_abandoned();
                Err(NotRead::Slow("it took too long"))
            }
            Some(ended) => {
                let piece = self.session.end(reading);
                if let Some(lender) = lender {
                    lender.under_way -= 1;
                    lender.has_failed |= ended.is_err();
                }
                if piece.is_none() {
                    self.count_abandoned();
                }
                self.settle(&metadata);
                ended
                    .map_err(NotRead::from)
                    .and_then(|()| piece.ok_or(NotRead::Failed(NixlError::Kept)))
            }
        };
        // Nobody may wait any more.
        drop(answer.send(answered));
    }

    fn count_abandoned(&self) {
        let abandoned = self.abandoned.fetch_add(1, Relaxed) + 1;
        let why = "a reading by NIXL has missed its deadline, or NIXL keeps its memory: that is never used again";
        tracing::warn!(abandoned, most = MOST_ABANDONED, "{why}");
    }

    /// Forgets a lender that has failed, once nothing is under way from it: its next reading makes
    /// new connections. What was abandoned is no obstacle, as its memory is nobody's.
    fn settle(&mut self, metadata: &Bytes) {
        let done = |lender: &Lender| lender.has_failed && lender.under_way == 0;
        if self.lenders.get(metadata).is_some_and(done) {
            self.forget(&metadata.clone());
        }
    }

    /// Makes room for one more lender.
    fn make_room(&mut self) -> Result<(), NotRead> {
        if self.lenders.len() < MOST_LENDERS {
            return Ok(());
        }
        let idle = self.lenders.iter().filter(|(_, lender)| lender.under_way == 0);
        let oldest =
            idle.min_by_key(|(_, lender)| lender.used).map(|(metadata, _)| metadata.clone());
        self.forget(&oldest.ok_or(NotRead::Slow("too many lenders have readings under way"))?);
        Ok(())
    }

    fn forget(&mut self, metadata: &Bytes) {
        if let Some(lender) = self.lenders.remove(metadata)
            && let Err(error) = self.session.forget(&lender.name)
        {
            tracing::debug!(%error, "NIXL does not forget a lender");
        }
    }

    /// Tells lenders that this side is gone, whose network cards may otherwise keep what belongs to
    /// it.
    fn forget_all(&mut self) {
        let idle = self.lenders.iter().filter(|(_, lender)| lender.under_way == 0);
        for metadata in idle.map(|(metadata, _)| metadata.clone()).collect::<Vec<_>>() {
            self.forget(&metadata);
        }
    }
}
