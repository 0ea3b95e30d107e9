//! Tests of the router's public interface, with events as engines send them.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod admission;
mod approximate;
mod background;
mod balance;
mod bookkeeping;
mod classes;
mod cost;
mod encoders;
mod explained;
mod peer_router;
mod scenarios;
mod stages;
mod threads;
mod workload;
