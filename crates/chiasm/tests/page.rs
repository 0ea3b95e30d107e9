//! The live page: who may see it, and what a browser shows of it.
//!
//! Tests with a browser need Chromium, at the path in `CHIASM_TEST_CHROMIUM`; `cargo xtask test`
//! finds or unpacks it. Pictures of what they saw are left in the folder `page` of the target
//! directory's `tmp`.

mod browser;
mod large;
mod seen;
mod visitors;

use std::time::Duration;

use crate::support::{Server, demo_model};

const SOON: Duration = Duration::from_secs(20);

/// A server of the model `m` with so many simulated engines, which are ready.
async fn serve(engines: u64, flags: &[&str]) -> Server {
    let (model, count) = (demo_model().display().to_string(), engines.to_string());
    let server = Server::start(&[&[&model, "--sim", &count], flags].concat());
    server.wait_ready(engines, SOON).await;
    server
}
