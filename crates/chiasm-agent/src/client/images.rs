//! Whether an agent that lacks an image is sent its file, or the tensors that are made of it here.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chiasm_backend::{Making, MediaLoad, TensorFormat};

/// How images reach agents that could make their tensors themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AgentMedia {
    /// They go as files, and as tensors while the agent has more to do than sending those takes and
    /// a thread here has nothing to do.
    #[default]
    Auto,
    /// They go as files.
    Encoded,
    /// They go as tensors where the agent takes those.
    Tensors,
}

/// The forms in which one engine of an agent can be sent images.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageForms {
    pub(super) choice: AgentMedia,
    /// What the engine wants tensors to be; `None` if the agent takes none of images.
    pub(super) format: Option<TensorFormat>,
    /// The most bytes that an item's tensors may have.
    pub(super) most_bytes: u64,
}

impl ImageForms {
    /// What tensors would be that may be sent.
    pub(super) fn tensors(&self) -> Option<TensorFormat> {
        self.format.filter(|_| self.choice != AgentMedia::Encoded)
    }
}

/// Time for a byte, in seconds, until some were sent: 8 Gbit/s.
const USUAL_BYTE: f64 = 1e-9;
/// A transfer of fewer bytes tells how long the way is, and not how fast.
const TELLING_BYTES: u64 = 1 << 20;
/// How much one transfer counts against those before it.
const NEWEST: f64 = 0.25;
/// How long what transfers have told is believed.
const BELIEVED_FOR: Duration = Duration::from_secs(60);
/// What is less to wait is not worth a look: loads are told of some times a second.
const NO_WAIT: Duration = Duration::from_millis(2);

/// What an agent has to do with media, and how fast the way to it is: of all its engines.
#[derive(Debug, Default)]
pub(super) struct AgentWork {
    inner: Mutex<Work>,
}

#[derive(Debug, Default)]
struct Work {
    load: MediaLoad,
    /// When that was so; `None` before the agent has told of any.
    at: Option<Instant>,
    /// Time for a byte in seconds, and when that was found.
    byte: Option<(f64, Instant)>,
}

impl AgentWork {
    /// The agent says what it has to do.
    pub(super) fn told(&self, load: MediaLoad) {
        let mut work = self.work();
        (work.load, work.at) = (load, Some(Instant::now()));
    }

    /// Whether the tensors of an image are sent rather than its file, of which the agent has to
    /// make them otherwise: then that is more to do for it.
    pub(super) fn takes_longer_than_sending(&self, making: &Making, file_bytes: u64) -> bool {
        self.work().decide(making, file_bytes, Instant::now())
    }

    /// The agent gets a file of which it makes the tensors.
    pub(super) fn given(&self, making: &Making) {
        self.work().give(making);
    }

    /// So many bytes took so long.
    pub(super) fn sent(&self, bytes: u64, took: Duration) {
        self.work().sent(bytes, took, Instant::now());
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work {
    fn decide(&mut self, making: &Making, file_bytes: u64, now: Instant) -> bool {
        self.pass(now);
        let wait = self.load.wait(making.work, making.price);
        let byte = self.byte.filter(|(_, at)| now.saturating_duration_since(*at) < BELIEVED_FOR);
        let seconds = making.bytes.saturating_sub(file_bytes) as f64
            * byte.map_or(USUAL_BYTE, |(byte, _)| byte);
        if making.at_once && wait > NO_WAIT && wait.as_secs_f64() > seconds {
            return true;
        }
        self.give(making);
        false
    }

    /// Takes off what the agent has done since it told, by the time that has passed: it tells every
    /// 50 ms while it has something to do.
    fn pass(&mut self, now: Instant) {
        let Some(at) = self.at.replace(now) else { return };
        let mut done = now.saturating_duration_since(at).saturating_mul(self.load.threads.max(1));
        for pending in &mut self.load.pending {
            let of_these = done.min(*pending);
            *pending -= of_these;
            done -= of_these;
        }
    }

    fn give(&mut self, making: &Making) {
        let pending = &mut self.load.pending[making.work as usize];
        *pending = pending.saturating_add(making.price);
    }

    fn sent(&mut self, bytes: u64, took: Duration, now: Instant) {
        if bytes < TELLING_BYTES {
            return;
        }
        let newest = took.as_secs_f64() / bytes as f64;
        let before = self.byte.filter(|(_, at)| now.saturating_duration_since(*at) < BELIEVED_FOR);
        let byte = before.map_or(newest, |(before, _)| before + NEWEST * (newest - before));
        self.byte = Some((byte, now));
    }
}

#[cfg(test)]
mod tests {
    use chiasm_backend::WorkSize;

    use super::*;

    const FILE: u64 = 300_000;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// An image of 1920 × 1080: 40 ms of a core, and 13 ms on the usual way.
    fn making() -> Making {
        let (size, bytes, price) = ((1920, 1080), 13_300_000, ms(40));
        Making { size, bytes, price, work: WorkSize::Usual, at_once: true }
    }

    fn work(pending: u64, now: Instant) -> Work {
        let load = MediaLoad { threads: 2, pending: [ms(0), ms(pending), ms(0)] };
        Work { load, at: Some(now), byte: None }
    }

    #[test]
    fn tensors_go_where_the_wait_is_longer_than_they_take() {
        let now = Instant::now();
        let goes = |pending, making: Making| work(pending, now).decide(&making, FILE, now);
        assert!(!goes(0, making()));
        // A wait of 13 ms, and of 14.
        assert!(!goes(66, making()));
        assert!(goes(68, making()));
        assert!(!goes(500, Making { at_once: false, ..making() }));
        // However small they are: nobody waits.
        assert!(!goes(42, Making { bytes: FILE, ..making() }));
        assert!(goes(48, Making { bytes: FILE, ..making() }));
    }

    #[test]
    fn files_that_were_sent_are_work_until_there_was_time_for_it() {
        let now = Instant::now();
        let mut work = work(0, now);
        let sent: Vec<_> = (0..5).map(|_| work.decide(&making(), FILE, now)).collect();
        assert_eq!(sent, [false, false, true, true, true]);
        // Two threads have done what there was.
        assert!(!work.decide(&making(), FILE, now + ms(40)));
        // And what the agent says is what counts.
        work.load.pending = [ms(0), ms(400), ms(0)];
        work.at = Some(now + ms(60));
        assert!(work.decide(&making(), FILE, now + ms(61)));
    }

    #[test]
    fn a_slow_way_is_found_to_be_one() {
        let now = Instant::now();
        let mut work = work(200, now);
        assert!(work.decide(&making(), FILE, now));
        // 1 Gbit/s: a hundred milliseconds.
        work.sent(13_000_000, ms(104), now);
        assert!(!work.decide(&making(), FILE, now));
        // Small ones say nothing of it.
        work.sent(1000, ms(104), now);
        for _ in 0..20 {
            work.sent(13_000_000, ms(13), now);
        }
        work.load.pending = [ms(0), ms(200), ms(0)];
        assert!(work.decide(&making(), FILE, now));
        // What was found long ago is not believed any more.
        work.sent(13_000_000, ms(10_000), now);
        let later = now + BELIEVED_FOR;
        work.load.pending = [ms(0), ms(200), ms(0)];
        work.at = Some(later);
        assert!(work.decide(&making(), FILE, later));
    }
}
