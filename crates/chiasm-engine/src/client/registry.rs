//! Who waits for what: open requests and method calls of one engine.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use tokio::sync::{mpsc, oneshot};

use crate::error::{DeathCause, EngineError};
use crate::wire::{EngineCoreOutput, EngineCoreOutputs, Value};

/// What arrives on a request's stream.
pub(super) type Arrival = Result<EngineCoreOutput, EngineError>;

/// What arrives for a method call: the result, or the engine's words.
pub(super) type Answer = Result<Value, String>;

/// Open requests and calls. After death it is empty and takes no more.
///
/// Channels to streams are unbounded, so a slow reader never holds up another request or the engine. What one
/// can pile up is bounded all the same: an engine answers a request with at most `max_tokens` outputs.
pub(super) struct Registry {
    streams: HashMap<String, Stream>,
    calls: HashMap<i64, oneshot::Sender<Answer>>,
    last_call: i64,
    death: Option<DeathCause>,
}

/// The way to one request's stream.
struct Stream {
    arrivals: mpsc::UnboundedSender<Arrival>,
    /// The engine may have the request.
    sent: bool,
}

impl Default for Registry {
    fn default() -> Self {
        // Not from 1 on: an engine that is adopted may be about to answer calls of the frontend before.
        let last_call = i64::from(rand::random::<u32>());
        Self { streams: HashMap::new(), calls: HashMap::new(), last_call, death: None }
    }
}

impl Registry {
    fn alive(&self) -> Result<(), EngineError> {
        match &self.death {
            Some(cause) => Err(EngineError::Dead { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// Opens a stream. The id must not be open.
    pub(super) fn open(&mut self, request_id: &str) -> Result<mpsc::UnboundedReceiver<Arrival>, EngineError> {
        if let Some(cause) = &self.death {
            return Err(EngineError::NotSent { cause: cause.clone() });
        }
        match self.streams.entry(request_id.to_owned()) {
            Entry::Occupied(_) => Err(EngineError::invalid("request_id", "is in use by a running request")),
            Entry::Vacant(entry) => {
                let (sender, receiver) = mpsc::unbounded_channel();
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

    /// Hands everything to whoever waits for it.
    ///
    /// What nobody waits for is dropped: outputs of an aborted request that were under way, and answers to calls
    /// that have timed out. The ids of requests that nobody waits for and that go on are returned.
    pub(super) fn dispatch(&mut self, outputs: EngineCoreOutputs) -> Vec<String> {
        let mut strangers = Vec::new();
        for output in outputs.outputs {
            let finished = output.finish_reason.is_some();
            let stream = if finished {
                self.streams.remove(&output.request_id).map(|stream| stream.arrivals)
            } else {
                self.streams.get(&output.request_id).map(|stream| stream.arrivals.clone())
            };
            match stream {
                // An error says that the reader has just left; its departure aborts the request.
                Some(stream) => drop(stream.send(Ok(output))),
                None if finished => {}
                None => strangers.push(output.request_id),
            }
        }
        for request_id in outputs.finished_requests {
            if let Some(stream) = self.streams.remove(&request_id) {
                let _ = stream.arrivals.send(Err(EngineError::Ended));
            }
        }
        if let Some(answer) = outputs.utility_output
            && let Some(call) = self.calls.remove(&answer.call_id)
        {
            let _ = call.send(answer.result);
        }
        strangers
    }

    /// Tells everybody. False if it was known already.
    pub(super) fn die(&mut self, cause: DeathCause) -> bool {
        if self.death.is_some() {
            return false;
        }
        for (_, stream) in self.streams.drain() {
            let cause = cause.clone();
            let _ = stream.arrivals.send(Err(match stream.sent {
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
