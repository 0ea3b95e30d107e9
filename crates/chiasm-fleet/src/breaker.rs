//! A circuit breaker: keeps requests away from a failing worker for growing pauses.
//!
//! A worker that fails at once looks idle, so it would draw nearly all requests. After
//! [`FAILURES_TO_OPEN`] failures in a row its breaker opens, and it gets no requests. After a pause
//! the breaker is half-open: one request, the probe, may try the worker. If the probe succeeds, the
//! breaker closes; if it fails, the breaker opens for twice as long.
//!
//! The breaker has no clock and no worker: callers pass the time and the outcomes of requests.

use std::time::Duration;

use chiasm_backend::JobError;
use tokio::time::Instant;

use crate::backoff::Backoff;

/// The number of failures in a row that opens a breaker.
///
/// It is more than a single bad request causes with all its moves, and few enough that a broken
/// worker costs only a handful of requests. Envoy has the same default.
pub(crate) const FAILURES_TO_OPEN: u32 = 5;
/// The maximum pause between two probes. The same as between two starts of an engine.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The maximum pause that a server can request with `Retry-After`. Probing earlier than requested
/// costs no client anything, because a server that refuses a request has not begun it.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);
/// The minimum pause that a server can request with `Retry-After`. With a shorter pause, every
/// request would try the server.
const MIN_RETRY_AFTER: Duration = Duration::from_millis(100);

/// The state of a worker's breaker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BreakerState {
    /// The worker gets requests.
    #[default]
    Closed,
    /// The worker fails and gets no requests.
    Open,
    /// The worker gets one request, whose outcome closes or reopens the breaker.
    HalfOpen,
}

impl BreakerState {
    /// Returns the name in reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half-open",
        }
    }
}

/// A worker's fault in a failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerFault {
    /// The worker failed with a request that it may have begun.
    Failed {
        /// The HTTP status for clients.
        status: u16,
        /// The server's error message, without its address.
        message: String,
    },
    /// The worker refuses the operator's key.
    KeyRefused {
        /// The server's error message, without its address.
        message: String,
    },
    /// The worker accepts no requests before `until`.
    Overloaded {
        /// The HTTP status for clients, 429 or 503.
        status: u16,
        /// The end of the pause that the worker requested.
        until: Instant,
        /// The server's error message, without its address.
        message: String,
    },
    /// The worker does not have the model.
    UnknownModel {
        /// The server's error message, without its address.
        message: String,
    },
}

impl WorkerFault {
    /// Returns the worker's fault in a job's error.
    ///
    /// Returns `None` if the job is at fault, or if the worker had no capacity or has left: its
    /// load and its condition already show those.
    pub fn from_error(error: &JobError, now: Instant) -> Option<Self> {
        match error {
            JobError::Dead(death) => Some(Self::Failed { status: 502, message: death.to_string() }),
            JobError::Failed => Some(Self::Failed { status: 502, message: error.to_string() }),
            JobError::ServerFailed { status, message } => {
                Some(Self::Failed { status: *status, message: message.clone() })
            }
            JobError::KeyRefused { message, .. } => {
                Some(Self::KeyRefused { message: message.clone() })
            }
            JobError::Overloaded { status, retry_after, message } => {
                let until = now + (*retry_after).clamp(MIN_RETRY_AFTER, MAX_RETRY_AFTER);
                Some(Self::Overloaded { status: *status, until, message: message.clone() })
            }
            JobError::UnknownModel { message } => {
                Some(Self::UnknownModel { message: message.clone() })
            }
            _ => None,
        }
    }

    /// Returns the server's error message.
    pub fn message(&self) -> &str {
        match self {
            Self::Failed { message, .. }
            | Self::KeyRefused { message }
            | Self::Overloaded { message, .. }
            | Self::UnknownModel { message } => message,
        }
    }
}

/// The breaker of one worker. A worker that reconnects gets a new one.
#[derive(Debug)]
pub(crate) struct Breaker {
    state: State,
    /// The number of failures since the last success.
    failures: u32,
    /// The last failure since the last success.
    fault: Option<WorkerFault>,
    pauses: Backoff,
    closed_at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open { until: Instant },
    HalfOpen { is_probing: bool },
}

/// The effect of an outcome on a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// No change that affects routing.
    None,
    /// The breaker opened. `is_first` is false if it reopened after a failed probe.
    Opened { is_first: bool },
    /// The breaker closed.
    Closed,
    /// The breaker became half-open without a probe in flight.
    HalfOpened,
}

impl Breaker {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            state: State::Closed,
            failures: 0,
            fault: None,
            pauses: Backoff::new(MAX_PAUSE),
            closed_at: now,
        }
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.state {
            State::Closed => BreakerState::Closed,
            State::Open { .. } => BreakerState::Open,
            State::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Returns the end of the pause while the breaker is open.
    pub(crate) fn open_until(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until),
            State::Closed | State::HalfOpen { .. } => None,
        }
    }

    /// Returns `true` if the breaker is half-open and no probe is in flight.
    pub(crate) fn needs_probe(&self) -> bool {
        self.state == State::HalfOpen { is_probing: false }
    }

    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    pub(crate) fn fault(&self) -> Option<&WorkerFault> {
        self.fault.as_ref()
    }

    /// Records that a request goes to the worker. Returns `true` if that request is the probe.
    pub(crate) fn begin(&mut self) -> bool {
        let is_probe = self.needs_probe();
        if is_probe {
            self.state = State::HalfOpen { is_probing: true };
        }
        is_probe
    }

    /// Records that the probe ended without an outcome: its client left, or the request was at
    /// fault.
    pub(crate) fn probe_ended(&mut self) -> Change {
        if self.state != (State::HalfOpen { is_probing: true }) {
            return Change::None;
        }
        self.state = State::HalfOpen { is_probing: false };
        Change::HalfOpened
    }

    /// Records that the worker answered a request.
    pub(crate) fn succeeded(&mut self, now: Instant) -> Change {
        match self.state {
            State::Closed => {
                self.failures = 0;
                self.fault = None;
                Change::None
            }
            // The request began before the breaker opened: the pause stands, especially if the
            // server requested it.
            State::Open { .. } => Change::None,
            State::HalfOpen { .. } => {
                self.state = State::Closed;
                self.failures = 0;
                self.fault = None;
                self.closed_at = now;
                Change::Closed
            }
        }
    }

    /// Records that the worker failed with a request.
    pub(crate) fn failed(&mut self, fault: WorkerFault, now: Instant) -> Change {
        let requested_until = match &fault {
            WorkerFault::Overloaded { until, .. } => Some(*until),
            _ => None,
        };
        let is_key_refused = matches!(fault, WorkerFault::KeyRefused { .. });
        let is_first = self.state == State::Closed;
        self.failures = self.failures.saturating_add(1);
        self.fault = Some(fault);
        match (self.state, requested_until) {
            (State::Open { until }, requested_until) => {
                self.state = State::Open { until: until.max(requested_until.unwrap_or(until)) };
                return Change::None;
            }
            (_, Some(until)) => self.state = State::Open { until },
            (State::Closed, None) if self.failures < FAILURES_TO_OPEN && !is_key_refused => {
                return Change::None;
            }
            (State::Closed, None) => self.open(now, now.saturating_duration_since(self.closed_at)),
            (State::HalfOpen { .. }, None) => self.open(now, Duration::ZERO),
        }
        Change::Opened { is_first }
    }

    fn open(&mut self, now: Instant, healthy_for: Duration) {
        self.state = State::Open { until: now + self.pauses.pause_after(healthy_for) };
    }

    /// Makes an open breaker half-open if its pause is over.
    pub(crate) fn end_pause(&mut self, now: Instant) -> Change {
        match self.state {
            State::Open { until } if until <= now => {
                self.state = State::HalfOpen { is_probing: false };
                Change::HalfOpened
            }
            _ => Change::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed() -> WorkerFault {
        WorkerFault::Failed { status: 502, message: "boom".to_owned() }
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Returns a breaker that has just opened, and the end of its pause.
    fn opened(now: Instant) -> (Breaker, Instant) {
        let mut breaker = Breaker::new(now);
        for _ in 1..FAILURES_TO_OPEN {
            assert_eq!(breaker.failed(failed(), now), Change::None);
        }
        assert_eq!(breaker.failed(failed(), now), Change::Opened { is_first: true });
        let until = breaker.open_until().unwrap();
        (breaker, until)
    }

    #[test]
    fn success_between_failures_keeps_it_closed() {
        let now = Instant::now();
        let mut breaker = Breaker::new(now);
        for _ in 0..3 {
            (1..FAILURES_TO_OPEN)
                .for_each(|_| assert_eq!(breaker.failed(failed(), now), Change::None));
            assert_eq!(breaker.succeeded(now), Change::None);
            assert_eq!(
                (breaker.state(), breaker.failures(), breaker.fault()),
                (BreakerState::Closed, 0, None)
            );
        }
        assert_eq!(opened(now).0.state(), BreakerState::Open);
    }

    #[test]
    fn probe_that_succeeds_closes() {
        let now = Instant::now();
        let (mut breaker, until) = opened(now);
        assert_eq!(
            (breaker.begin(), breaker.end_pause(until - seconds(0.001))),
            (false, Change::None)
        );
        assert_eq!(
            (breaker.end_pause(until), breaker.state()),
            (Change::HalfOpened, BreakerState::HalfOpen)
        );
        assert_eq!((breaker.begin(), breaker.begin()), (true, false), "one probe at a time");
        assert_eq!(
            (breaker.succeeded(until), breaker.state()),
            (Change::Closed, BreakerState::Closed)
        );
        assert_eq!(breaker.failures(), 0);
    }

    #[test]
    fn probes_that_fail_double_the_pause_up_to_a_minute() {
        let mut now = Instant::now();
        let (mut breaker, mut until) = opened(now);
        let mut pauses = vec![until - now];
        for _ in 0..8 {
            now = until;
            breaker.end_pause(now);
            assert!(breaker.begin());
            assert_eq!(breaker.failed(failed(), now), Change::Opened { is_first: false });
            until = breaker.open_until().unwrap();
            pauses.push(until - now);
        }
        assert_eq!(pauses, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0].map(seconds));
    }

    #[test]
    fn pauses_start_over_after_a_healthy_minute() {
        for (healthy_for, pause) in [(seconds(59.0), seconds(1.0)), (seconds(60.0), seconds(0.5))] {
            let (mut breaker, until) = opened(Instant::now());
            breaker.end_pause(until);
            breaker.begin();
            breaker.succeeded(until);
            let now = until + healthy_for;
            for _ in 0..FAILURES_TO_OPEN {
                breaker.failed(failed(), now);
            }
            assert_eq!(breaker.open_until(), Some(now + pause));
        }
    }

    #[test]
    fn probe_without_outcome_admits_another() {
        let (mut breaker, until) = opened(Instant::now());
        breaker.end_pause(until);
        assert!(breaker.begin() && !breaker.needs_probe());
        assert_eq!(breaker.probe_ended(), Change::HalfOpened);
        assert!(breaker.needs_probe() && breaker.begin());
        // A probe whose outcome is known changes nothing when it ends.
        breaker.succeeded(until);
        assert_eq!(breaker.probe_ended(), Change::None);
    }

    #[test]
    fn refused_key_opens_at_once() {
        let now = Instant::now();
        let mut breaker = Breaker::new(now);
        let fault = WorkerFault::KeyRefused { message: "no".to_owned() };
        assert_eq!(breaker.failed(fault, now), Change::Opened { is_first: true });
        assert_eq!(breaker.open_until(), Some(now + seconds(0.5)));
    }

    #[test]
    fn overloaded_server_gets_the_requested_pause() {
        let now = Instant::now();
        let overloaded = |requested: f64| {
            let error = JobError::Overloaded {
                status: 429,
                retry_after: seconds(requested),
                message: String::new(),
            };
            WorkerFault::from_error(&error, now).unwrap()
        };
        for (requested, granted) in [(7.0, 7.0), (86_400.0, 60.0), (0.0, 0.1)] {
            let mut breaker = Breaker::new(now);
            let change = breaker.failed(overloaded(requested), now);
            assert_eq!(change, Change::Opened { is_first: true });
            assert_eq!(breaker.open_until(), Some(now + seconds(granted)));
        }
        let mut breaker = Breaker::new(now);
        breaker.failed(overloaded(5.0), now);
        breaker.failed(overloaded(9.0), now);
        breaker.failed(overloaded(2.0), now);
        assert_eq!(breaker.succeeded(now), Change::None, "the request began before");
        assert_eq!(breaker.open_until(), Some(now + seconds(9.0)));
    }

    #[test]
    fn job_fault_is_not_worker_fault() {
        let now = Instant::now();
        let message = String::new;
        let field = || "body".to_owned();
        for error in [
            JobError::NotTaken(chiasm_backend::DeathReason::new("full")),
            JobError::Refused { field: field(), message: message() },
            JobError::Rejected { status: 422, field: field(), message: message() },
            JobError::Unread,
            JobError::KeepsLosingMedia,
        ] {
            assert_eq!(WorkerFault::from_error(&error, now), None, "{error:?}");
        }
        for error in [
            JobError::Dead(chiasm_backend::DeathReason::new("gone")),
            JobError::Failed,
            JobError::ServerFailed { status: 504, message: message() },
            JobError::UnknownModel { message: message() },
        ] {
            assert!(WorkerFault::from_error(&error, now).is_some(), "{error:?}");
        }
    }
}
