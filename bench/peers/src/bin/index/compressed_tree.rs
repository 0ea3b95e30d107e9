//! `ConcurrentRadixTreeCompressed`, the default of Dynamo's router.
//!
//! It takes events only through a channel, on a thread that runs `SyncIndexer::worker`, as in its
//! own pool of threads. The pool's own wrapper is left out, and so is its sweep every five minutes.

use std::hint::black_box;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{slice, thread};

use dynamo_kv_router::indexer::concurrent_radix_tree_compressed::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::LocalBlockHash;
use tokio::sync::oneshot;

use crate::clock::Thread;
use crate::dynamo::{Listeners, Work, block_hashes, cleared, overlaps};
use crate::subject::{Index, Input, LANES, lane};
use crate::trace::Trace;

/// The tree and its threads, which end with the process.
pub(crate) struct Compressed {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    lanes: [Lane; LANES],
}

/// A thread that applies events.
struct Lane {
    tasks: flume::Sender<WorkerTask>,
    /// Set by the thread when it starts.
    thread: Arc<OnceLock<Thread>>,
    listeners: Mutex<Listeners>,
}

impl Lane {
    fn start(tree: Arc<ConcurrentRadixTreeCompressed>) -> Self {
        let (tasks, receiver) = flume::unbounded();
        let thread = Arc::new(OnceLock::new());
        let this = Arc::clone(&thread);
        thread::spawn(move || {
            this.get_or_init(Thread::current);
            tree.worker(receiver, None)
        });
        Self { tasks, thread, listeners: Mutex::default() }
    }
}

impl Compressed {
    pub(crate) fn new() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let lanes = [(); LANES].map(|()| Lane::start(Arc::clone(&tree)));
        Self { tree, lanes }
    }

    fn send(&self, lane: usize, task: WorkerTask) {
        // A thread that has ended shows as missing overlaps.
        let _ = self.lanes[lane].tasks.send(task);
    }
}

impl Index for Compressed {
    type Work = Work;
    type Token = u32;
    type Key = LocalBlockHash;
    type Buffers = ();

    fn work(&self, trace: &Trace, batch: usize, input: Input) -> Work {
        Work::new(trace, batch, input)
    }

    fn apply(&self, lane: usize, work: Vec<Work>) {
        // All events are sent at once, so the thread wakes up once.
        let mut tasks = Vec::with_capacity(work.len());
        let mut listeners =
            self.lanes[lane].listeners.lock().unwrap_or_else(PoisonError::into_inner);
        for work in work {
            work.for_each(&mut listeners, |event| tasks.push(WorkerTask::Event(event)));
        }
        tasks.into_iter().for_each(|task| self.send(lane, task));
    }

    fn flush(&self, lane: usize) {
        let (sender, receiver) = oneshot::channel();
        self.send(lane, WorkerTask::Flush(sender));
        let _ = receiver.blocking_recv();
    }

    fn threads(&self, lane: usize) -> &[Thread] {
        self.lanes[lane].thread.get().map_or(&[], slice::from_ref)
    }

    fn text(tokens: &[u32]) -> Vec<u32> {
        tokens.to_vec()
    }

    fn keys(tokens: &[u32]) -> Vec<LocalBlockHash> {
        block_hashes(tokens)
    }

    fn look_up(&self, keys: &[LocalBlockHash], (): &mut ()) {
        black_box(self.tree.find_matches(keys, false));
    }

    fn overlaps(&self, keys: &[LocalBlockHash]) -> Vec<(u32, u32)> {
        overlaps(&self.tree.find_matches(keys, false))
    }

    fn clear(&self, worker: u32) {
        self.send(lane(worker), WorkerTask::Event(cleared(worker)));
    }
}
