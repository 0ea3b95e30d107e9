//! What frontends are told of each other's jobs on one engine, so that each routes as if it had
//! given them all.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use chiasm_backend::{OthersEvent, OthersJob};
use tokio::sync::broadcast::{self, error::RecvError};

/// Events that a frontend may be behind before it is told again of all jobs that run.
const MOST_WAITING: usize = 4096;

/// The jobs of one engine.
pub(super) struct Announcements {
    known: Mutex<Known>,
    /// Sent to with that locked: whoever begins to follow is told of each job, and of what comes
    /// after.
    events: broadcast::Sender<Event>,
}

#[derive(Default)]
struct Known {
    /// Jobs by their numbers.
    running: HashMap<u64, Running>,
    /// Who is told of them, and how often.
    followers: HashMap<u64, usize>,
}

impl Known {
    /// Whether another frontend than this one is told: otherwise nothing is sent, as that wakes
    /// whoever follows for nothing.
    fn has_others(&self, frontend: u64) -> bool {
        self.followers.keys().any(|follower| *follower != frontend)
    }
}

/// What there is to be told of a job, made when somebody is told: often there is no other frontend,
/// and the keys of a prompt take a while.
type Told = Arc<LazyLock<OthersJob, Box<dyn FnOnce() -> OthersJob + Send>>>;

#[derive(Clone)]
struct Running {
    frontend: u64,
    job: Told,
    computed: bool,
}

#[derive(Clone)]
struct Event {
    frontend: u64,
    job: u64,
    what: What,
}

#[derive(Clone)]
enum What {
    Begun(Told),
    Computed,
    Ended,
}

impl What {
    fn told(self, job: u64) -> OthersEvent {
        match self {
            Self::Begun(told) => OthersEvent::Begun(job, OthersJob::clone(&told)),
            Self::Computed => OthersEvent::Computed(job),
            Self::Ended => OthersEvent::Ended(job),
        }
    }
}

impl Default for Announcements {
    fn default() -> Self {
        Self { known: Mutex::default(), events: broadcast::channel(MOST_WAITING).0 }
    }
}

impl Announcements {
    /// Announces a job, until what is returned is dropped.
    pub(super) fn begin(
        self: &Arc<Self>,
        frontend: u64,
        job: u64,
        told: impl FnOnce() -> OthersJob + Send + 'static,
    ) -> Announced {
        let told: Told = Arc::new(LazyLock::new(Box::new(told)));
        let mut known = self.known();
        known.running.insert(job, Running { frontend, job: told.clone(), computed: false });
        self.send(&known, frontend, job, What::Begun(told));
        drop(known);
        Announced { announcements: self.clone(), frontend, job, computed: false }
    }

    /// What a frontend is to be told.
    pub(super) fn follow(self: &Arc<Self>, frontend: u64) -> Followed {
        *self.known().followers.entry(frontend).or_default() += 1;
        let events = self.events.subscribe();
        let (announcements, ahead) = (self.clone(), Vec::new());
        let mut followed = Followed { announcements, frontend, is_void: false, ahead, events };
        followed.begin_again();
        followed
    }

    fn send(&self, known: &Known, frontend: u64, job: u64, what: What) {
        if known.has_others(frontend) {
            let _ = self.events.send(Event { frontend, job, what });
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job that others know of.
pub(super) struct Announced {
    announcements: Arc<Announcements>,
    frontend: u64,
    job: u64,
    computed: bool,
}

impl Announced {
    /// The engine has computed its prompt.
    pub(super) fn computed(&mut self) {
        if std::mem::replace(&mut self.computed, true) {
            return;
        }
        let mut known = self.announcements.known();
        if let Some(running) = known.running.get_mut(&self.job) {
            running.computed = true;
        }
        self.announcements.send(&known, self.frontend, self.job, What::Computed);
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        let mut known = self.announcements.known();
        known.running.remove(&self.job);
        self.announcements.send(&known, self.frontend, self.job, What::Ended);
    }
}

/// What one frontend is told.
pub(super) struct Followed {
    announcements: Arc<Announcements>,
    frontend: u64,
    /// Before all else: what it was told is void.
    is_void: bool,
    /// To be told first, the last one first.
    ahead: Vec<(u64, What)>,
    events: broadcast::Receiver<Event>,
}

impl Followed {
    /// Begins again, with all jobs that run.
    fn begin_again(&mut self) {
        let known = self.announcements.known();
        self.events = self.announcements.events.subscribe();
        self.ahead.clear();
        for (number, running) in
            known.running.iter().filter(|(_, running)| running.frontend != self.frontend)
        {
            self.ahead.extend(running.computed.then_some((*number, What::Computed)));
            // Keys are made one job after the other, and not here: nobody could begin a job
            // meanwhile.
            self.ahead.push((*number, What::Begun(running.job.clone())));
        }
        self.is_void = true;
    }

    /// What is to be told next. Cancel safe.
    pub(super) async fn next(&mut self) -> OthersEvent {
        loop {
            if std::mem::take(&mut self.is_void) {
                return OthersEvent::Forget;
            }
            if let Some((job, what)) = self.ahead.pop() {
                return what.told(job);
            }
            match self.events.recv().await {
                Ok(Event { frontend, .. }) if frontend == self.frontend => {}
                Ok(Event { job, what, .. }) => return what.told(job),
                Err(RecvError::Lagged(_)) => self.begin_again(),
                // The sender is in the announcements, which are here.
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        if let Entry::Occupied(mut times) =
            self.announcements.known().followers.entry(self.frontend)
        {
            *times.get_mut() -= 1;
            if *times.get() == 0 {
                times.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const ONE: u64 = 1;
    const OTHER: u64 = 2;

    fn told(prompt_tokens: usize) -> OthersJob {
        OthersJob { prompt_tokens, ..OthersJob::default() }
    }

    fn now(followed: &mut Followed) -> Vec<OthersEvent> {
        std::iter::from_fn(|| followed.next().now_or_never()).collect()
    }

    #[test]
    fn a_frontend_is_told_of_the_jobs_of_others_from_their_begin_to_their_end() {
        let announcements = Arc::new(Announcements::default());
        let mut followed = announcements.follow(ONE);
        assert_eq!(now(&mut followed), [OthersEvent::Forget]);
        let _own = announcements.begin(ONE, 10, || panic!("no other frontend is told"));
        let mut job = announcements.begin(OTHER, 11, || told(2));
        job.computed();
        job.computed();
        assert_eq!(
            now(&mut followed),
            [OthersEvent::Begun(11, told(2)), OthersEvent::Computed(11)]
        );
        // Who comes later is told what there is.
        let mut late = announcements.follow(ONE);
        let expected =
            [OthersEvent::Forget, OthersEvent::Begun(11, told(2)), OthersEvent::Computed(11)];
        assert_eq!(now(&mut late), expected);
        drop(job);
        assert_eq!(now(&mut followed), [OthersEvent::Ended(11)]);
        assert_eq!(now(&mut late), [OthersEvent::Ended(11)]);
    }

    #[test]
    fn who_follows_is_not_woken_by_its_own_jobs_as_long_as_no_other_frontend_does() {
        let announcements = Arc::new(Announcements::default());
        let waiting = |followed: &Followed| followed.events.len();
        let (mut followed, again) = (announcements.follow(ONE), announcements.follow(ONE));
        let _job = announcements.begin(ONE, 10, || told(1));
        assert_eq!(waiting(&followed), 0);
        let mut other = announcements.follow(OTHER);
        assert_eq!(now(&mut other), [OthersEvent::Forget, OthersEvent::Begun(10, told(1))]);
        drop((announcements.begin(ONE, 11, || told(2)), again));
        assert_eq!(now(&mut other), [OthersEvent::Begun(11, told(2)), OthersEvent::Ended(11)]);
        assert_eq!((waiting(&followed), now(&mut followed)), (2, vec![OthersEvent::Forget]));
        drop(other);
        drop(announcements.begin(ONE, 12, || told(3)));
        assert_eq!(waiting(&followed), 0);
    }

    #[test]
    fn who_falls_behind_is_told_of_all_that_run_again() {
        let announcements = Arc::new(Announcements::default());
        let mut followed = announcements.follow(ONE);
        for number in 0..MOST_WAITING as u64 {
            drop(announcements.begin(OTHER, number, || told(1)));
        }
        let _job = announcements.begin(OTHER, 99_999, || told(5));
        let heard = now(&mut followed);
        assert_eq!(
            heard,
            [OthersEvent::Forget, OthersEvent::Forget, OthersEvent::Begun(99_999, told(5))]
        );
    }
}
