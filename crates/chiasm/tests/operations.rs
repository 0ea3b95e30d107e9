//! Operating a server: logs, metrics, traces, alerts, hung engines, shutdown, TLS, fairness between
//! clients, web pages and proxies, and configuration errors.

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

const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts a server of the model `m` with one simulated engine and waits until it is ready.
async fn serve(flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let server =
        Server::start(&[&[&model, "--served-model-name", "m", "--sim", "1"], flags].concat());
    server.wait_ready(1, TIMEOUT).await;
    server
}
