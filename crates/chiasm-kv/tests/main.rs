//! Tests of the index and of KV events, against reference models and captured frames.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod captured_frames;
mod prefix_index;
mod sglang_frames;
