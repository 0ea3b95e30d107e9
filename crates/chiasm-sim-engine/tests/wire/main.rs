//! A simulated engine against a scripted frontend, over real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod death;
mod frontend;
mod kv_events;
mod media;
mod requests;
mod shared_memory;
mod start;
