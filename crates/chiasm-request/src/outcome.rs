//! What is told of a request: in headers, metrics, logs and traces.

use std::ops::AddAssign;
use std::time::Duration;

use chiasm_backend::{Delivered, JobItem, Prefill};
use chiasm_types::{Modality, PlanClassId, WorkerId};
use serde::Serialize;

use crate::Sampling;

/// Where a request went and what it found there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteOutcome {
    /// The worker that answers.
    pub worker: WorkerId,
    /// Whoever encoded media items, if that was another worker than the one that computed the
    /// prompt.
    pub encoded: Option<EncodeOutcome>,
    /// Whoever computed the prompt, if that was another worker.
    pub prefilled: Option<PrefillOutcome>,
    /// The worker's plan class.
    pub class: PlanClassId,
    /// Leading blocks of the prompt that the worker held when it was picked.
    pub overlap_blocks: usize,
    /// Full blocks of the prompt.
    pub total_blocks: usize,
    /// Tokens of the expanded prompt.
    pub prompt_tokens: usize,
    /// Those of them that stand for media items.
    pub media_tokens: MediaTokens,
    /// How the media items travelled.
    pub delivered: Delivered,
    /// How the engine computed the prompt, by its own account; known with the first output.
    pub prefill: Prefill,
    /// How tokens were to be chosen.
    pub asked: RequestedSampling,
    /// What preparing it took.
    pub took: StageTimes,
    /// Time from its arrival until the worker was picked.
    pub picked: Duration,
    /// Time that its worker's backend took to take it, with the media items that it lacked.
    pub hand_off: Duration,
    /// Time from its arrival until the engine began with its prompt, where that tells; known with
    /// the first output.
    pub prefill_wait: Option<Duration>,
    /// Time from its arrival to the first output.
    pub first_token: Option<Duration>,
    /// The workers that it was moved away from before.
    pub moves: usize,
    /// Its number on the live page, if that tells of it.
    pub explained: Option<u64>,
}

/// Tokens of a prompt that stand for media items, by what these are. Those that only the model's
/// own processor knows are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MediaTokens {
    /// Tokens of images.
    #[serde(skip_serializing_if = "is_zero")]
    pub image: usize,
    /// Tokens of videos.
    #[serde(skip_serializing_if = "is_zero")]
    pub video: usize,
    /// Tokens of recordings.
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

/// What a client has asked for that traces tell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestedSampling {
    /// `None` for the model's own.
    pub temperature: Option<f64>,
    /// `None` for the model's own.
    pub top_p: Option<f64>,
    /// `None` for as many as there is room for.
    pub max_tokens: Option<usize>,
    /// Continuations.
    pub choices: usize,
}

impl RequestedSampling {
    /// Returns the part of the sampling that traces have.
    pub fn from_sampling(sampling: &Sampling) -> Self {
        Self {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            max_tokens: sampling.max_tokens.map(|tokens| tokens as usize),
            choices: sampling.n as usize,
        }
    }
}

impl RouteOutcome {
    /// Nothing is known yet but where it goes.
    pub fn on(worker: WorkerId, class: PlanClassId) -> Self {
        Self {
            worker,
            encoded: None,
            prefilled: None,
            class,
            overlap_blocks: 0,
            total_blocks: 0,
            prompt_tokens: 0,
            media_tokens: MediaTokens::default(),
            delivered: Delivered::default(),
            prefill: Prefill::default(),
            asked: RequestedSampling::default(),
            took: StageTimes::default(),
            picked: Duration::ZERO,
            hand_off: Duration::ZERO,
            prefill_wait: None,
            first_token: None,
            moves: 0,
            explained: None,
        }
    }

    /// The value of a `Server-Timing` header: times in milliseconds that are known by now.
    pub fn server_timing(&self) -> String {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let mut timing = format!(
            "prepare;dur={:.2}",
            milliseconds(self.took.fetch + self.took.plan + self.hand_off)
        );
        let known = [
            ("queue", self.prefill.queued),
            ("encode", self.encoded.map(|by| by.took)),
            ("prefill", self.prefilled.map(|by| by.took)),
            ("ttft", self.first_token),
        ];
        for (name, time) in known.into_iter().filter_map(|(name, time)| Some((name, time?))) {
            timing.push_str(&format!(", {name};dur={:.2}", milliseconds(time)));
        }
        timing
    }
}

/// Who encoded media items of a request for the worker that computed its prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncodeOutcome {
    /// The worker; of several the one that took longest.
    pub worker: WorkerId,
    /// Items that it, or they, left the embeddings of.
    pub items: usize,
    /// Time from when it was picked until it had left the embeddings.
    pub took: Duration,
}

/// The worker that computed a prompt, and what it found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillOutcome {
    /// The worker.
    pub worker: WorkerId,
    /// Leading blocks of the prompt that it held when it was picked.
    pub overlap_blocks: usize,
    /// How the media items travelled to it.
    pub delivered: Delivered,
    /// How it computed the prompt, by its own account.
    pub prefill: Prefill,
    /// Time that it took to take the job, with the media items that it lacked.
    pub hand_off: Duration,
    /// Time from when it was picked until it had left the prompt.
    pub took: Duration,
}

/// What the parts of preparing a request took, waiting included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Reading and understanding the request.
    pub before: Duration,
    /// The bytes of its media items.
    pub fetch: Duration,
    /// Template, tokens, plans of its media items, block keys.
    pub plan: Duration,
}
