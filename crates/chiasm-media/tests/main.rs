//! Fetching and decoding of media from outside. `memory.rs` is a process of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod door;
mod door_cache;
mod exif;
mod garbage;
mod pixels;
