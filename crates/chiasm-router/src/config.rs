//! Policies, weights and limits.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

chiasm_types::every_variant! {
    /// The policy by which workers are picked.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Policy {
        /// The lowest cost, see `docs/routing.md`: prompt blocks to compute, images to process and
        /// to encode, waiting work, blocks in use.
        #[default]
        KvMedia,
        /// The cost of [`Policy::KvMedia`], but blind to images that the engine could reuse without
        /// their KV blocks.
        Kv,
        /// Each worker in turn, in the order of their ids.
        RoundRobin,
        /// A random worker, all with equal probability.
        Random,
        /// The worker with the fewest blocks in use by running requests. Ties are broken at random.
        LeastLoaded,
        /// The worker with fewer blocks in use, of two that are drawn at random.
        PowerOfTwo,
    }
}

/// The error for an unknown policy name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown routing policy '{0}'; use {names}", names = Policy::names())]
pub struct UnknownPolicy(String);

impl Policy {
    /// Returns the policy's name on command lines and in reports.
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

    /// Returns the names of all policies as a list for people.
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

/// The weights of the terms of a worker's cost. Only their ratios matter. `docs/routing.md` has
/// the formula, `docs/decisions/0015-default-routing-weights.md` the numbers behind the defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// The cost of one prompt block that the worker has to compute.
    pub prefill: f64,
    /// The cost of one prompt block that the worker has on the CPU or in storage and loads instead.
    pub fetch: f64,
    /// The cost of encoding one block of image embeddings.
    pub encode: f64,
    /// The cost of making and handing over the tensors for one block of image embeddings.
    pub process: f64,
    /// The cost per unit of waiting work: `prefill`, `fetch` and `encode` of the worker's requests
    /// that have no token yet.
    pub queue: f64,
    /// The cost of one block in use by a running request of the worker.
    pub load: f64,
    /// The cost per unit of work (`prefill`, `fetch`, `encode` and that of answering) that the
    /// worker did in the last seconds beyond the mean of all workers.
    pub balance: f64,
}

/// The costs of computing a prompt on another worker than its answer, in the unit of [`Weights`].
/// They have no effect where no worker has a role.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageWeights {
    /// The cost of sending one prompt block from the worker that computed it to the one that
    /// answers.
    pub transfer: f64,
    /// The same between workers on different machines.
    pub network_transfer: f64,
    /// The fixed cost of a second worker, whatever the length of the prompt: the steps that pass
    /// until it has what it needs.
    pub hop: f64,
    /// The cost per unit of work (`prefill`, `fetch` and `encode`) that a worker whose role is to
    /// decode does for a prompt itself. It counts for that request and for each other request
    /// on the worker, whose answers have to wait for the work.
    pub disturb: f64,
}

/// The limits at which a worker gets no new requests; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusyThresholds {
    /// The fraction of the KV cache in use, 0 to 1, as last reported by the engine.
    pub kv_usage: Option<f64>,
    /// The prompt tokens to compute for requests that have no token yet.
    pub pending_tokens: Option<u64>,
    /// The requests in the engine's own queue, as last reported by the engine.
    pub waiting: Option<u64>,
}

/// The work of answering, which the `balance` term of the cost takes into account.
///
/// It depends on the model and its device. The default is for a 7-billion-parameter vision model on
/// a GPU of the H100's class; `docs/routing-options.md` says how to find the values for
/// others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decoding {
    /// Steps per second of an engine that decodes, at least 0: the reciprocal of the usual time
    /// between two tokens of an answer. In each step a running request's token costs as much as a
    /// token of a prompt.
    pub steps_per_second: f64,
    /// The time that one step takes to read a block's keys and values, relative to the time that
    /// computing a prompt block takes; at least 0.
    pub read_per_block: f64,
}

/// The configuration of a [`Router`](crate::Router).
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// The policy by which workers are picked.
    pub policy: Policy,
    /// The weights of the terms of a worker's cost.
    pub weights: Weights,
    /// The costs of splitting a request.
    pub stages: StageWeights,
    /// The work of answering.
    pub decoding: Decoding,
    /// The randomness of choices, in the unit of the weights: a worker's probability falls by a
    /// factor of e for each `temperature` that its cost is above the lowest. With 0 the lowest cost
    /// always wins, which is best for one frontend. Several frontends that don't see each other's
    /// requests may want a little.
    pub temperature: f64,
    /// The limits at which workers are busy.
    pub busy: BusyThresholds,
    /// The seed of all random choices; `None` for a new seed at each start.
    pub seed: Option<u64>,
    /// The time for which the blocks of a request that got its first token stay promised after its
    /// end, while the events that confirm them may be in flight. Engines publish them no later than
    /// that token, so this only covers the way through the sockets.
    pub promise_grace: Duration,
    /// The time for which a worker without events is assumed to keep a block after its last use.
    pub approximate_ttl: Duration,
    /// The maximum number of sessions whose workers are remembered. Beyond it the least recently
    /// used session is evicted.
    pub max_sessions: usize,
    /// The maximum heap memory of the prefix index, in bytes; `None` for no limit. Beyond it the
    /// least recently used blocks are evicted.
    pub index_max_bytes: Option<usize>,
}

/// Found by simulation (`docs/decisions/0015-default-routing-weights.md`), for a
/// 7-billion-parameter vision model.
///
/// `prefill`, `encode` and `process` are in proportion to the time that one block takes. In that
/// proportion, `queue` would be 1. But then each question of a burst about a new image would make
/// another engine compute the image, for nothing: waiting for the first engine takes as long.
/// `fetch` is arithmetic: a block of 16 tokens is 0.9 MB, 36 µs at 25 GB/s, and takes 0.57 ms to
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

/// Found by simulation (`docs/decisions/0014-splitting-has-a-price.md`), over six workloads. The
/// fleets had 2 prefill and 4 decode engines, or 3 of each.
///
/// `transfer` is arithmetic like `fetch`, for the 25 GB/s of a network card, and matters little.
/// `hop` would be 500 if all of two steps of a decoding engine were lost; anything from 0 to 500
/// does nearly the same. `disturb` is a choice. The lower it is, the more prompts are computed
/// beside answers, which stop for them. The higher it is, the longer prompts wait for the engines
/// that prefill. From 0.02 to 0.05 neither effect is large.
impl Default for StageWeights {
    fn default() -> Self {
        Self { transfer: 1.0, network_transfer: 2.0, hop: 300.0, disturb: 0.025 }
    }
}

/// The engine model in `docs/simulate.md`: 8.7 ms per step (overhead, weights, and a few requests'
/// tokens); 57 kB of keys and values per token at 2.5 TB/s, against 14 GFLOP at 400 TFLOP/s.
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
            approximate_ttl: Duration::from_secs(120),
            max_sessions: 100_000,
            index_max_bytes: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_parse_to_their_policies() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let error = "KV".parse::<Policy>().unwrap_err();
        assert!(error.to_string().contains("'KV'") && error.to_string().contains("least-loaded"));
    }
}
