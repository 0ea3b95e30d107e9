//! msgpack → events, into memory that is used again.
//!
//! What engines publish is read as msgspec writes it: the tag first, the fields in declared order,
//! those with a default left out or not, later ones after them. An event in any other form is read
//! again from its start by [`super::decode`], which knows all forms: so both tell the same of all
//! bytes, and only one of them tells what is wrong.

mod form;
mod room;
mod spare;

use std::cell::RefCell;

use super::decode::{Decoded, Input, array_len, batch, event};
use super::{ExternalHash, KvEvent, KvEventBatch};
use crate::KvError;
use form::Fields;
use room::room;
use spare::{Spare, reused};

/// What may be kept from one payload to the next, in bytes. Batches of a busy engine need a few
/// tens of thousands.
const MOST_KEPT: usize = 4 << 20;

/// Bytes of an event for each byte of its msgpack, at most: an [`ExternalHash`] for a small number.
const LARGEST: usize = size_of::<ExternalHash>();

/// Reads payloads one after the other. Allocates nothing once it has seen as large ones.
///
/// ```
/// use chiasm_kv::event::{Decoder, KvEvent, KvEventBatch};
///
/// let batch = KvEventBatch { timestamp: 1.5, events: vec![KvEvent::AllBlocksCleared], data_parallel_rank: Some(0) };
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

/// Shows what a payload says, read with memory that belongs to the thread. `take` must not read
/// another.
pub(crate) fn with_decoded<T>(
    payload: &[u8],
    take: impl FnOnce(&KvEventBatch) -> T,
) -> Result<T, KvError> {
    DECODER.with_borrow_mut(|decoder| {
        let taken = decoder.decode(payload).map(take);
        // The thread may see no other payload for long.
        decoder.forget_large();
        taken
    })
}

impl Default for Decoder {
    fn default() -> Self {
        let batch = KvEventBatch { timestamp: 0.0, events: Vec::new(), data_parallel_rank: None };
        Self { batch, spare: Spare::default() }
    }
}

impl Decoder {
    /// Reads what [`decode`](super::decode()) reads; the batch is there until the next one is read.
    ///
    /// # Errors
    /// As [`decode`](super::decode()).
    pub fn decode(&mut self, payload: &[u8]) -> Result<&KvEventBatch, KvError> {
        self.forget_large();
        let mut events = 0;
        let (timestamp, (), data_parallel_rank) = batch(payload, |input| {
            for at in 0..array_len(input, "events")? as usize {
                self.event(at, input)?;
                events = at + 1;
            }
            Ok(())
        })?;
        self.batch.events.drain(events..).for_each(|event| self.spare.keep(event));
        (self.batch.timestamp, self.batch.data_parallel_rank) = (timestamp, data_parallel_rank);
        Ok(&self.batch)
    }

    /// Gives up the memory that a large payload has left.
    fn forget_large(&mut self) {
        if self.spare.kept > MOST_KEPT {
            *self = Self::default();
        }
    }

    /// Puts the next event in its place.
    fn event(&mut self, at: usize, input: Input<'_, '_>) -> Decoded<()> {
        let mut rest = *input;
        if self.expected_event(at, &mut rest).is_none() {
            rest = *input;
            let event = event(&mut rest)?;
            self.spare.kept += LARGEST * (input.len() - rest.len());
            self.put(at, event);
        }
        *input = rest;
        Ok(())
    }

    /// Reads an event as msgspec writes it, `None` for any other; the input and the place are in
    /// any state then.
    fn expected_event(&mut self, at: usize, input: Input<'_, '_>) -> Option<()> {
        let mut fields = Fields::of(input)?;
        if fields.next(input, b"\xa4type\xabBlockStored") {
            if !matches!(self.batch.events.get(at), Some(KvEvent::BlockStored(_))) {
                let stored = reused(&mut self.spare.stored, &mut self.spare.kept);
                self.put(at, KvEvent::BlockStored(stored));
            }
            let Some(KvEvent::BlockStored(stored)) = self.batch.events.get_mut(at) else {
                return None;
            };
            self.spare.block_stored(input, fields, stored)
        } else if fields.next(input, b"\xa4type\xacBlockRemoved") {
            if !matches!(self.batch.events.get(at), Some(KvEvent::BlockRemoved(_))) {
                let removed = reused(&mut self.spare.removed, &mut self.spare.kept);
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

    /// Events follow each other: `at` is at most their number.
    fn put(&mut self, at: usize, event: KvEvent) {
        match self.batch.events.get_mut(at) {
            Some(place) => self.spare.keep(std::mem::replace(place, event)),
            None => {
                room(&mut self.batch.events, 1, &mut self.spare.kept);
                self.batch.events.push(event);
            }
        }
    }
}

#[cfg(test)]
mod tests;
