//! The thread of a reader: active reads, their deadlines and the known lenders.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::library::{ReadRequest, Session};
use crate::pool::Piece;
use crate::read_error::ReadError;
use crate::{MAX_ABANDONED_READS, NixlError};

/// The maximum number of lenders whose metadata is loaded: frontends, including former ones.
const MAX_LENDERS: usize = 256;
/// The time in which nothing is read from a lender after a read of its memory has timed out. Each
/// read that times out costs a piece of the pool.
const PAUSE_AFTER_TIMEOUT: Duration = Duration::from_secs(30);
/// The bounds of the poll interval, which is an eighth of the age of the newest read.
const MIN_POLL_INTERVAL: Duration = Duration::from_micros(20);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A requested read.
pub(crate) struct ReadJob {
    pub(crate) metadata: Bytes,
    pub(crate) address: u64,
    pub(crate) into: Piece,
    pub(crate) deadline: Instant,
    pub(crate) reply: oneshot::Sender<Result<Piece, ReadError>>,
}

struct ActiveRead {
    request: ReadRequest,
    metadata: Bytes,
    started: Instant,
    deadline: Instant,
    reply: oneshot::Sender<Result<Piece, ReadError>>,
}

/// A lender whose metadata is loaded.
struct RemoteLender {
    name: CString,
    last_used: Instant,
    active_reads: usize,
    paused_until: Option<Instant>,
    /// `true` after a failed read: the lender is forgotten once it has no active read.
    has_failed: bool,
}

/// Runs the jobs until their sender is dropped and all active reads have ended.
pub(crate) fn run(session: Session, jobs: &Receiver<ReadJob>, abandoned: &AtomicUsize) {
    let mut thread = ReadThread { session, lenders: HashMap::new(), active: Vec::new(), abandoned };
    loop {
        let job = match thread.poll_interval() {
            None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(interval) => jobs.recv_timeout(interval),
        };
        match job {
            Ok(job) => thread.start(job),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if thread.active.is_empty() => break,
            // Waits until the active reads end or time out.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(MAX_POLL_INTERVAL),
        }
        thread.poll();
    }
    thread.forget_all();
}

struct ReadThread<'a> {
    session: Session,
    /// The lenders, by their metadata.
    lenders: HashMap<Bytes, RemoteLender>,
    active: Vec<ActiveRead>,
    abandoned: &'a AtomicUsize,
}

impl ReadThread<'_> {
    /// Returns the time until the next poll; `None` if there is no active read.
    fn poll_interval(&self) -> Option<Duration> {
        let ages = self.active.iter().map(|active| active.started.elapsed());
        ages.min().map(|age| (age / 8).clamp(MIN_POLL_INTERVAL, MAX_POLL_INTERVAL))
    }

    /// Starts a read, or replies with an error.
    fn start(&mut self, job: ReadJob) {
        let ReadJob { metadata, address, into, deadline, reply } = job;
        let started = Instant::now();
        match self.try_start(&metadata, address, into, deadline) {
            Ok(request) => {
                self.active.push(ActiveRead { request, metadata, started, deadline, reply });
            }
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    fn try_start(
        &mut self,
        metadata: &Bytes,
        address: u64,
        into: Piece,
        deadline: Instant,
    ) -> Result<ReadRequest, ReadError> {
        let now = Instant::now();
        if now >= deadline {
            return Err(ReadError::TimedOut("the deadline passed before the read was started"));
        }
        if !self.lenders.contains_key(metadata) {
            self.make_room()?;
            let lender = RemoteLender {
                name: self.session.load(metadata)?,
                last_used: now,
                active_reads: 0,
                paused_until: None,
                has_failed: false,
            };
            self.lenders.insert(metadata.clone(), lender);
        }
        let Some(lender) = self.lenders.get_mut(metadata) else { return Err(ReadError::Disabled) };
        if lender.paused_until.is_some_and(|until| now < until) {
            return Err(ReadError::TimedOut(
                "another read of the lender's memory timed out recently",
            ));
        }
        lender.last_used = now;
        match self.session.read(into, &lender.name, address) {
            Ok(request) => {
                lender.active_reads += 1;
                Ok(request)
            }
            Err(error) => {
                lender.has_failed = true;
                if matches!(error, NixlError::MemoryNotReleased) {
                    self.count_abandoned();
                }
                self.forget_if_failed(metadata);
                Err(error.into())
            }
        }
    }

    /// Polls all active reads and completes those that have ended or timed out.
    fn poll(&mut self) {
        let mut at = 0;
        while let Some(active) = self.active.get(at) {
            // After the deadline NIXL's status is ignored: the lender may have reused the memory.
            let outcome = if Instant::now() >= active.deadline {
                None
            } else {
                match self.session.has_ended(&active.request) {
                    Ok(false) => {
                        at += 1;
                        continue;
                    }
                    // The process may have been stopped since the check above.
                    Ok(true) if Instant::now() >= active.deadline => None,
                    Ok(true) => Some(Ok(())),
                    Err(error) => Some(Err(error)),
                }
            };
            let active = self.active.swap_remove(at);
            self.complete(active, outcome);
        }
    }

    /// Completes a read; an `outcome` of `None` stands for a timeout.
    fn complete(&mut self, active: ActiveRead, outcome: Option<Result<(), NixlError>>) {
        let ActiveRead { request, metadata, reply, .. } = active;
        let lender = self.lenders.get_mut(&metadata);
        let result = match outcome {
            None => {
                if let Some(lender) = lender {
                    lender.active_reads -= 1;
                    lender.paused_until = Some(Instant::now() + PAUSE_AFTER_TIMEOUT);
                }
                request.abandon();
                self.count_abandoned();
                Err(ReadError::TimedOut("the read took too long"))
            }
            Some(outcome) => {
                let piece = self.session.end(request);
                if let Some(lender) = lender {
                    lender.active_reads -= 1;
                    lender.has_failed |= outcome.is_err();
                }
                if piece.is_none() {
                    self.count_abandoned();
                }
                self.forget_if_failed(&metadata);
                outcome
                    .map_err(ReadError::from)
                    .and_then(|()| piece.ok_or(ReadError::Failed(NixlError::MemoryNotReleased)))
            }
        };
        // Fails if the receiver no longer waits.
        drop(reply.send(result));
    }

    fn count_abandoned(&self) {
        let abandoned = self.abandoned.fetch_add(1, Relaxed) + 1;
        tracing::warn!(
            abandoned,
            max = MAX_ABANDONED_READS,
            "a read by NIXL timed out, or NIXL does not release its memory: the memory is never \
             used again"
        );
    }

    /// Forgets a lender that has failed, once it has no active read, so that its next read makes
    /// new connections. Abandoned reads don't count, because their memory is never used again.
    fn forget_if_failed(&mut self, metadata: &Bytes) {
        let is_due = |lender: &RemoteLender| lender.has_failed && lender.active_reads == 0;
        if self.lenders.get(metadata).is_some_and(is_due) {
            self.forget(&metadata.clone());
        }
    }

    /// Makes room for one more lender by forgetting the least recently used idle one.
    fn make_room(&mut self) -> Result<(), ReadError> {
        if self.lenders.len() < MAX_LENDERS {
            return Ok(());
        }
        let idle = self.lenders.iter().filter(|(_, lender)| lender.active_reads == 0);
        let oldest =
            idle.min_by_key(|(_, lender)| lender.last_used).map(|(metadata, _)| metadata.clone());
        self.forget(&oldest.ok_or(ReadError::TimedOut("too many lenders have active reads"))?);
        Ok(())
    }

    fn forget(&mut self, metadata: &Bytes) {
        if let Some(lender) = self.lenders.remove(metadata)
            && let Err(error) = self.session.forget(&lender.name)
        {
            tracing::debug!(%error, "NIXL does not forget a lender");
        }
    }

    /// Forgets all idle lenders, which notifies them. Their network cards may otherwise keep
    /// resources of this reader.
    fn forget_all(&mut self) {
        let idle = self.lenders.iter().filter(|(_, lender)| lender.active_reads == 0);
        for metadata in idle.map(|(metadata, _)| metadata.clone()).collect::<Vec<_>>() {
            self.forget(&metadata);
        }
    }
}
