//! The liveness probe: a call to an engine that has been silent.

use std::sync::Arc;
use std::time::Duration;

use super::connection::{Connection, Outgoing};
use crate::wire::{Utility, request};

/// The method of the probe: every EngineCore has it, and it costs nothing. Engines answer it
/// between two steps.
const PROBE_METHOD: &str = "is_scheduler_paused";

/// The call id of probes. No other call has it, and results with it are dropped.
const PROBE_CALL_ID: u64 = 0;

/// Probes the engine whenever it has been silent for `interval`, until it is dead.
pub(super) async fn probe_when_silent(connection: Arc<Connection>, interval: Duration) {
    let closed = connection.closed();
    tokio::pin!(closed);
    loop {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            _ = &mut closed => return,
        }
        if connection.liveness().start_probe_if_due() {
            let call = Utility {
                client_index: 0,
                call_id: PROBE_CALL_ID,
                method: PROBE_METHOD.to_owned(),
                args: Vec::new(),
            };
            // If sending fails, the engine is about to be declared dead.
            let _ = connection.send(Outgoing::Frames(request::encode_utility(&call)));
        }
    }
}
