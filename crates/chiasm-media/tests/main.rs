//! Tests of fetching and decoding media. `memory.rs` needs a process of its own, because it reads
//! the peak of the process's memory.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod exif;
mod garbage;
mod loader;
mod loader_cache;
mod pixels;
