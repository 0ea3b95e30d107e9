//! The handover of a request from the engine that computed its prompt to the one that answers.

use super::{Event, Fleet};
use crate::engine::{LiveRequest, Stage};
use crate::virtual_time::{Nanos, nanos};

impl Fleet<'_> {
    /// Sends a request whose prompt is computed to the engine that answers, with the tensors that
    /// the engine lacks: it may have to compute the prompt again, after a preemption.
    pub(super) fn hand_over(&mut self, from: usize, mut live: LiveRequest, now: Nanos) {
        if let Some(mut prefill) = live.prefill.take() {
            prefill.first_token();
        }
        live.stage = Stage::Decode;
        let Some(reservation) = &live.reservation else { return };
        let worker = reservation.worker.0 as usize;
        let ready = self.make_tensors(worker, &live.sequence, now, live.counted);
        let live = Box::new(live);
        if ready > now {
            self.plan(ready, worker, Event::StartTransfer { from, live });
        } else {
            self.start_transfer(from, worker, live, now);
        }
    }

    /// Starts the transfer of a prompt to the engine that answers, between two of its steps. An
    /// engine sends or receives one prompt at a time.
    pub(super) fn start_transfer(
        &mut self,
        from: usize,
        worker: usize,
        live: Box<LiveRequest>,
        now: Nanos,
    ) {
        let model = &self.scenario.engine;
        let tokens = self.engines[worker].missing_blocks(&live) * model.block_size.get();
        let step_end = self.engines[worker].step_end(now);
        let begin = step_end.max(self.link_free_at[from]).max(self.link_free_at[worker]);
        let sent = begin + nanos(tokens as f64 * model.kv_bytes / model.transfer_bandwidth);
        self.link_free_at[from] = sent;
        self.link_free_at[worker] = sent;
        let arrival = sent + nanos(model.transfer_latency);
        self.plan(arrival, worker, Event::EndTransfer { from, live });
    }

    /// Ends the transfer of a prompt: the sender releases its blocks, the receiver gets the
    /// request.
    pub(super) fn end_transfer(
        &mut self,
        from: usize,
        worker: usize,
        live: LiveRequest,
        now: Nanos,
    ) {
        let before = self.engines[from].next_wake();
        self.engines[from].release_prompt(live.number, now);
        self.plan_wake(from, before);
        self.deliver(worker, live, now);
    }
}
