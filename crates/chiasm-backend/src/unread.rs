//! A budget for the unread bytes of all answers of a process.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// The unit in which an inbox charges bytes. An inbox whose reader keeps up charges none and so
/// touches no shared counter.
pub(crate) const GRANULE_BYTES: usize = 16 << 10;

/// The default limit of unread bytes of all answers.
pub const DEFAULT_MAX_BYTES: usize = 256 << 20;

static GLOBAL: LazyLock<Arc<UnreadBudget>> =
    LazyLock::new(|| Arc::new(UnreadBudget::new(DEFAULT_MAX_BYTES)));

/// The number of unread bytes of all answers, and its limit. Over the limit, the answer with the
/// most unread bytes is cut: its unread outputs are dropped, and the job ends.
#[derive(Debug)]
pub struct UnreadBudget {
    max_bytes: AtomicUsize,
    bytes: AtomicUsize,
    released: AtomicU64,
    cut: AtomicU64,
    /// The jobs that have charged bytes.
    charged_jobs: Mutex<Vec<Weak<Job>>>,
    /// Held while answers are cut. Without it, a second thread would cut another answer before the
    /// bytes of the first one are released.
    cutting: Mutex<()>,
}

impl UnreadBudget {
    /// Returns the budget of this process, which all engines and agents share.
    pub fn global() -> &'static Arc<Self> {
        &GLOBAL
    }

    /// Creates a budget of `max_bytes`.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes: max_bytes.into(),
            bytes: AtomicUsize::new(0),
            released: AtomicU64::new(0),
            cut: AtomicU64::new(0),
            charged_jobs: Mutex::default(),
            cutting: Mutex::default(),
        }
    }

    /// Sets the limit of unread bytes.
    pub fn set_max_bytes(&self, max_bytes: usize) {
        self.max_bytes.store(max_bytes, Relaxed);
    }

    /// Returns the number of unread bytes, without the first 16 KiB or less of each inbox.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Returns the total number of bytes that were released, by reading or by dropping them.
    pub fn released(&self) -> u64 {
        self.released.load(Relaxed)
    }

    /// Returns the number of answers that were cut.
    pub fn cut_count(&self) -> u64 {
        self.cut.load(Relaxed)
    }

    /// Creates the share of a new job.
    pub fn new_share(self: &Arc<Self>) -> UnreadShare {
        UnreadShare(Arc::new(Job {
            budget: self.clone(),
            bytes: AtomicUsize::new(0),
            has_charged: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            inboxes: Mutex::default(),
        }))
    }

    /// Cuts the answers with the most unread bytes until the rest is within the limit.
    fn enforce_limit(&self) {
        let _cutting = lock(&self.cutting);
        while self.bytes() > self.max_bytes.load(Relaxed) {
            let largest = {
                let mut jobs = lock(&self.charged_jobs);
                jobs.retain(|job| job.strong_count() > 0);
                let uncut =
                    jobs.iter().filter_map(Weak::upgrade).filter(|job| !job.is_cut.load(Relaxed));
                uncut.max_by_key(|job| job.bytes.load(Relaxed))
            };
            let Some(job) = largest else { return };
            if !job.is_cut.swap(true, Relaxed) {
                self.cut.fetch_add(1, Relaxed);
            }
            let inboxes = std::mem::take(&mut *lock(&job.inboxes));
            inboxes.iter().filter_map(Weak::upgrade).for_each(|inbox| inbox.cut());
        }
    }
}

/// A job's share of an [`UnreadBudget`]. The job's inboxes are charged and cut together.
#[derive(Clone, Debug)]
pub struct UnreadShare(Arc<Job>);

struct Job {
    budget: Arc<UnreadBudget>,
    bytes: AtomicUsize,
    has_charged: AtomicBool,
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

/// An inbox that can be cut.
pub(crate) trait Cut: Send + Sync {
    /// Drops everything unread and refuses everything that follows.
    fn cut(&self);
}

impl UnreadShare {
    /// Adds an inbox of the job.
    pub(crate) fn add(&self, inbox: Weak<dyn Cut>) {
        lock(&self.0.inboxes).push(inbox);
    }

    /// Charges unread bytes. Returns `true` if the budget is exceeded.
    pub(crate) fn charge(&self, bytes: usize) -> bool {
        let Job { budget, bytes: job_bytes, has_charged, .. } = &*self.0;
        job_bytes.fetch_add(bytes, Relaxed);
        let total = budget.bytes.fetch_add(bytes, Relaxed) + bytes;
        if !has_charged.swap(true, Relaxed) {
            let mut jobs = lock(&budget.charged_jobs);
            if jobs.len() == jobs.capacity() {
                jobs.retain(|job| job.strong_count() > 0);
            }
            jobs.push(Arc::downgrade(&self.0));
        }
        total > budget.max_bytes.load(Relaxed)
    }

    /// Cuts the answers with the most unread bytes, which may include this one. No inbox may be
    /// locked.
    pub(crate) fn enforce_limit(&self) {
        self.0.budget.enforce_limit();
    }

    /// Releases bytes that were read or dropped.
    pub(crate) fn release(&self, bytes: usize) {
        self.0.bytes.fetch_sub(bytes, Relaxed);
        self.0.budget.bytes.fetch_sub(bytes, Relaxed);
        self.0.budget.released.fetch_add(bytes as u64, Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
