//! The bounds on the work for a request.

use std::collections::BTreeMap;
use std::time::Duration;

use chiasm_types::Modality;

/// The bounds on the work for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineLimits {
    /// Media items in one prompt.
    pub items_per_prompt: ItemLimits,
    /// Requests in flight, beyond which the server refuses more. `None` for twice as many as the
    /// workers run at once, but at least 1024.
    pub requests: Option<usize>,
    /// Bytes of processed media that are kept for other engines, where they travel in messages; 0
    /// keeps none.
    pub processed_bytes: u64,
    /// Threads for CPU-heavy work of usual size. Short work has one more than that of its own,
    /// heavy work half as many, rounded up.
    pub cpu_threads: usize,
    /// The CPU time that one request may ask for, by estimate before the work is done.
    pub request_cost: Duration,
    /// The time from a request's arrival to its first token; `None` for any.
    pub first_token_timeout: Option<Duration>,
    /// The time from a request's arrival to its last token; `None` for any.
    pub request_timeout: Option<Duration>,
    /// The time for which a prompt is refused that was in several engines when they died.
    pub quarantine: Duration,
}

impl Default for PipelineLimits {
    fn default() -> Self {
        Self {
            items_per_prompt: ItemLimits::default(),
            processed_bytes: 256 << 20,
            requests: None,
            // The async threads need a core too.
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

/// The most media items of each modality in one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemLimits(BTreeMap<Modality, usize>);

impl ItemLimits {
    /// Returns the most items of a modality; 0 for one that was not named.
    pub fn get(&self, modality: &Modality) -> usize {
        self.0.get(modality).copied().unwrap_or(0)
    }

    /// Sets the most items of a modality.
    pub fn set(&mut self, modality: Modality, items: usize) {
        self.0.insert(modality, items);
    }
}

impl Default for ItemLimits {
    fn default() -> Self {
        Self(BTreeMap::from([(Modality::Image, 64), (Modality::Video, 16), (Modality::Audio, 64)]))
    }
}
