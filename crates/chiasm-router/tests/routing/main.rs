//! The router from outside, with events as engines send them.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod bookkeeping;
mod scenarios;
mod threads;
mod workload;
