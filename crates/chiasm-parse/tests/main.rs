//! Parsers of answers from outside: random text, vLLM's own parsers, streams.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod garbage;
mod goldens;
mod streaming;
mod structural_tags;
