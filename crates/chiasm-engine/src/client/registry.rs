//! Who waits for what: open requests and method calls of one engine.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use chiasm_backend::inbox::{Receiver, Sender, inbox};
use chiasm_backend::unread::UnreadJob;
use foldhash::fast::RandomState;
use tokio::sync::oneshot;

use crate::error::{DeathCause, EngineError};
use crate::wire::output::{Brought, ReceivedOutput};
use crate::wire::{EngineCoreOutputs, FailureMessage, Value};

/// What arrives on a request's stream.
pub(super) type Arrival = Result<Brought, EngineError>;

/// What arrives for a method call: the result, or the engine's words.
pub(super) type Answer = Result<Value, FailureMessage>;

/// Open requests and calls. After death it is empty and takes no more.
///
/// A slow reader never holds up another request or the engine: when too many outputs wait for it,
/// its stream ends.
pub(super) struct Registry {
    /// Each output is looked up here. Nobody else chooses the ids, as each ends with digits of
    /// chance.
    streams: HashMap<String, Stream, RandomState>,
    calls: HashMap<i64, oneshot::Sender<Answer>>,
    last_call: i64,
    death: Option<DeathCause>,
}

/// The way to one request's stream.
struct Stream {
    arrivals: Sender<Arrival>,
    /// The engine may have the request.
    sent: bool,
}

impl Default for Registry {
    fn default() -> Self {
        // Not from 1 on: an engine that is adopted may be about to answer calls of the frontend
        // before.
        let last_call = i64::from(rand::random::<u32>());
        Self { streams: HashMap::default(), calls: HashMap::new(), last_call, death: None }
    }
}

impl Registry {
    fn alive(&self) -> Result<(), EngineError> {
        match &self.death {
            Some(cause) => Err(EngineError::Dead { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// Opens a stream of a job. Its unread outputs may hold `most_bytes`. The id must not be open.
    pub(super) fn open(
        &mut self,
        request_id: &str,
        most_bytes: usize,
        job: &UnreadJob,
    ) -> Result<Receiver<Arrival>, EngineError> {
        if let Some(cause) = &self.death {
            return Err(EngineError::NotSent { cause: cause.clone() });
        }
        match self.streams.entry(request_id.to_owned()) {
            Entry::Occupied(_) => {
                Err(EngineError::invalid("request_id", "is in use by a running request"))
            }
            Entry::Vacant(entry) => {
                let (sender, receiver) = inbox(most_bytes, job);
                entry.insert(Stream { arrivals: sender, sent: false });
                Ok(receiver)
            }
        }
    }

    /// The request of a stream is about to be sent: from now on the engine may have it.
    pub(super) fn sent(&mut self, request_id: &str) {
        if let Some(stream) = self.streams.get_mut(request_id) {
            stream.sent = true;
        }
    }

    /// Forgets a stream. Whether it was open, so that the engine still works for it.
    pub(super) fn close(&mut self, request_id: &str) -> bool {
        self.streams.remove(request_id).is_some()
    }

    /// Opens a method call: its id and where its answer arrives.
    pub(super) fn call(&mut self) -> Result<(i64, oneshot::Receiver<Answer>), EngineError> {
        self.alive()?;
        self.last_call += 1;
        let (sender, receiver) = oneshot::channel();
        self.calls.insert(self.last_call, sender);
        Ok((self.last_call, receiver))
    }

    /// Forgets a method call.
    pub(super) fn hang_up(&mut self, call_id: i64) {
        self.calls.remove(&call_id);
    }

    /// Number of open requests.
    pub(super) fn open_requests(&self) -> usize {
        self.streams.len()
    }

    /// Hands everything to whoever waits for it. Returns the requests that are to be aborted as
    /// nobody reads their outputs.
    ///
    /// What nobody waits for is dropped: outputs of an aborted request that were under way, and
    /// answers to calls that have timed out. With `strangers`, requests whose outputs nobody waits
    /// for are returned as well: those of an adopted engine that waited in it begin to run at some
    /// time. A request of our own that was aborted while its output was under way is aborted once
    /// more, which engines take no notice of.
    pub(super) fn dispatch(
        &mut self,
        outputs: EngineCoreOutputs<ReceivedOutput>,
        strangers: bool,
    ) -> Vec<String> {
        let mut nobodys = Vec::new();
        for ReceivedOutput { request_id, brought } in outputs.outputs {
            let has_ended = brought.finish_reason().is_some();
            let Some(stream) = self.streams.get(&request_id) else {
                if strangers && !has_ended {
                    nobodys.push(request_id);
                }
                continue;
            };
            if has_ended {
                stream.arrivals.send(Ok(brought));
                self.streams.remove(&request_id);
            } else if !stream.arrivals.offer(Ok(brought)) {
                stream.arrivals.send(Err(EngineError::Unread));
                self.streams.remove(&request_id);
                nobodys.push(request_id);
            }
        }
        for request_id in outputs.finished_requests {
            if let Some(stream) = self.streams.remove(&request_id) {
                stream.arrivals.send(Err(EngineError::Ended));
            }
        }
        if let Some(answer) = outputs.utility_output
            && let Some(call) = self.calls.remove(&answer.call_id)
        {
            let _ = call.send(answer.result);
        }
        nobodys
    }

    /// Tells everybody. False if it was known already.
    pub(super) fn die(&mut self, cause: DeathCause) -> bool {
        if self.death.is_some() {
            return false;
        }
        for (_, stream) in self.streams.drain() {
            let cause = cause.clone();
            stream.arrivals.send(Err(match stream.sent {
                true => EngineError::Dead { cause },
                false => EngineError::NotSent { cause },
            }));
        }
        // Calls notice that their sender is gone and ask for the cause.
        self.calls.clear();
        self.death = Some(cause);
        true
    }

    /// How the engine went, if it did.
    pub(super) fn death(&self) -> Option<&DeathCause> {
        self.death.as_ref()
    }
}
