//! Streams from beginning to end: requests that move before they have a token, ends in the form of
//! each API, and answers that nobody reads.

mod begins;
mod ends;
mod scripted;
mod unread;

use std::time::Duration;

use crate::support::{Server, demo_model};

/// A frontend before these servers.
async fn before(upstreams: &[&str], flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args = vec![model.as_str(), "--served-model-name", "m", "--policy", "round-robin"];
    upstreams.iter().for_each(|upstream| args.extend(["--upstream", upstream]));
    args.extend(flags);
    let frontend = Server::start(&args);
    frontend.wait_ready(upstreams.len() as u64, Duration::from_secs(20)).await;
    frontend
}
