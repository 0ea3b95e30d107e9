//! The choice between sending an agent an image's file, and tensors made of it here.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chiasm_backend::{MediaLoad, ProcessingCost, TensorFormat};

/// The form in which images are sent to agents that could process them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AgentMedia {
    /// As tensors while a thread of this process is idle and sending the tensors takes less time
    /// than the agent needs for its queued work. Otherwise as files.
    #[default]
    Auto,
    /// As files.
    Encoded,
    /// As tensors, if the agent takes them.
    Tensors,
}

/// The forms in which images can be sent to one engine of an agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageForms {
    pub(super) choice: AgentMedia,
    /// The format of the engine's image tensors; `None` if the agent takes none.
    pub(super) format: Option<TensorFormat>,
    /// The maximum size of an item's tensors, in bytes.
    pub(super) max_bytes: u64,
}

impl ImageForms {
    /// Returns the format of tensors that may be sent, if any.
    pub(super) fn tensors(&self) -> Option<TensorFormat> {
        self.format.filter(|_| self.choice != AgentMedia::Encoded)
    }
}

/// The assumed seconds per byte before any measurement: 8 Gbit/s.
const DEFAULT_SECONDS_PER_BYTE: f64 = 1e-9;
/// The smallest transfer that is measured, in bytes. Smaller ones show the latency, not the rate.
const MIN_MEASURED_BYTES: u64 = 1 << 20;
/// The weight of one transfer in the moving average.
const AVERAGE_WEIGHT: f64 = 0.25;
/// The time for which a measured rate is valid.
const RATE_LIFETIME: Duration = Duration::from_secs(60);
/// The shortest wait that is considered: loads are only reported some times a second.
const MIN_WAIT: Duration = Duration::from_millis(2);

/// An agent's media work, and the speed of the connection to it, for all its engines.
#[derive(Debug, Default)]
pub(super) struct AgentWork {
    inner: Mutex<Work>,
}

#[derive(Debug, Default)]
struct Work {
    load: MediaLoad,
    /// The time of that load; `None` before the agent has reported any.
    updated_at: Option<Instant>,
    /// The measured seconds per byte, and the time of the last measurement.
    seconds_per_byte: Option<(f64, Instant)>,
}

impl AgentWork {
    /// Sets the load that the agent has reported.
    pub(super) fn set_load(&self, load: MediaLoad) {
        let mut work = self.work();
        work.load = load;
        work.updated_at = Some(Instant::now());
    }

    /// Returns `true` if an image's tensors should be sent instead of its file. Otherwise the agent
    /// has to make them, which is added to its work.
    pub(super) fn should_send_tensors(&self, cost: &ProcessingCost, file_bytes: u64) -> bool {
        self.work().should_send_tensors(cost, file_bytes, Instant::now())
    }

    /// Adds the work for a file whose tensors the agent makes.
    pub(super) fn add_file(&self, cost: &ProcessingCost) {
        self.work().add_file(cost);
    }

    /// Records the duration of a transfer.
    pub(super) fn record_transfer(&self, bytes: u64, duration: Duration) {
        self.work().record_transfer(bytes, duration, Instant::now());
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work {
    fn should_send_tensors(
        &mut self,
        cost: &ProcessingCost,
        file_bytes: u64,
        now: Instant,
    ) -> bool {
        self.advance(now);
        let wait = self.load.estimated_wait(cost.work_size, cost.cpu_time);
        let rate = self.measured_rate(now).unwrap_or(DEFAULT_SECONDS_PER_BYTE);
        let seconds = cost.tensor_bytes.saturating_sub(file_bytes) as f64 * rate;
        if cost.starts_immediately && wait > MIN_WAIT && wait.as_secs_f64() > seconds {
            return true;
        }
        self.add_file(cost);
        false
    }

    /// Returns the measured seconds per byte, unless the measurement is too old.
    fn measured_rate(&self, now: Instant) -> Option<f64> {
        let (rate, measured_at) = self.seconds_per_byte?;
        let is_recent = now.saturating_duration_since(measured_at) < RATE_LIFETIME;
        is_recent.then_some(rate)
    }

    /// Subtracts what the agent must have done since its last report. It reports every 50 ms while
    /// it has work.
    fn advance(&mut self, now: Instant) {
        let Some(before) = self.updated_at.replace(now) else { return };
        let elapsed = now.saturating_duration_since(before);
        let mut done = elapsed.saturating_mul(self.load.threads.max(1));
        for pending in &mut self.load.pending {
            let part = done.min(*pending);
            *pending -= part;
            done -= part;
        }
    }

    fn add_file(&mut self, cost: &ProcessingCost) {
        let pending = &mut self.load.pending[cost.work_size as usize];
        *pending = pending.saturating_add(cost.cpu_time);
    }

    fn record_transfer(&mut self, bytes: u64, duration: Duration, now: Instant) {
        if bytes < MIN_MEASURED_BYTES {
            return;
        }
        let newest = duration.as_secs_f64() / bytes as f64;
        let before = self.measured_rate(now);
        let rate = before.map_or(newest, |before| before + AVERAGE_WEIGHT * (newest - before));
        self.seconds_per_byte = Some((rate, now));
    }
}

#[cfg(test)]
mod tests {
    use chiasm_backend::WorkSize;

    use super::*;

    const FILE_BYTES: u64 = 300_000;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// The cost of an image of 1920 × 1080: 40 ms of a core, and 13 ms to send at the default rate.
    fn cost() -> ProcessingCost {
        let image_size = (1920, 1080);
        let tensor_bytes = 13_300_000;
        let cpu_time = ms(40);
        ProcessingCost {
            image_size,
            tensor_bytes,
            cpu_time,
            work_size: WorkSize::Usual,
            starts_immediately: true,
        }
    }

    fn work(pending: u64, now: Instant) -> Work {
        let load = MediaLoad { threads: 2, pending: [ms(0), ms(pending), ms(0)] };
        Work { load, updated_at: Some(now), seconds_per_byte: None }
    }

    #[test]
    fn tensors_are_sent_if_the_wait_exceeds_their_transfer() {
        let now = Instant::now();
        let sends_tensors = |pending, cost: ProcessingCost| {
            work(pending, now).should_send_tensors(&cost, FILE_BYTES, now)
        };
        assert!(!sends_tensors(0, cost()));
        // The wait is 13 ms, then 14 ms.
        assert!(!sends_tensors(66, cost()));
        assert!(sends_tensors(68, cost()));
        assert!(!sends_tensors(500, ProcessingCost { starts_immediately: false, ..cost() }));
        // Even small tensors are not sent if there is hardly any wait.
        assert!(!sends_tensors(42, ProcessingCost { tensor_bytes: FILE_BYTES, ..cost() }));
        assert!(sends_tensors(48, ProcessingCost { tensor_bytes: FILE_BYTES, ..cost() }));
    }

    #[test]
    fn sent_files_count_as_work_until_processed() {
        let now = Instant::now();
        let mut work = work(0, now);
        let sent: Vec<_> =
            (0..5).map(|_| work.should_send_tensors(&cost(), FILE_BYTES, now)).collect();
        assert_eq!(sent, [false, false, true, true, true]);
        // The agent's two threads have done all the work.
        assert!(!work.should_send_tensors(&cost(), FILE_BYTES, now + ms(40)));
        // A new report of the agent replaces the estimate.
        work.load.pending = [ms(0), ms(400), ms(0)];
        work.updated_at = Some(now + ms(60));
        assert!(work.should_send_tensors(&cost(), FILE_BYTES, now + ms(61)));
    }

    #[test]
    fn slow_connection_is_measured() {
        let now = Instant::now();
        let mut work = work(200, now);
        assert!(work.should_send_tensors(&cost(), FILE_BYTES, now));
        // 1 Gbit/s: a hundred milliseconds.
        work.record_transfer(13_000_000, ms(104), now);
        assert!(!work.should_send_tensors(&cost(), FILE_BYTES, now));
        // Small transfers are not measured.
        work.record_transfer(1000, ms(104), now);
        for _ in 0..20 {
            work.record_transfer(13_000_000, ms(13), now);
        }
        work.load.pending = [ms(0), ms(200), ms(0)];
        assert!(work.should_send_tensors(&cost(), FILE_BYTES, now));
        // Old measurements expire.
        work.record_transfer(13_000_000, ms(10_000), now);
        let later = now + RATE_LIFETIME;
        work.load.pending = [ms(0), ms(200), ms(0)];
        work.updated_at = Some(later);
        assert!(work.should_send_tensors(&cost(), FILE_BYTES, later));
    }
}
