//! Decoding of msgpack into events, with reused memory.
//!
//! The fast path reads events as msgspec writes them: the tag first, the fields in declared order
//! with optional ones present or not, then fields of later versions. An event in any other form is
//! read again from its start by [`super::decode`], which accepts all forms. So both decoders agree
//! on all bytes, and only one of them reports errors.

mod form;
mod room;
mod spare;

use std::cell::RefCell;

use super::decode::{Decoded, Input, array_len, batch, event};
use super::{ExternalHash, KvEvent, KvEventBatch};
use crate::KvError;
use form::Fields;
use room::reserve;
use spare::{Spare, take_or_default};

/// The maximum number of bytes kept from one payload to the next. Batches of a busy engine need a
/// few tens of thousands.
const MAX_KEPT_BYTES: usize = 4 << 20;

/// The maximum number of bytes of an event per byte of its msgpack, reached by an [`ExternalHash`]
/// of a small number.
const MAX_EXPANSION: usize = size_of::<ExternalHash>();

/// A decoder that reuses the memory of earlier payloads. Decoding allocates nothing once payloads
/// of the same size have been decoded.
///
/// ```
/// use chiasm_kv::event::{Decoder, KvEvent, KvEventBatch};
///
/// let batch = KvEventBatch {
///     timestamp: 1.5,
///     events: vec![KvEvent::AllBlocksCleared],
///     data_parallel_rank: Some(0),
/// };
/// let mut decoder = Decoder::default();
/// assert_eq!(decoder.decode(&batch.encode()).unwrap(), &batch);
/// ```
#[derive(Debug)]
pub struct Decoder {
    batch: KvEventBatch,
    spare: Spare,
}

thread_local! {
    static DECODER: RefCell<Decoder> = RefCell::default();
}

/// Decodes a payload with this thread's decoder and passes the batch to `use_batch`, which must not
/// call this function again.
pub(crate) fn with_decoded<T>(
    payload: &[u8],
    use_batch: impl FnOnce(&KvEventBatch) -> T,
) -> Result<T, KvError> {
    DECODER.with_borrow_mut(|decoder| {
        let result = decoder.decode(payload).map(use_batch);
        // The thread may not decode another payload for a long time.
        decoder.free_if_large();
        result
    })
}

impl Default for Decoder {
    fn default() -> Self {
        let batch = KvEventBatch { timestamp: 0.0, events: Vec::new(), data_parallel_rank: None };
        Self { batch, spare: Spare::default() }
    }
}

impl Decoder {
    /// Decodes the payload frame of one message, like [`decode`](super::decode()).
    ///
    /// # Errors
    /// The errors of [`decode`](super::decode()).
    pub fn decode(&mut self, payload: &[u8]) -> Result<&KvEventBatch, KvError> {
        self.free_if_large();
        let mut events = 0;
        let (timestamp, (), data_parallel_rank) = batch(payload, |input| {
            for at in 0..array_len(input, "events")? as usize {
                self.event(at, input)?;
                events = at + 1;
            }
            Ok(())
        })?;
        self.batch.events.drain(events..).for_each(|event| self.spare.recycle(event));
        self.batch.timestamp = timestamp;
        self.batch.data_parallel_rank = data_parallel_rank;
        Ok(&self.batch)
    }

    /// Frees all memory after a large payload.
    fn free_if_large(&mut self) {
        if self.spare.kept_bytes > MAX_KEPT_BYTES {
            *self = Self::default();
        }
    }

    /// Reads the next event into index `at`.
    fn event(&mut self, at: usize, input: Input<'_, '_>) -> Decoded<()> {
        let mut rest = *input;
        if self.expected_event(at, &mut rest).is_none() {
            rest = *input;
            let event = event(&mut rest)?;
            self.spare.kept_bytes += MAX_EXPANSION * (input.len() - rest.len());
            self.put(at, event);
        }
        *input = rest;
        Ok(())
    }

    /// Reads an event in the form that msgspec writes. May return `None` for other forms, and then
    /// leaves the input and the event at `at` in an unspecified state.
    fn expected_event(&mut self, at: usize, input: Input<'_, '_>) -> Option<()> {
        let mut fields = Fields::read(input)?;
        if fields.take_name(input, b"\xa4type\xabBlockStored") {
            if !matches!(self.batch.events.get(at), Some(KvEvent::BlockStored(_))) {
                let stored = take_or_default(&mut self.spare.stored, &mut self.spare.kept_bytes);
                self.put(at, KvEvent::BlockStored(stored));
            }
            let Some(KvEvent::BlockStored(stored)) = self.batch.events.get_mut(at) else {
                return None;
            };
            self.spare.block_stored(input, fields, stored)
        } else if fields.take_name(input, b"\xa4type\xacBlockRemoved") {
            if !matches!(self.batch.events.get(at), Some(KvEvent::BlockRemoved(_))) {
                let removed = take_or_default(&mut self.spare.removed, &mut self.spare.kept_bytes);
                self.put(at, KvEvent::BlockRemoved(removed));
            }
            let Some(KvEvent::BlockRemoved(removed)) = self.batch.events.get_mut(at) else {
                return None;
            };
            self.spare.block_removed(input, fields, removed)
        } else {
            None
        }
    }

    /// Sets the event at index `at`, which is at most the number of events.
    fn put(&mut self, at: usize, event: KvEvent) {
        match self.batch.events.get_mut(at) {
            Some(slot) => self.spare.recycle(std::mem::replace(slot, event)),
            None => {
                reserve(&mut self.batch.events, 1, &mut self.spare.kept_bytes);
                self.batch.events.push(event);
            }
        }
    }
}

#[cfg(test)]
mod tests;
