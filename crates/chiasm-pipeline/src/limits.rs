//! The limits of a pipeline: per request and in total.

use std::collections::BTreeMap;
use std::time::Duration;

use chiasm_types::Modality;

/// The limits of a pipeline: per request and in total.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineLimits {
    /// The maximum number of media items in one prompt.
    pub items_per_prompt: ItemLimits,
    /// The maximum number of requests in flight; the server refuses more. `None` means twice as
    /// many as the workers run at once, but at least 1024.
    pub requests: Option<usize>,
    /// The maximum bytes of processed media to keep for other engines that receive them in
    /// messages; 0 keeps none.
    pub processed_bytes: u64,
    /// The number of threads for CPU-heavy work of usual size. Short work has its own threads, one
    /// more; heavy work has half as many, rounded up.
    pub cpu_threads: usize,
    /// The maximum CPU time of one request, as estimated before the work is done.
    pub request_cost: Duration,
    /// The maximum time from a request's arrival to its first token; `None` for no limit.
    pub first_token_timeout: Option<Duration>,
    /// The maximum time from a request's arrival to its last token; `None` for no limit.
    pub request_timeout: Option<Duration>,
    /// The time for which a prompt is refused after several engines died with it.
    pub quarantine: Duration,
}

impl Default for PipelineLimits {
    fn default() -> Self {
        Self {
            items_per_prompt: ItemLimits::default(),
            processed_bytes: 256 << 20,
            requests: None,
            // Leaves one core to the async threads.
            cpu_threads: std::thread::available_parallelism()
                .map_or(1, |cores| cores.get() - 1)
                .max(1),
            request_cost: Duration::from_secs(10),
            first_token_timeout: Some(Duration::from_secs(600)),
            request_timeout: Some(Duration::from_secs(3600)),
            quarantine: Duration::from_secs(60),
        }
    }
}

/// The maximum number of media items of each modality in one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemLimits(BTreeMap<Modality, usize>);

impl ItemLimits {
    /// Returns the maximum for a modality; 0 if it was not set.
    pub fn get(&self, modality: &Modality) -> usize {
        self.0.get(modality).copied().unwrap_or(0)
    }

    /// Sets the maximum for a modality.
    pub fn set(&mut self, modality: Modality, items: usize) {
        self.0.insert(modality, items);
    }
}

impl Default for ItemLimits {
    fn default() -> Self {
        Self(BTreeMap::from([(Modality::Image, 64), (Modality::Video, 16), (Modality::Audio, 64)]))
    }
}
