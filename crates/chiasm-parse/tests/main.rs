//! Tests of answer parsers against random text, vLLM's own parsers and streams.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod garbage;
mod goldens;
mod streaming;
mod structural_tags;
