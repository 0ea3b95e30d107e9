//! Taking over an engine from an earlier frontend.
//!
//! Such an engine sends neither HELLO nor READY again: its sockets reconnect to the addresses of
//! its first handshake, and it continues its running requests. The probe is a call that empties its
//! receiver cache, whose contents are unknown. The result proves that the engine is alive, and from
//! then on an empty mirror is exact.

use std::collections::HashSet;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::wire::{
    EngineMessage, EngineReady, FailureMessage, Utility, WireError, output, request,
};

/// The method of the probe, which empties the receiver cache. Engines answer it between two steps,
/// even if they have no receiver cache.
const PROBE_METHOD: &str = "reset_mm_cache";

/// An engine of an earlier frontend, which may reconnect.
pub(super) struct FormerEngine {
    report: Bytes,
    ready: EngineReady,
    /// The id of the probe, which differs from those of an earlier frontend's calls: their results
    /// may still arrive.
    call_id: u64,
    was_probed: bool,
    /// The requests for which an abort was sent.
    aborted: HashSet<String>,
    /// Deletes the stored report.
    forget: BoxFuture<'static, ()>,
}

/// The action that follows from a message of a [`FormerEngine`].
#[derive(Debug, PartialEq)]
pub(super) enum AdoptionStep {
    /// Wait for the next message.
    Wait,
    /// Abort these requests of the earlier frontend.
    Abort(Vec<String>),
    /// Use the engine: its receiver cache is empty.
    Adopt,
    /// Give up the engine, for this reason.
    GiveUp(String),
}

impl FormerEngine {
    /// Creates the state of an engine that once sent `report` on its input socket.
    ///
    /// # Errors
    /// The report can't be decoded.
    pub(super) fn new(report: Bytes, forget: BoxFuture<'static, ()>) -> Result<Self, WireError> {
        let ready = EngineReady::decode(&report)?;
        let call_id = u64::from(rand::random::<u32>()) + 1;
        Ok(Self { report, ready, call_id, was_probed: false, aborted: HashSet::new(), forget })
    }

    /// Returns the probe, to be sent each time the engine's input socket reconnects: an earlier
    /// probe may be lost.
    pub(super) fn probe(&mut self) -> Vec<Bytes> {
        self.was_probed = true;
        let call = Utility {
            client_index: 0,
            call_id: self.call_id,
            method: PROBE_METHOD.to_owned(),
            args: Vec::new(),
        };
        request::encode_utility(&call)
    }

    /// Returns `true` if the engine was probed, so that messages on the output socket are its own.
    pub(super) fn was_probed(&self) -> bool {
        self.was_probed
    }

    /// Handles a message from the output socket.
    pub(super) fn on_message(&mut self, frames: &[Bytes]) -> AdoptionStep {
        let outputs = match output::decode(frames) {
            Ok(EngineMessage::Outputs(outputs)) => outputs,
            Ok(EngineMessage::Dead) => {
                return AdoptionStep::GiveUp("it reported a fatal error".to_owned());
            }
            Err(error) => {
                return AdoptionStep::GiveUp(format!("its message is not understood: {error}"));
            }
        };
        match outputs.utility_output {
            Some(answer) if answer.call_id == self.call_id => {
                return match answer.result {
                    Ok(_) => AdoptionStep::Adopt,
                    Err(FailureMessage(message)) => AdoptionStep::GiveUp(message),
                };
            }
            _ => {}
        }
        let running = outputs.outputs.into_iter().filter(|output| output.finish_reason.is_none());
        let to_abort: Vec<_> = running
            .map(|output| output.request_id)
            .filter(|id| self.aborted.insert(id.clone()))
            .collect();
        if to_abort.is_empty() { AdoptionStep::Wait } else { AdoptionStep::Abort(to_abort) }
    }

    /// Deletes the stored report, because another engine takes this one's place.
    pub(super) async fn give_up(self) {
        self.forget.await;
    }

    /// Returns the engine's ready report, encoded and decoded.
    pub(super) fn into_report(self) -> (Bytes, EngineReady) {
        (self.report, self.ready)
    }
}
