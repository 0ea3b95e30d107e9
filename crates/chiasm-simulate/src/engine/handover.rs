//! What an engine does for prompts that are computed elsewhere than their answers.

use super::{Activity, Engine, Live, cache_events};
use crate::virtual_time::Nanos;

impl Engine {
    /// When the step that is under way now has ended; now if there is none. An engine begins to get
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

    /// Blocks of a prompt that the engine has to be given to compute nothing but the last token,
    /// the last one possibly part full.
    pub(crate) fn lacks(&self, live: &Live) -> usize {
        let prompt = live.sequence.prompt();
        let mut hits = Vec::new();
        self.batch.cache().find(
            live.keys.iter().copied().map(cache_events::hash),
            prompt - 1,
            &mut hits,
        );
        prompt.div_ceil(self.model.block_size.get()) - hits.len()
    }

    /// Gives back the blocks of a prompt that it has computed for another engine.
    pub(crate) fn let_go(&mut self, number: u64, now: Nanos) {
        self.batch.let_go(number);
        // Who waited for blocks may find them now.
        match &mut self.activity {
            Activity::Idle => self.start_step(now),
            Activity::Step { .. } => {}
            Activity::Run(run) if self.batch.waiting() > 0 => run.stop_after(now),
            Activity::Run(_) => {}
        }
    }
}
