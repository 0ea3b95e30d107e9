//! Taking over an engine that was ready for a frontend before this one.
//!
//! Such an engine says neither HELLO nor READY again: its sockets come back to the addresses that
//! it was once told, and it goes on with the requests that it had. It is asked to empty its
//! receiver cache, of which nobody knows any more what it holds. Its answer is the sign of life and
//! the moment from which an empty mirror is right.

use std::collections::HashSet;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::wire::{
    EngineMessage, EngineReady, FailureMessage, Utility, WireError, output, request,
};

/// Empties the receiver cache. Answered between two steps, also by engines without such a cache.
const METHOD: &str = "reset_mm_cache";

/// An engine that may come back.
pub(super) struct Former {
    report: Bytes,
    ready: EngineReady,
    /// A number that no call of an earlier frontend has, whose answer may still be under way.
    call_id: i64,
    asked: bool,
    /// Requests that it was told to abort.
    aborted: HashSet<String>,
    /// Makes its report forgotten.
    forget: BoxFuture<'static, ()>,
}

/// What follows from something that the engine said.
#[derive(Debug, PartialEq)]
pub(super) enum Heard {
    /// Nothing.
    Nothing,
    /// These requests are nobody's any more: they are to be aborted.
    Strangers(Vec<String>),
    /// Its receiver cache is empty: it can be used.
    Answer,
    /// It can't be used.
    Unusable(String),
}

impl Former {
    /// An engine that once said `report` on its input socket.
    ///
    /// # Errors
    /// The report can't be read.
    pub(super) fn new(report: Bytes, forget: BoxFuture<'static, ()>) -> Result<Self, WireError> {
        let ready = EngineReady::decode(&report)?;
        let call_id = i64::from(rand::random::<u32>()) + 1;
        Ok(Self { report, ready, call_id, asked: false, aborted: HashSet::new(), forget })
    }

    /// The message for an engine whose input socket has come back, also if that happens again: the
    /// last one may be lost.
    pub(super) fn question(&mut self) -> Vec<Bytes> {
        self.asked = true;
        let (method, args) = (METHOD.to_owned(), Vec::new());
        request::encode_utility(&Utility { client_index: 0, call_id: self.call_id, method, args })
    }

    /// Whether anything that is heard is about this engine.
    pub(super) fn is_asked(&self) -> bool {
        self.asked
    }

    /// Takes a message from the output socket.
    pub(super) fn hear(&mut self, frames: &[Bytes]) -> Heard {
        let outputs = match output::decode(frames) {
            Ok(EngineMessage::Outputs(outputs)) => outputs,
            Ok(EngineMessage::Dead) => {
                return Heard::Unusable("it reported a fatal error".to_owned());
            }
            Err(error) => {
                return Heard::Unusable(format!("its message is not understood: {error}"));
            }
        };
        match outputs.utility_output {
            Some(answer) if answer.call_id == self.call_id => {
                return match answer.result {
                    Ok(_) => Heard::Answer,
                    Err(FailureMessage(words)) => Heard::Unusable(words),
                };
            }
            _ => {}
        }
        let running = outputs.outputs.into_iter().filter(|output| output.finish_reason.is_none());
        let strangers: Vec<_> = running
            .map(|output| output.request_id)
            .filter(|id| self.aborted.insert(id.clone()))
            .collect();
        if strangers.is_empty() { Heard::Nothing } else { Heard::Strangers(strangers) }
    }

    /// It will not be used: another engine comes in its place, of which its report must not be
    /// believed.
    pub(super) async fn give_up(self) {
        self.forget.await;
    }

    /// What it said when it became ready, as it said it and as it is understood.
    pub(super) fn into_report(self) -> (Bytes, EngineReady) {
        (self.report, self.ready)
    }
}
