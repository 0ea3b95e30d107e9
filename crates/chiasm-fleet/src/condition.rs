//! Whether a worker that says nothing is busy with a long step or hung.

use std::time::Duration;

use chiasm_backend::Activity;
use tokio::time::Instant;

/// How long workers may be silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// After so long a worker is [`Condition::Suspect`].
    pub suspect_after: Duration,
    /// After so long it is [`Condition::Hung`], where nobody can see what its processes do.
    pub hung_after: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { suspect_after: Duration::from_secs(10), hung_after: Duration::from_secs(60) }
    }
}

impl Patience {
    /// How often a worker is looked at, and asked if it is silent.
    pub fn look_every(&self) -> Duration {
        (self.suspect_after / 10).clamp(Duration::from_millis(10), Duration::from_secs(15))
    }
}

/// What a worker's silence means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// It answers, or was silent for less than anybody minds.
    #[default]
    Answers,
    /// It says nothing, and is given nothing new. It may be in a long step.
    Suspect,
    /// It makes no progress: whoever waits for it may go elsewhere.
    Hung,
}

impl Condition {
    /// The name in reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Answers => "answers",
            Self::Suspect => "suspect",
            Self::Hung => "hung",
        }
    }
}

/// Part of a core that processes must use to count as working: less is what waiting costs.
const WORKING: f64 = 0.01;

/// Follows one worker's condition, from looks at it.
#[derive(Debug)]
pub(crate) struct Watch {
    patience: Patience,
    condition: Condition,
    /// The last look, too, found it silent for too long. One look alone may come late, as when this
    /// process was stopped, and then before an answer that has arrived.
    silent_before: bool,
    /// When its processes were last seen to have made progress, and the CPU time that they had
    /// taken then.
    progress: Option<(Instant, Duration)>,
}

impl Watch {
    pub(crate) fn new(patience: Patience) -> Self {
        Self { patience, condition: Condition::Answers, silent_before: false, progress: None }
    }

    /// Whether the next [`look`](Self::look) needs to know what the worker's processes do, which
    /// takes a moment to find out.
    pub(crate) fn wants_activity(&self) -> bool {
        self.silent_before
    }

    /// Takes note that the worker has been silent for so long, and of what its processes do.
    pub(crate) fn look(&mut self, silent: Duration, activity: Option<Activity>) -> Condition {
        if silent < self.patience.suspect_after {
            *self = Self::new(self.patience);
        } else if std::mem::replace(&mut self.silent_before, true) {
            self.condition =
                if self.is_hung(silent, activity) { Condition::Hung } else { Condition::Suspect };
        }
        self.condition
    }

    fn is_hung(&mut self, silent: Duration, activity: Option<Activity>) -> bool {
        let Some(Activity { stopped, cpu }) = activity else {
            return silent >= self.patience.hung_after;
        };
        let now = Instant::now();
        let (since, before) = *self.progress.get_or_insert((now, cpu));
        let window = now - since;
        if cpu.saturating_sub(before).as_secs_f64() > WORKING * window.as_secs_f64() {
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
    fn one_late_look_means_nothing_and_an_answer_ends_all_suspicion() {
        let mut watch = Watch::new(PATIENCE);
        assert_eq!(watch.look(seconds(9), None), Condition::Answers);
        assert_eq!(watch.look(seconds(500), None), Condition::Answers);
        assert_eq!(watch.look(seconds(0), None), Condition::Answers);
        assert_eq!(watch.look(seconds(10), None), Condition::Answers);
        assert_eq!(watch.look(seconds(12), None), Condition::Suspect);
        assert_eq!(watch.look(seconds(0), None), Condition::Answers);
    }

    #[test]
    fn who_can_t_be_looked_at_is_hung_after_the_longer_limit() {
        let mut watch = Watch::new(PATIENCE);
        watch.look(seconds(10), None);
        assert_eq!(watch.look(seconds(59), None), Condition::Suspect);
        assert_eq!(watch.look(seconds(60), None), Condition::Hung);
        assert_eq!(watch.look(seconds(61), None), Condition::Hung);
    }

    #[tokio::test(start_paused = true)]
    async fn processes_that_are_stopped_or_idle_are_hung_and_those_that_work_are_not() {
        let mut watch = Watch::new(PATIENCE);
        watch.look(seconds(10), None);
        for turn in 0..100_u64 {
            assert_eq!(watch.look(seconds(12 + turn), working(seconds(turn))), Condition::Suspect);
            tokio::time::advance(seconds(1)).await;
        }
        // Its last progress was seen a second ago; after that it has as long as until it became
        // suspect.
        for _ in 0..9 {
            assert_eq!(watch.look(seconds(200), working(seconds(99))), Condition::Suspect);
            tokio::time::advance(seconds(1)).await;
        }
        assert_eq!(watch.look(seconds(201), working(seconds(99))), Condition::Hung);
        assert_eq!(watch.look(seconds(202), working(seconds(102))), Condition::Suspect);
        let stopped = Some(Activity { stopped: true, cpu: seconds(103) });
        assert_eq!(watch.look(seconds(203), stopped), Condition::Hung);
    }
}
