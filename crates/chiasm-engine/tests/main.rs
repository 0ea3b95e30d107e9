//! Tests of the client, the backend and the launcher, with scripted engines and a real one.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod adoption;
mod backend;
mod client;
mod delivery;
mod launch;
mod mock_engine;
mod real_engine;
mod starts;
mod wire_fixtures;
mod wire_hostile;
