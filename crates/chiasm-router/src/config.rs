//! Policies, weights and limits.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

chiasm_types::every_variant! {
    /// How a worker is picked.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Policy {
        /// The lowest cost, see `docs/routing.md`: prompt blocks to compute, images to process and
        /// to encode, work that waits, blocks in use.
        #[default]
        KvMedia,
        /// The cost of [`Policy::KvMedia`], but blind to images that the engine could reuse without
        /// their KV blocks.
        Kv,
        /// One after the other, in the order of their ids.
        RoundRobin,
        /// Each worker with equal chance.
        Random,
        /// The fewest blocks in use by running requests. Ties are broken at random.
        LeastLoaded,
        /// Two workers at random, and of these the one with fewer blocks in use.
        PowerOfTwo,
    }
}

/// A policy's name is none of the known ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown routing policy '{0}'; use {names}", names = Policy::names())]
pub struct UnknownPolicy(String);

impl Policy {
    /// The name on command lines and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::KvMedia => "kv+media",
            Self::Kv => "kv",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::LeastLoaded => "least-loaded",
            Self::PowerOfTwo => "power-of-two",
        }
    }

    /// Returns the names as a list for people.
    fn names() -> String {
        let names = Self::ALL.map(Self::name);
        let [others @ .., last] = &names;
        format!("{} or {last}", others.join(", "))
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// What the terms of a worker's cost count for. Only their ratios matter. See `docs/routing.md` for
/// the formula and for the measurements behind the defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// One block of the prompt that the worker has to compute.
    pub prefill: f64,
    /// One block of the prompt that the worker has on the CPU or in storage and loads instead.
    pub fetch: f64,
    /// One block's worth of image embeddings that the worker has to encode.
    pub encode: f64,
    /// One block's worth of image embeddings whose tensors have to be made and handed over.
    pub process: f64,
    /// One unit of the work (`prefill`, `fetch` and `encode`) of requests that were given to the
    /// worker and have no token yet.
    pub queue: f64,
    /// One block that a running request of the worker uses.
    pub load: f64,
    /// One unit of the work (`prefill`, `fetch` and `encode`, and that of answering) that the
    /// worker did in the last seconds beyond the mean of all workers.
    pub balance: f64,
}

/// What computing a prompt elsewhere than its answer counts for, in the unit of [`Weights`];
/// without meaning where no worker has a role.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageWeights {
    /// One block of a prompt that a worker gets from the one that has computed it.
    pub transfer: f64,
    /// The same where the two are on different machines.
    pub network_transfer: f64,
    /// What a second worker costs whatever the length of the prompt: its steps until it has what it
    /// needs.
    pub hop: f64,
    /// One unit of the work (`prefill`, `fetch` and `encode`) that a worker whose role is to decode
    /// does for a prompt itself, for that request and each other one there, whose answers wait
    /// meanwhile.
    pub disturb: f64,
}

/// Limits from which on a worker gets no new requests; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusyThresholds {
    /// Part of the KV cache in use, 0 to 1, as the engine last said.
    pub kv_usage: Option<f64>,
    /// Prompt tokens to be computed for requests that have no token yet.
    pub pending_tokens: Option<u64>,
    /// Requests in the engine's own queue, as it last said.
    pub waiting: Option<u64>,
}

/// What answering takes of an engine, which the `balance` term of the cost counts as work. A
/// property of the model and the device that it runs on; `docs/routing.md` says how to find it for
/// others than the default's, a 7-billion-parameter vision model on a GPU of the H100's class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decoding {
    /// Steps per second of an engine that decodes, at least 0: one over the usual time between two
    /// tokens of an answer. In each step a running request's token costs as much as a token of a
    /// prompt.
    pub steps_per_second: f64,
    /// The time of one step that goes into reading a block's keys and values, as a part of the time
    /// that it takes to compute a prompt block; at least 0.
    pub read_per_block: f64,
}

/// What a [`Router`](crate::Router) goes by.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// How a worker is picked.
    pub policy: Policy,
    /// What the terms of a worker's cost count for.
    pub weights: Weights,
    /// What splitting a request counts for.
    pub stages: StageWeights,
    /// What answering takes of the engines.
    pub decoding: Decoding,
    /// Spreads choices: a worker's chance falls by e for so much cost more than the lowest, in the
    /// unit of the weights. With 0 the lowest cost always wins, which is best for one frontend;
    /// several frontends that don't see each other's requests may want a little.
    pub temperature: f64,
    /// When workers are busy.
    pub busy: BusyThresholds,
    /// Seed of every random choice; `None` for another one at each start.
    pub seed: Option<u64>,
    /// How long the blocks of a request that got its first token stay promised after its end, when
    /// the events that confirm them are still on their way. Engines publish them no later than that
    /// token, so this bridges the way through the sockets, no more.
    pub promise_grace: Duration,
    /// How long a worker without events is believed to keep a block after its last use.
    pub believed_for: Duration,
    /// Number of sessions whose workers are remembered, at most; beyond it the least recently used
    /// is forgotten.
    pub max_sessions: usize,
    /// Bytes on the heap for what workers hold, at most; beyond it the blocks of least recent use
    /// are forgotten. `None` for no limit.
    pub index_max_bytes: Option<usize>,
}

/// Found by the simulation in `docs/routing.md`, for a 7-billion-parameter vision model. `prefill`
/// to `encode` and `process` is the ratio of the times that a block of each takes. Waiting work
/// takes the time that it takes, so `queue` would be 1, but then each question of a burst about a
/// new image would make another engine compute it, for nothing: waiting for the first one takes as
/// long. `fetch` is arithmetic: a block of 16 tokens is 0.9 MB, 36 µs at 25 GB/s, and 0.57 ms to
/// compute.
impl Default for Weights {
    fn default() -> Self {
        Self {
            prefill: 16.0,
            fetch: 1.0,
            encode: 6.5,
            process: 1.75,
            queue: 0.75,
            load: 0.3,
            balance: 0.2,
        }
    }
}

/// Found by the simulation in `docs/routing.md`, over six workloads on 2 prefill + 4 decode and 3 +
/// 3 engines. `transfer` is arithmetic as `fetch` is, for the 25 GB/s of a network card, and
/// matters little. `hop` would be 500 if all of two steps of an engine that decodes were lost;
/// anything from 0 to 500 does nearly the same. `disturb` is a choice: the less, the more prompts
/// are computed beside answers, which stop for them; the more, the longer prompts wait for the
/// engines that prefill. From 0.02 to 0.05 neither gets out of hand.
impl Default for StageWeights {
    fn default() -> Self {
        Self { transfer: 1.0, network_transfer: 2.0, hop: 300.0, disturb: 0.025 }
    }
}

/// The model of an engine in `docs/routing.md`: 8.7 ms a step (overhead, weights, and a few
/// requests' tokens); 57 kB of keys and values a token at 2.5 TB/s, against 14 GFLOP at 400
/// TFLOP/s.
impl Default for Decoding {
    fn default() -> Self {
        Self { steps_per_second: 115.0, read_per_block: 6.4e-4 }
    }
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            weights: Weights::default(),
            stages: StageWeights::default(),
            decoding: Decoding::default(),
            temperature: 0.0,
            busy: BusyThresholds::default(),
            seed: None,
            promise_grace: Duration::from_secs(1),
            believed_for: Duration::from_secs(120),
            max_sessions: 100_000,
            index_max_bytes: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_policies_belong_together() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let error = "KV".parse::<Policy>().unwrap_err();
        assert!(error.to_string().contains("'KV'") && error.to_string().contains("least-loaded"));
    }
}
