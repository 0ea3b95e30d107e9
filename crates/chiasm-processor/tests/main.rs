//! The tests of the crate as one binary.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]

mod frames;
mod processor;
mod real_opencv;
