//! Streams: requests that move before their first token, ends in the format of each API, and unread
//! answers.

mod begins;
mod ends;
mod scripted;
mod unread;

use std::time::Duration;

use crate::support::{Server, demo_model};

/// Starts a frontend of these upstream servers.
async fn serve(upstreams: &[&str], flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args = vec![model.as_str(), "--served-model-name", "m", "--policy", "round-robin"];
    upstreams.iter().for_each(|upstream| args.extend(["--upstream", upstream]));
    args.extend(flags);
    let frontend = Server::start(&args);
    frontend.wait_ready(upstreams.len() as u64, Duration::from_secs(20)).await;
    frontend
}
