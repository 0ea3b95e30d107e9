//! A bound on the unread bytes of all answers of a process together.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// The unit in which an inbox counts bytes. An inbox whose reader keeps up counts none, and so
/// touches no counter that others share.
pub(crate) const GRANULE_BYTES: usize = 16 << 10;

/// The bytes that all answers may leave unread by default.
pub const DEFAULT_MAX_BYTES: usize = 256 << 20;

static PROCESS: LazyLock<Arc<Unread>> = LazyLock::new(|| Arc::new(Unread::new(DEFAULT_MAX_BYTES)));

/// The bytes that answers leave unread, and their bound. Beyond it the answer that is furthest
/// behind is cut.
#[derive(Debug)]
pub struct Unread {
    max_bytes: AtomicUsize,
    bytes: AtomicUsize,
    released: AtomicU64,
    cut: AtomicU64,
    /// The jobs that have counted bytes.
    behind: Mutex<Vec<Weak<Job>>>,
    /// Held while answers are cut: until the bytes of one are discounted, a second thread would cut
    /// another.
    cutting: Mutex<()>,
}

impl Unread {
    /// Returns the bound of this process, which all engines and agents share.
    pub fn of_process() -> &'static Arc<Self> {
        &PROCESS
    }

    /// Creates a bound of so many bytes.
    pub fn new(max_bytes: usize) -> Self {
        let behind = Mutex::default();
        Self {
            max_bytes: max_bytes.into(),
            bytes: AtomicUsize::new(0),
            released: AtomicU64::new(0),
            cut: AtomicU64::new(0),
            behind,
            cutting: Mutex::default(),
        }
    }

    /// Sets how many bytes answers may leave unread.
    pub fn set_max_bytes(&self, max_bytes: usize) {
        self.max_bytes.store(max_bytes, Relaxed);
    }

    /// Returns the bytes that wait to be read, without what each inbox has below 16 KiB.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Returns the total of the bytes that wait no more, whether they were read or dropped.
    pub fn released(&self) -> u64 {
        self.released.load(Relaxed)
    }

    /// Returns how many answers were cut.
    pub fn cut(&self) -> u64 {
        self.cut.load(Relaxed)
    }

    /// Begins the answer to one job.
    pub fn job(self: &Arc<Self>) -> UnreadJob {
        UnreadJob(Arc::new(Job {
            unread: self.clone(),
            bytes: AtomicUsize::new(0),
            has_counted: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            inboxes: Mutex::default(),
        }))
    }

    /// Cuts the answers that are furthest behind until the others are within the bound.
    fn keep_within(&self) {
        let _cutting = lock(&self.cutting);
        while self.bytes() > self.max_bytes.load(Relaxed) {
            let furthest = {
                let mut behind = lock(&self.behind);
                behind.retain(|job| job.strong_count() > 0);
                let jobs =
                    behind.iter().filter_map(Weak::upgrade).filter(|job| !job.is_cut.load(Relaxed));
                jobs.max_by_key(|job| job.bytes.load(Relaxed))
            };
            let Some(job) = furthest else { return };
            if !job.is_cut.swap(true, Relaxed) {
                self.cut.fetch_add(1, Relaxed);
            }
            let inboxes = std::mem::take(&mut *lock(&job.inboxes));
            inboxes.iter().filter_map(Weak::upgrade).for_each(|inbox| inbox.cut());
        }
    }
}

/// The inboxes of one job, which are counted and cut together.
#[derive(Clone, Debug)]
pub struct UnreadJob(Arc<Job>);

struct Job {
    unread: Arc<Unread>,
    bytes: AtomicUsize,
    has_counted: AtomicBool,
    is_cut: AtomicBool,
    inboxes: Mutex<Vec<Weak<dyn Cut>>>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("bytes", &self.bytes)
            .field("is_cut", &self.is_cut)
            .finish_non_exhaustive()
    }
}

/// An inbox that can be emptied for good.
pub(crate) trait Cut: Send + Sync {
    fn cut(&self);
}

impl UnreadJob {
    /// Adds an inbox.
    pub(crate) fn add(&self, inbox: Weak<dyn Cut>) {
        lock(&self.0.inboxes).push(inbox);
    }

    /// Counts bytes that wait from now on. Returns `true` if too many wait.
    pub(crate) fn count(&self, bytes: usize) -> bool {
        let Job { unread, bytes: of_job, has_counted, .. } = &*self.0;
        of_job.fetch_add(bytes, Relaxed);
        let total = unread.bytes.fetch_add(bytes, Relaxed) + bytes;
        if !has_counted.swap(true, Relaxed) {
            let mut behind = lock(&unread.behind);
            if behind.len() == behind.capacity() {
                behind.retain(|job| job.strong_count() > 0);
            }
            behind.push(Arc::downgrade(&self.0));
        }
        total > unread.max_bytes.load(Relaxed)
    }

    /// Cuts the answers that are furthest behind, perhaps this one. No inbox may be locked.
    pub(crate) fn keep_within(&self) {
        self.0.unread.keep_within();
    }

    /// Discounts bytes that wait no more.
    pub(crate) fn discount(&self, bytes: usize) {
        self.0.bytes.fetch_sub(bytes, Relaxed);
        self.0.unread.bytes.fetch_sub(bytes, Relaxed);
        self.0.unread.released.fetch_add(bytes as u64, Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
