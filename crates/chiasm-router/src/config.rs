//! Policies and weights.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How a worker is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The lowest cost = (prompt blocks − overlap blocks) · `prefill_weight` + blocks in use by running requests ·
    /// `load_weight`. Ties are broken at random.
    #[default]
    Kv,
    /// One after the other, in the order of their ids.
    RoundRobin,
    /// Any, with equal chance.
    Random,
    /// The fewest blocks in use by running requests. Ties are broken at random.
    LeastLoaded,
}

/// A policy's name is none of the known ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown routing policy '{0}'; use kv, round-robin, random or least-loaded")]
pub struct UnknownPolicy(String);

const NAMES: [(Policy, &str); 4] = [
    (Policy::Kv, "kv"),
    (Policy::RoundRobin, "round-robin"),
    (Policy::Random, "random"),
    (Policy::LeastLoaded, "least-loaded"),
];

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(policy, _)| policy == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        NAMES
            .iter()
            .find(|(_, known)| *known == name)
            .map(|(policy, _)| *policy)
            .ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// What a [`Router`](crate::Router) goes by.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// How a worker is picked.
    pub policy: Policy,
    /// Cost of one block of the prompt that the worker has to compute.
    pub prefill_weight: f64,
    /// Cost of one block that a running request of the worker uses.
    pub load_weight: f64,
    /// Seed of every random choice; `None` for another one at each start.
    pub seed: Option<u64>,
    /// How long the blocks of a request that got its first token stay promised after its end, when the events that
    /// confirm them are still on their way. Engines publish them no later than that token, so this bridges the way
    /// through the sockets, no more.
    pub promise_grace: Duration,
    /// Most bytes on the heap for what workers hold; beyond it the blocks of least recent use are forgotten. `None` for
    /// no limit.
    pub index_max_bytes: Option<usize>,
}

/// The kv policy with weights 16 and 1.
///
/// Only their ratio matters: the number of requests as long as this one by which the worker that holds the whole prompt
/// may be busier than an idle one and still be preferred. Too low, and a burst of questions about one image makes every
/// engine compute it; too high, and a hot engine keeps what others could do in the meantime.
///
/// The estimate behind 16 is the time that each block takes from an engine. Computing a 16-token block of a 7-billion-
/// parameter model is 16 · 14 GFLOP, at 400 TFLOP/s 0.6 ms. A block in use is read once per step of its request: 57 kB
/// per token (28 layers, 4 KV heads of 128, 2 bytes), at 2 TB/s 0.5 µs; a request that is half way through 150 tokens
/// has 75 steps left, 0.04 ms. Image encoding makes computing dearer still.
impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            policy: Policy::Kv,
            prefill_weight: 16.0,
            load_weight: 1.0,
            seed: None,
            promise_grace: Duration::from_secs(1),
            index_max_bytes: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_policies_belong_together() {
        for (policy, name) in NAMES {
            assert_eq!(policy.to_string(), name);
            assert_eq!(name.parse(), Ok(policy));
        }
        let error = "KV".parse::<Policy>().unwrap_err();
        assert!(error.to_string().contains("'KV'") && error.to_string().contains("least-loaded"));
    }
}
