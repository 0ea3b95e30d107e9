//! The outputs of one step, sorted by client.

use chiasm_engine::wire::{EngineCoreOutput, EngineCoreOutputs, SchedulerStats};

/// A message for one of the frontend's output sockets.
pub(crate) type ClientOutputs = (u32, EngineCoreOutputs);

/// The outputs of a step, by client in the order of their first output.
pub(crate) struct StepOutputs {
    rank: u32,
    now: f64,
    clients: Vec<ClientOutputs>,
}

impl StepOutputs {
    pub(crate) fn new(rank: u32, now: f64) -> Self {
        Self { rank, now, clients: Vec::new() }
    }

    pub(crate) fn push(&mut self, client: u32, output: EngineCoreOutput) {
        self.message_for(client).outputs.push(output);
    }

    /// Returns one message per client with outputs. The first message also has the statistics;
    /// without outputs they go to client 0.
    pub(crate) fn finish(mut self, stats: SchedulerStats) -> Vec<ClientOutputs> {
        let first = self.clients.first().map_or(0, |(client, _)| *client);
        self.message_for(first).scheduler_stats = Some(stats);
        self.clients
    }

    fn message_for(&mut self, client: u32) -> &mut EngineCoreOutputs {
        let known = self.clients.iter().position(|(known, _)| *known == client);
        let at = known.unwrap_or_else(|| {
            let message = EngineCoreOutputs {
                engine_index: self.rank,
                timestamp: self.now,
                weight_version: Some("default".to_owned()),
                ..EngineCoreOutputs::default()
            };
            self.clients.push((client, message));
            self.clients.len() - 1
        });
        &mut self.clients[at].1
    }
}
