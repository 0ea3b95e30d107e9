//! What whoever operates a server meets: a log that nobody reads, engines that hang, going down,
//! clients that share, certificates, web pages and proxies, and what to look at when something is
//! wrong.

mod going_down;
mod https;
mod hung;
mod log;
mod manners;
mod metrics;
mod mistakes;
mod on_call;
mod prometheus;
mod prompts;
mod traces;
mod tutorial;
mod web_pages;

use std::time::Duration;

use crate::support::{Server, demo_model};

const SOON: Duration = Duration::from_secs(20);

/// A server of the model `m` with one simulated engine, which is ready.
async fn serve(flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let server =
        Server::start(&[&[&model, "--served-model-name", "m", "--sim", "1"], flags].concat());
    server.wait_ready(1, SOON).await;
    server
}
