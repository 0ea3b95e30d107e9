//! The counts of a run.

use crate::engine::{LiveRequest, Observer, Stage};
use crate::histogram::Histogram;
use crate::sequence::Sequence;
use crate::timeline::Timeline;
use crate::virtual_time::Nanos;

/// Sums and histograms over the requests after the warm-up, unless noted otherwise.
pub(crate) struct Tally {
    /// The arrival of the first request after the warm-up. Gaps between tokens count from then on.
    pub(crate) count_from: Nanos,
    pub(crate) ttft: Histogram,
    pub(crate) gaps: Histogram,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    /// Embeddings of the images.
    pub(crate) embeds: u64,
    /// Embeddings that engines had to encode.
    pub(crate) encoded: u64,
    /// Images of the ended requests.
    pub(crate) images: u64,
    /// Images of the ended requests that were sent to encoding engines.
    pub(crate) encoded_elsewhere: u64,
    /// Items sent to engines, counted for each engine.
    pub(crate) items: u64,
    /// Items whose tensors the chosen engine had.
    pub(crate) reused_items: u64,
    /// The ended requests, including those of the warm-up.
    pub(crate) completed: u64,
    /// Ended requests that went to two engines.
    pub(crate) split: u64,
    /// Ended requests.
    pub(crate) ended: u64,
    /// Requests that did not fit an engine, including those of the warm-up.
    pub(crate) refused: u64,
    /// The counts over time, including the warm-up.
    pub(crate) timeline: Timeline,
}

impl Tally {
    /// Creates empty counts.
    pub(crate) fn new() -> Self {
        Self {
            count_from: Nanos::MAX,
            ttft: Histogram::new(),
            gaps: Histogram::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            embeds: 0,
            encoded: 0,
            images: 0,
            encoded_elsewhere: 0,
            items: 0,
            reused_items: 0,
            completed: 0,
            split: 0,
            ended: 0,
            refused: 0,
            timeline: Timeline::new(),
        }
    }
}

/// Returns the number of embeddings of a sequence's images.
fn embeds(sequence: &Sequence) -> u64 {
    sequence.items().iter().map(|item| u64::from(item.image.embeds)).sum()
}

impl Observer for Tally {
    fn on_first_token(&mut self, live: &mut LiveRequest, now: Nanos) {
        if let Some(reservation) = &mut live.reservation {
            reservation.first_token();
        }
        self.timeline.record_first_token(live.arrival, now - live.arrival);
        if live.counted {
            self.ttft.add(now - live.arrival, 1);
        }
    }

    fn on_prefilled(&mut self, _: LiveRequest, _: Nanos) {}

    fn on_finished(&mut self, live: LiveRequest, _: Nanos) {
        self.completed += 1;
        let prompt_tokens = live.sequence.prompt() as u64;
        self.timeline.record_end(live.arrival, prompt_tokens, live.cached as u64);
        if live.counted {
            self.prompt_tokens += prompt_tokens;
            self.cached_tokens += live.cached as u64;
            self.embeds += embeds(&live.sequence);
            self.encoded += live.encoded;
            self.images += live.sequence.items().len() as u64;
            self.encoded_elsewhere += live.encoded_elsewhere;
            self.ended += 1;
            self.split += u64::from(live.stage == Stage::Decode);
        }
    }

    fn on_gaps(&mut self, gap: Nanos, tokens: u64, now: Nanos) {
        if now >= self.count_from {
            self.gaps.add(gap, tokens);
        }
    }
}
