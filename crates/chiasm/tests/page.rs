//! The live page: access control, and what a browser shows.
//!
//! Tests with a browser need Chromium at the path in `CHIASM_TEST_CHROMIUM`; `cargo xtask test`
//! finds or unpacks it. Screenshots are left in the folder `page` of the target directory's `tmp`.

mod browser;
mod large;
mod seen;
mod visitors;

use std::time::Duration;

use crate::support::{Server, demo_model};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts a server of the demo's model with `engines` simulated engines and waits until they are
/// ready.
async fn serve(engines: u64, flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let count = engines.to_string();
    let server = Server::start(&[&[&model, "--sim", &count], flags].concat());
    server.wait_ready(engines, TIMEOUT).await;
    server
}
