//! The index and the events of KV caches from outside, against models and frames of real engines.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod captured_frames;
mod prefix_index;
mod sglang_frames;
