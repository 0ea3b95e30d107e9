//! The upper bounds of histograms' buckets, in seconds.
//!
//! They are vLLM's (`v1/metrics/buckets.py` of 0.33), and some smaller ones. A bound that vLLM's
//! dashboards and autoscalers use, like 0.5 s to a first token, therefore exists here, and round
//! targets are exact. Most observations fall into the first few buckets, so the search begins with
//! the smallest.

/// The bounds for times from a request's arrival to its first token.
pub(super) const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];

/// The bounds for times between two tokens; vLLM has none below 10 ms.
pub(super) const BETWEEN_TOKENS: [f64; 22] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
