//! The engine's part in handing over prompts that are computed elsewhere than their answers.

use super::{Activity, Engine, LiveRequest, cache_events};
use crate::virtual_time::Nanos;

impl Engine {
    /// Returns the end of the running step, or `now` if there is none. An engine begins to receive
    /// a prompt between two steps.
    pub(crate) fn step_end(&self, now: Nanos) -> Nanos {
        match self.activity {
            Activity::Idle => now,
            Activity::Step { end, .. } => end,
            Activity::Run(mut run) => {
                run.stop_after(now);
                run.end()
            }
        }
    }

    /// Returns the number of prompt blocks, including a partial last one, that the engine lacks to
    /// compute only the last token.
    pub(crate) fn missing_blocks(&self, live: &LiveRequest) -> usize {
        let prompt = live.sequence.prompt();
        let mut hits = Vec::new();
        self.batch.cache().find(
            live.keys.iter().copied().map(cache_events::block_hash),
            prompt - 1,
            &mut hits,
        );
        prompt.div_ceil(self.model.block_size.get()) - hits.len()
    }

    /// Releases the blocks of a prompt that was computed for another engine.
    pub(crate) fn release_prompt(&mut self, number: u64, now: Nanos) {
        self.batch.release_retained(number);
        // Requests that wait for blocks may be admitted now.
        match &mut self.activity {
            Activity::Idle => self.start_step(now),
            Activity::Step { .. } => {}
            Activity::Run(run) if self.batch.waiting() > 0 => run.stop_after(now),
            Activity::Run(_) => {}
        }
    }
}
