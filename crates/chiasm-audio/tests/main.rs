//! The tests of the crate as one binary.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod damaged;
mod goldens;
mod properties;
mod recordings;
mod wav;
