//! Tests of answer parsers: random text, streaming, and comparison with vLLM's parsers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod garbage;
mod goldens;
mod streaming;
mod structural_tags;
