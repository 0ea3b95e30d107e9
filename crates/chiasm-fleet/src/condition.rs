//! The liveness of a silent worker: busy with a long step, or hung.

use std::time::Duration;

use chiasm_backend::Activity;
use tokio::time::Instant;

/// The limits on a worker's silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// The silence after which a worker is [`Condition::Suspect`].
    pub suspect_after: Duration,
    /// The silence after which a worker is [`Condition::Hung`] if the activity of its processes is
    /// unknown.
    pub hung_after: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { suspect_after: Duration::from_secs(10), hung_after: Duration::from_secs(60) }
    }
}

impl Patience {
    /// Returns the interval between two checks of a worker. A silent worker is probed in each.
    pub fn check_interval(&self) -> Duration {
        (self.suspect_after / 10).clamp(Duration::from_millis(10), Duration::from_secs(15))
    }
}

/// A worker's liveness.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// The worker answers, or has been silent for less than [`Patience::suspect_after`].
    #[default]
    Answers,
    /// The worker is silent and gets no new requests. It may be in a long step.
    Suspect,
    /// The worker makes no progress, so its requests may move to another worker.
    Hung,
}

impl Condition {
    /// Returns the name in reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Answers => "answers",
            Self::Suspect => "suspect",
            Self::Hung => "hung",
        }
    }
}

/// The share of one core that counts as work. Waiting alone costs less.
const MIN_CPU_SHARE: f64 = 0.01;

/// Derives one worker's condition from periodic checks.
#[derive(Debug)]
pub(crate) struct ConditionTracker {
    patience: Patience,
    condition: Condition,
    /// `true` if the previous check found the worker silent for too long. A single check may be
    /// late, as when this process was stopped, or may come just before an answer.
    was_silent: bool,
    /// The time of the last observed progress of the worker's processes, and their CPU time then.
    progress: Option<(Instant, Duration)>,
}

impl ConditionTracker {
    pub(crate) fn new(patience: Patience) -> Self {
        Self { patience, condition: Condition::Answers, was_silent: false, progress: None }
    }

    /// Returns `true` if the next [`update`](Self::update) needs the activity of the worker's
    /// processes, which takes a moment to read.
    pub(crate) fn needs_activity(&self) -> bool {
        self.was_silent
    }

    /// Updates and returns the condition of a worker that has been silent for `silent`.
    pub(crate) fn update(&mut self, silent: Duration, activity: Option<Activity>) -> Condition {
        if silent < self.patience.suspect_after {
            *self = Self::new(self.patience);
        } else if std::mem::replace(&mut self.was_silent, true) {
            self.condition =
                if self.is_hung(silent, activity) { Condition::Hung } else { Condition::Suspect };
        }
        self.condition
    }

    /// Returns `true` if a silent engine hangs: its processes are stopped, or have used less than
    /// [`MIN_CPU_SHARE`] of a core for `suspect_after`. If the processes are not visible, the
    /// engine hangs after a silence of `hung_after`.
    fn is_hung(&mut self, silent: Duration, activity: Option<Activity>) -> bool {
        let Some(Activity { stopped, cpu }) = activity else {
            return silent >= self.patience.hung_after;
        };
        let now = Instant::now();
        let (since, cpu_then) = *self.progress.get_or_insert((now, cpu));
        let window = now - since;
        let cpu_used = cpu.saturating_sub(cpu_then);
        if cpu_used.as_secs_f64() > MIN_CPU_SHARE * window.as_secs_f64() {
            self.progress = Some((now, cpu));
            return stopped;
        }
        stopped || window >= self.patience.suspect_after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience =
        Patience { suspect_after: Duration::from_secs(10), hung_after: Duration::from_secs(60) };

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn working(cpu: Duration) -> Option<Activity> {
        Some(Activity { stopped: false, cpu })
    }

    #[test]
    fn single_late_check_is_ignored() {
        let mut tracker = ConditionTracker::new(PATIENCE);
        assert_eq!(tracker.update(seconds(9), None), Condition::Answers);
        assert_eq!(tracker.update(seconds(500), None), Condition::Answers);
        assert_eq!(tracker.update(seconds(0), None), Condition::Answers);
        assert_eq!(tracker.update(seconds(10), None), Condition::Answers);
        assert_eq!(tracker.update(seconds(12), None), Condition::Suspect);
        assert_eq!(tracker.update(seconds(0), None), Condition::Answers);
    }

    #[test]
    fn worker_of_unknown_activity_hangs_after_longer_limit() {
        let mut tracker = ConditionTracker::new(PATIENCE);
        tracker.update(seconds(10), None);
        assert_eq!(tracker.update(seconds(59), None), Condition::Suspect);
        assert_eq!(tracker.update(seconds(60), None), Condition::Hung);
        assert_eq!(tracker.update(seconds(61), None), Condition::Hung);
    }

    #[tokio::test(start_paused = true)]
    async fn only_stopped_or_idle_processes_hang() {
        let mut tracker = ConditionTracker::new(PATIENCE);
        tracker.update(seconds(10), None);
        for second in 0..100_u64 {
            let condition = tracker.update(seconds(12 + second), working(seconds(second)));
            assert_eq!(condition, Condition::Suspect);
            tokio::time::advance(seconds(1)).await;
        }
        // The last progress was seen a second ago; the processes may idle for `suspect_after` from
        // then.
        for _ in 0..9 {
            assert_eq!(tracker.update(seconds(200), working(seconds(99))), Condition::Suspect);
            tokio::time::advance(seconds(1)).await;
        }
        assert_eq!(tracker.update(seconds(201), working(seconds(99))), Condition::Hung);
        assert_eq!(tracker.update(seconds(202), working(seconds(102))), Condition::Suspect);
        let stopped = Some(Activity { stopped: true, cpu: seconds(103) });
        assert_eq!(tracker.update(seconds(203), stopped), Condition::Hung);
    }
}
