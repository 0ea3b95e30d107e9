//! The way of a request from the engine that has computed its prompt to the one that answers.

use super::{Fleet, Plan};
use crate::engine::{Live, Stage};
use crate::virtual_time::{Nanos, nanos};

impl Fleet<'_> {
    /// The frontend hears that an engine has computed a prompt, and gives the request to the one
    /// that answers, with the tensors that it lacks: it may have to compute the prompt again, after
    /// a preemption.
    pub(super) fn hand_over(&mut self, from: usize, mut live: Live, now: Nanos) {
        if let Some(mut prefills) = live.prefills.take() {
            prefills.first_token();
        }
        live.stage = Stage::Decode;
        let Some(worker) =
            live.reservation.as_ref().map(|reservation| reservation.worker.0 as usize)
        else {
            return;
        };
        let ready = self.make_tensors(worker, &live.sequence, now, live.counted);
        if ready > now {
            self.plan(ready, worker, Plan::Get(from, Box::new(live)));
        } else {
            self.get(from, worker, Box::new(live), now);
        }
    }

    /// The engine that answers begins to get the prompt between two of its steps. An engine gives
    /// or gets one prompt at a time.
    pub(super) fn get(&mut self, from: usize, worker: usize, live: Box<Live>, now: Nanos) {
        let model = &self.scenario.engine;
        let tokens = self.engines[worker].lacks(&live) * model.block_size.get();
        let begin =
            self.engines[worker].step_end(now).max(self.links[from]).max(self.links[worker]);
        let sent = begin + nanos(tokens as f64 * model.kv_bytes / model.transfer_bandwidth);
        (self.links[from], self.links[worker]) = (sent, sent);
        self.plan(sent + nanos(model.transfer_latency), worker, Plan::Got(from, live));
    }

    /// The engine that answers has the prompt; the other one may forget it.
    pub(super) fn got(&mut self, from: usize, worker: usize, live: Live, now: Nanos) {
        let before = self.engines[from].next_wake();
        self.engines[from].let_go(live.number, now);
        self.plan_wake(from, before);
        self.deliver(worker, live, now);
    }
}
