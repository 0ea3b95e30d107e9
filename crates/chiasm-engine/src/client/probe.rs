//! The liveness probe: asks an engine that has been silent for a sign of life.

use std::sync::Arc;
use std::time::Duration;

use super::connection::{Connection, Outgoing};
use crate::wire::{Utility, request};

/// A method of every EngineCore that costs it nothing. It is answered between two steps.
const METHOD: &str = "is_scheduler_paused";

/// A number that no call has whose answer is waited for.
const NOBODYS_CALL: i64 = 0;

/// Asks an engine that says nothing for so long, until it is gone.
pub(super) async fn keep_asking(connection: Arc<Connection>, every: Duration) {
    let gone = connection.gone();
    tokio::pin!(gone);
    loop {
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            _ = &mut gone => return,
        }
        if connection.pulse().is_due() {
            let call = Utility {
                client_index: 0,
                call_id: NOBODYS_CALL,
                method: METHOD.to_owned(),
                args: Vec::new(),
            };
            // One that can't be sent to is about to be gone.
            let _ = connection.send(Outgoing::Frames(request::encode_utility(&call)));
        }
    }
}
