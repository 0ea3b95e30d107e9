//! What is counted during a run.

use crate::engine::{Live, Observer, Stage};
use crate::histogram::Histogram;
use crate::sequence::Sequence;
use crate::timeline::Timeline;
use crate::virtual_time::Nanos;

/// Sums and histograms over the requests that count.
pub(crate) struct Tally {
    /// Gaps between tokens count from then on. It is the arrival of the first request that counts.
    pub(crate) count_from: Nanos,
    pub(crate) ttft: Histogram,
    pub(crate) gaps: Histogram,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) embeds: u64,
    pub(crate) encoded: u64,
    /// Images of those that ended, and of them those that engines which encode alone were given.
    pub(crate) images: u64,
    pub(crate) encoded_elsewhere: u64,
    /// Items that engines were given, each engine's.
    pub(crate) items: u64,
    /// Items whose tensors the chosen engine had.
    pub(crate) reused_items: u64,
    /// All that ended, also those that don't count.
    pub(crate) completed: u64,
    /// Those that count and went to two engines.
    pub(crate) split: u64,
    /// Those that count and ended.
    pub(crate) ended: u64,
    /// Never given to an engine, as none could hold them.
    pub(crate) refused: u64,
    /// All of it, also what doesn't count.
    pub(crate) timeline: Timeline,
}

impl Tally {
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

fn embeds(sequence: &Sequence) -> u64 {
    sequence.items().iter().map(|item| u64::from(item.image.embeds)).sum()
}

impl Observer for Tally {
    fn first_token(&mut self, live: &mut Live, now: Nanos) {
        if let Some(reservation) = &mut live.reservation {
            reservation.first_token();
        }
        self.timeline.first_token(live.arrival, now - live.arrival);
        if live.counted {
            self.ttft.add(now - live.arrival, 1);
        }
    }

    fn prefilled(&mut self, _: Live, _: Nanos) {}

    fn finished(&mut self, live: Live, _: Nanos) {
        self.completed += 1;
        self.timeline.ended(live.arrival, live.sequence.prompt() as u64, live.cached as u64);
        if live.counted {
            self.prompt_tokens += live.sequence.prompt() as u64;
            self.cached_tokens += live.cached as u64;
            self.embeds += embeds(&live.sequence);
            self.encoded += live.encoded;
            self.images += live.sequence.items().len() as u64;
            self.encoded_elsewhere += live.encoded_elsewhere;
            self.ended += 1;
            self.split += u64::from(live.stage == Stage::Decode);
        }
    }

    fn gaps(&mut self, gap: Nanos, tokens: u64, now: Nanos) {
        if now >= self.count_from {
            self.gaps.add(gap, tokens);
        }
    }
}
