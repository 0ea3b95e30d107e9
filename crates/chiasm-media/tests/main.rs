//! Tests of fetching and decoding media. `memory.rs` needs a process of its own: it reads the peak
//! of its memory.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod door;
mod door_cache;
mod exif;
mod garbage;
mod pixels;
