//! Streams from beginning to end: requests that move before they have a token, ends in the words of each API, and answers that nobody
//! reads.
#![allow(clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod ends;
mod scripted;
