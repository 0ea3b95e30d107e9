//! The tests of the crate as one binary.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod clips;
mod cuts;
mod damaged;
mod properties;
mod real_opencv;
mod roles;
mod sound;
