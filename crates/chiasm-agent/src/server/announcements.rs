//! Announcements of each frontend's jobs on one engine to the other frontends, so that each routes
//! as if it had sent all of them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use chiasm_backend::{ForeignJob, ForeignJobEvent};
use tokio::sync::broadcast::{self, error::RecvError};

/// The number of events that a frontend may lag behind before all running jobs are announced again.
const MAX_QUEUED_EVENTS: usize = 4096;

/// The running jobs of one engine, and the frontends that follow them.
pub(super) struct Announcements {
    state: Mutex<State>,
    /// Sent to while the state is locked, so that a new follower gets each running job and every
    /// later event.
    events: broadcast::Sender<Event>,
}

#[derive(Default)]
struct State {
    /// Jobs by their numbers.
    running: HashMap<u64, RunningJob>,
    /// The number of followers of each frontend.
    followers: HashMap<u64, usize>,
}

impl State {
    /// Returns `true` if another frontend than this one follows. Otherwise nothing is sent, as that
    /// would only wake this frontend's own followers.
    fn has_other_followers(&self, frontend: u64) -> bool {
        self.followers.keys().any(|follower| *follower != frontend)
    }
}

/// A job's description, computed on first use: often there is no other frontend, and the keys of a
/// prompt take a while.
type LazyJob = Arc<LazyLock<ForeignJob, Box<dyn FnOnce() -> ForeignJob + Send>>>;

#[derive(Clone)]
struct RunningJob {
    frontend: u64,
    job: LazyJob,
    is_computed: bool,
}

#[derive(Clone)]
struct Event {
    frontend: u64,
    job: u64,
    change: Change,
}

#[derive(Clone)]
enum Change {
    Started(LazyJob),
    Computed,
    Ended,
}

impl Change {
    fn into_event(self, number: u64) -> ForeignJobEvent {
        match self {
            Self::Started(job) => ForeignJobEvent::Started(number, ForeignJob::clone(&job)),
            Self::Computed => ForeignJobEvent::PromptComputed(number),
            Self::Ended => ForeignJobEvent::Ended(number),
        }
    }
}

impl Default for Announcements {
    fn default() -> Self {
        Self { state: Mutex::default(), events: broadcast::channel(MAX_QUEUED_EVENTS).0 }
    }
}

impl Announcements {
    /// Announces a job until the guard is dropped.
    pub(super) fn announce(
        self: &Arc<Self>,
        frontend: u64,
        number: u64,
        describe: impl FnOnce() -> ForeignJob + Send + 'static,
    ) -> AnnouncedJob {
        let job: LazyJob = Arc::new(LazyLock::new(Box::new(describe)));
        let mut state = self.state();
        state.running.insert(number, RunningJob { frontend, job: job.clone(), is_computed: false });
        self.send(&state, frontend, number, Change::Started(job));
        drop(state);
        AnnouncedJob { announcements: self.clone(), frontend, number, is_computed: false }
    }

    /// Follows the jobs of other frontends than this one.
    pub(super) fn follow(self: &Arc<Self>, frontend: u64) -> JobFollower {
        *self.state().followers.entry(frontend).or_default() += 1;
        let mut follower = JobFollower {
            announcements: self.clone(),
            frontend,
            needs_reset: false,
            queued: Vec::new(),
            events: self.events.subscribe(),
        };
        follower.restart();
        follower
    }

    fn send(&self, state: &State, frontend: u64, job: u64, change: Change) {
        if state.has_other_followers(frontend) {
            let _ = self.events.send(Event { frontend, job, change });
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An announced job, which ends when this is dropped.
pub(super) struct AnnouncedJob {
    announcements: Arc<Announcements>,
    frontend: u64,
    number: u64,
    is_computed: bool,
}

impl AnnouncedJob {
    /// Announces that the engine has computed the prompt. Later calls do nothing.
    pub(super) fn prompt_computed(&mut self) {
        if std::mem::replace(&mut self.is_computed, true) {
            return;
        }
        let mut state = self.announcements.state();
        if let Some(running) = state.running.get_mut(&self.number) {
            running.is_computed = true;
        }
        self.announcements.send(&state, self.frontend, self.number, Change::Computed);
    }
}

impl Drop for AnnouncedJob {
    fn drop(&mut self) {
        let mut state = self.announcements.state();
        state.running.remove(&self.number);
        self.announcements.send(&state, self.frontend, self.number, Change::Ended);
    }
}

/// A frontend's stream of events about other frontends' jobs.
pub(super) struct JobFollower {
    announcements: Arc<Announcements>,
    frontend: u64,
    /// `true` if a reset comes next, which voids all earlier events.
    needs_reset: bool,
    /// The events to return before those of `events`, in reverse order.
    queued: Vec<(u64, Change)>,
    events: broadcast::Receiver<Event>,
}

impl JobFollower {
    /// Starts over with a reset and all running jobs.
    fn restart(&mut self) {
        let state = self.announcements.state();
        self.events = self.announcements.events.subscribe();
        self.queued.clear();
        for (number, running) in
            state.running.iter().filter(|(_, running)| running.frontend != self.frontend)
        {
            self.queued.extend(running.is_computed.then_some((*number, Change::Computed)));
            // Keys are not computed here, as no job could be announced while the state is locked.
            self.queued.push((*number, Change::Started(running.job.clone())));
        }
        self.needs_reset = true;
    }

    /// Returns the next event. Cancel-safe.
    pub(super) async fn next(&mut self) -> ForeignJobEvent {
        loop {
            if std::mem::take(&mut self.needs_reset) {
                return ForeignJobEvent::Reset;
            }
            if let Some((job, change)) = self.queued.pop() {
                return change.into_event(job);
            }
            match self.events.recv().await {
                Ok(Event { frontend, .. }) if frontend == self.frontend => {}
                Ok(Event { job, change, .. }) => return change.into_event(job),
                Err(RecvError::Lagged(_)) => self.restart(),
                // Never happens: `announcements` holds the sender.
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    }
}

impl Drop for JobFollower {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) =
            self.announcements.state().followers.entry(self.frontend)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const FIRST_FRONTEND: u64 = 1;
    const SECOND_FRONTEND: u64 = 2;

    fn job(prompt_tokens: usize) -> ForeignJob {
        ForeignJob { prompt_tokens, ..ForeignJob::default() }
    }

    fn ready_events(follower: &mut JobFollower) -> Vec<ForeignJobEvent> {
        std::iter::from_fn(|| follower.next().now_or_never()).collect()
    }

    #[test]
    fn follower_gets_all_events_of_foreign_jobs() {
        let announcements = Arc::new(Announcements::default());
        let mut follower = announcements.follow(FIRST_FRONTEND);
        assert_eq!(ready_events(&mut follower), [ForeignJobEvent::Reset]);
        let _own =
            announcements.announce(FIRST_FRONTEND, 10, || panic!("no other frontend follows"));
        let mut announced = announcements.announce(SECOND_FRONTEND, 11, || job(2));
        announced.prompt_computed();
        announced.prompt_computed();
        assert_eq!(
            ready_events(&mut follower),
            [ForeignJobEvent::Started(11, job(2)), ForeignJobEvent::PromptComputed(11)]
        );
        // A later follower gets the running jobs.
        let mut late = announcements.follow(FIRST_FRONTEND);
        let expected = [
            ForeignJobEvent::Reset,
            ForeignJobEvent::Started(11, job(2)),
            ForeignJobEvent::PromptComputed(11),
        ];
        assert_eq!(ready_events(&mut late), expected);
        drop(announced);
        assert_eq!(ready_events(&mut follower), [ForeignJobEvent::Ended(11)]);
        assert_eq!(ready_events(&mut late), [ForeignJobEvent::Ended(11)]);
    }

    #[test]
    fn own_jobs_wake_no_follower_without_other_frontends() {
        let announcements = Arc::new(Announcements::default());
        let queued = |follower: &JobFollower| follower.events.len();
        let mut follower = announcements.follow(FIRST_FRONTEND);
        let second = announcements.follow(FIRST_FRONTEND);
        let _job = announcements.announce(FIRST_FRONTEND, 10, || job(1));
        assert_eq!(queued(&follower), 0);
        let mut other = announcements.follow(SECOND_FRONTEND);
        assert_eq!(
            ready_events(&mut other),
            [ForeignJobEvent::Reset, ForeignJobEvent::Started(10, job(1))]
        );
        drop((announcements.announce(FIRST_FRONTEND, 11, || job(2)), second));
        assert_eq!(
            ready_events(&mut other),
            [ForeignJobEvent::Started(11, job(2)), ForeignJobEvent::Ended(11)]
        );
        assert_eq!(
            (queued(&follower), ready_events(&mut follower)),
            (2, vec![ForeignJobEvent::Reset])
        );
        drop(other);
        drop(announcements.announce(FIRST_FRONTEND, 12, || job(3)));
        assert_eq!(queued(&follower), 0);
    }

    #[test]
    fn lagging_follower_restarts_with_running_jobs() {
        let announcements = Arc::new(Announcements::default());
        let mut follower = announcements.follow(FIRST_FRONTEND);
        for number in 0..MAX_QUEUED_EVENTS as u64 {
            drop(announcements.announce(SECOND_FRONTEND, number, || job(1)));
        }
        let _job = announcements.announce(SECOND_FRONTEND, 99_999, || job(5));
        assert_eq!(
            ready_events(&mut follower),
            [
                ForeignJobEvent::Reset,
                ForeignJobEvent::Reset,
                ForeignJobEvent::Started(99_999, job(5))
            ]
        );
    }
}
