//! The outcome of a request as headers, metrics, logs and traces report it.

use std::ops::AddAssign;
use std::time::Duration;

use chiasm_backend::{JobItem, MediaDelivery, Prefill};
use chiasm_types::{Modality, PlanClassId, WorkerId};
use serde::Serialize;

use crate::ClientSampling;

/// The route of a request: its workers, cache hits, media and times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteOutcome {
    /// The worker that generates the answer.
    pub worker: WorkerId,
    /// The worker that encoded media items, if another one computed the prompt.
    pub encoded: Option<EncodeOutcome>,
    /// The worker that computed the prompt, if it is not the one that answers.
    pub prefilled: Option<PrefillOutcome>,
    /// The worker's plan class.
    pub class: PlanClassId,
    /// The number of leading prompt blocks that the worker held when it was picked.
    pub overlap_blocks: usize,
    /// The number of full blocks of the prompt.
    pub total_blocks: usize,
    /// The number of tokens of the expanded prompt.
    pub prompt_tokens: usize,
    /// The number of prompt tokens that stand for media items.
    pub media_tokens: MediaTokens,
    /// The number of media items by the way they reached the worker.
    pub delivered: MediaDelivery,
    /// The engine's own statistics of the prefill; known with the first output.
    pub prefill: Prefill,
    /// The requested sampling settings.
    pub sampling: RequestedSampling,
    /// The times of the preparation stages.
    pub stage_times: StageTimes,
    /// The time from the request's arrival until the worker was picked.
    pub picked_after: Duration,
    /// The time that the hand-over to the backend took, with the media items that it lacked.
    pub hand_off: Duration,
    /// The time from the request's arrival until the engine started to compute the prompt, if the
    /// engine reports it; known with the first output.
    pub prefill_wait: Option<Duration>,
    /// The time from the request's arrival to the first output.
    pub first_token: Option<Duration>,
    /// The number of times that the request was moved to another worker.
    pub moves: usize,
    /// The number of the routing decision on the live page, if the page shows it.
    pub explanation_id: Option<u64>,
}

/// The number of prompt tokens that stand for media items, by modality. Modalities of the model's
/// own processor are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MediaTokens {
    /// The tokens of images.
    #[serde(skip_serializing_if = "is_zero")]
    pub image: usize,
    /// The tokens of videos.
    #[serde(skip_serializing_if = "is_zero")]
    pub video: usize,
    /// The tokens of recordings.
    #[serde(skip_serializing_if = "is_zero")]
    pub audio: usize,
}

fn is_zero(tokens: &usize) -> bool {
    *tokens == 0
}

impl MediaTokens {
    /// Counts the tokens of items.
    pub fn count(items: &[JobItem]) -> Self {
        let mut tokens = Self::default();
        for item in items {
            let counted = match item.modality {
                Modality::Image => &mut tokens.image,
                Modality::Video => &mut tokens.video,
                Modality::Audio => &mut tokens.audio,
                Modality::Other(_) => continue,
            };
            *counted += item.placeholder.length;
        }
        tokens
    }
}

impl AddAssign for MediaTokens {
    fn add_assign(&mut self, other: Self) {
        self.image += other.image;
        self.video += other.video;
        self.audio += other.audio;
    }
}

/// The requested sampling settings that traces report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestedSampling {
    /// The temperature; `None` for the model's default.
    pub temperature: Option<f64>,
    /// The top-p value; `None` for the model's default.
    pub top_p: Option<f64>,
    /// The maximum number of new tokens; `None` fills the context.
    pub max_tokens: Option<usize>,
    /// The number of continuations.
    pub choices: usize,
}

impl RequestedSampling {
    /// Returns the settings that traces report.
    pub fn from_sampling(sampling: &ClientSampling) -> Self {
        Self {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            max_tokens: sampling.max_tokens.map(|tokens| tokens as usize),
            choices: sampling.n as usize,
        }
    }
}

impl RouteOutcome {
    /// Creates an outcome for which only the route is known.
    pub fn new(worker: WorkerId, class: PlanClassId) -> Self {
        Self {
            worker,
            encoded: None,
            prefilled: None,
            class,
            overlap_blocks: 0,
            total_blocks: 0,
            prompt_tokens: 0,
            media_tokens: MediaTokens::default(),
            delivered: MediaDelivery::default(),
            prefill: Prefill::default(),
            sampling: RequestedSampling::default(),
            stage_times: StageTimes::default(),
            picked_after: Duration::ZERO,
            hand_off: Duration::ZERO,
            prefill_wait: None,
            first_token: None,
            moves: 0,
            explanation_id: None,
        }
    }

    /// Returns the value of a `Server-Timing` header: the times that are known so far, in
    /// milliseconds.
    pub fn server_timing(&self) -> String {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let mut timing = format!(
            "prepare;dur={:.2}",
            milliseconds(self.stage_times.fetch + self.stage_times.plan + self.hand_off)
        );
        let known = [
            ("queue", self.prefill.queued),
            ("encode", self.encoded.map(|by| by.duration)),
            ("prefill", self.prefilled.map(|by| by.duration)),
            ("ttft", self.first_token),
        ];
        for (name, time) in known.into_iter().filter_map(|(name, time)| Some((name, time?))) {
            timing.push_str(&format!(", {name};dur={:.2}", milliseconds(time)));
        }
        timing
    }
}

/// The encode stage of a request: the worker that encoded its media items for another worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncodeOutcome {
    /// The worker; of several workers, the slowest one.
    pub worker: WorkerId,
    /// The number of items whose embeddings these workers stored.
    pub items: usize,
    /// The time from the worker's selection until it had stored the embeddings.
    pub duration: Duration,
}

/// The prefill stage of a request: the worker that computed its prompt for another worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillOutcome {
    /// The worker.
    pub worker: WorkerId,
    /// The number of leading prompt blocks that the worker held when it was picked.
    pub overlap_blocks: usize,
    /// The number of media items by the way they reached the worker.
    pub delivered: MediaDelivery,
    /// The engine's own statistics of the prefill.
    pub prefill: Prefill,
    /// The time that the hand-over of the job took, with the media items that the worker lacked.
    pub hand_off: Duration,
    /// The time from the worker's selection until the prompt was ready for the other worker.
    pub duration: Duration,
}

/// The times of the stages in which a request is prepared, including waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Reading and parsing the request.
    pub parse: Duration,
    /// Fetching the bytes of the media items.
    pub fetch: Duration,
    /// Rendering the template, tokenizing, planning the media items and computing block keys.
    pub plan: Duration,
}
