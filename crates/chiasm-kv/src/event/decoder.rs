//! msgpack → events, into memory that is used again.
//!
//! What engines publish is read as msgspec writes it: the tag first, the fields in declared order, those with a default left
//! out or not, later ones after them. An event in any other form is read again from its start by [`super::decode`], which
//! knows all forms: so both tell the same of all bytes, and only one of them tells what is wrong.

use std::cell::RefCell;

use chiasm_types::TokenId;
use rmp::decode::read_bin_len;

use super::decode::{Decoded, Input, array_len, batch, event, integer, map_len, optional, skip, text};
use super::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};
use crate::KvError;

/// What may be kept from one payload to the next, in bytes. Batches of a busy engine need a few tens of thousands.
const MOST_KEPT: usize = 4 << 20;

/// At most so many bytes of an event for each of its msgpack: an [`ExternalHash`] for a small number.
const LARGEST: usize = size_of::<ExternalHash>();

const NIL: u8 = 0xc0;
const U64: u8 = 0xcf;

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

/// What earlier events were made of.
#[derive(Debug, Default)]
struct Spare {
    stored: Vec<BlockStored>,
    removed: Vec<BlockRemoved>,
    texts: Vec<String>,
    hashes: Vec<Vec<u8>>,
    marks: Vec<Vec<Option<Vec<ExtraKey>>>>,
    marks_of_block: Vec<Vec<ExtraKey>>,
    /// Bytes allocated, as far as they are not freed for certain.
    kept: usize,
}

thread_local! {
    static DECODER: RefCell<Decoder> = RefCell::default();
}

/// Shows what a payload says, read with memory that belongs to the thread. `take` must not read another.
pub(crate) fn with_decoded<T>(payload: &[u8], take: impl FnOnce(&KvEventBatch) -> T) -> Result<T, KvError> {
    DECODER.with_borrow_mut(|decoder| decoder.decode(payload).map(take))
}

impl Default for Decoder {
    fn default() -> Self {
        let batch = KvEventBatch { timestamp: 0.0, events: Vec::new(), data_parallel_rank: None };
        Self { batch, spare: Spare::default() }
    }
}

impl Decoder {
    /// As [`decode`](super::decode()); the batch is there until the next one is read.
    ///
    /// # Errors
    /// As [`decode`](super::decode()).
    pub fn decode(&mut self, payload: &[u8]) -> Result<&KvEventBatch, KvError> {
        if self.spare.kept > MOST_KEPT {
            *self = Self::default();
        }
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

    /// None if the event is none that msgspec writes; the input and the place are in any state then.
    fn expected_event(&mut self, at: usize, input: Input<'_, '_>) -> Option<()> {
        let mut fields = Fields::of(input)?;
        if fields.next(input, b"\xa4type\xabBlockStored") {
            if !matches!(self.batch.events.get(at), Some(KvEvent::BlockStored(_))) {
                let stored = reused(&mut self.spare.stored, &mut self.spare.kept);
                self.put(at, KvEvent::BlockStored(stored));
            }
            let Some(KvEvent::BlockStored(stored)) = self.batch.events.get_mut(at) else { return None };
            self.spare.block_stored(input, fields, stored)
        } else if fields.next(input, b"\xa4type\xacBlockRemoved") {
            if !matches!(self.batch.events.get(at), Some(KvEvent::BlockRemoved(_))) {
                let removed = reused(&mut self.spare.removed, &mut self.spare.kept);
                self.put(at, KvEvent::BlockRemoved(removed));
            }
            let Some(KvEvent::BlockRemoved(removed)) = self.batch.events.get_mut(at) else { return None };
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

/// The fields of an event that have not been read.
struct Fields {
    left: u32,
}

impl Fields {
    fn of(input: Input<'_, '_>) -> Option<Self> {
        let left = match **input {
            [marker @ 0x80..=0x8f, ref rest @ ..] => {
                *input = rest;
                u32::from(marker & 0xf)
            }
            _ => map_len(input, "event").ok()?,
        };
        Some(Self { left })
    }

    /// Takes the name of the next field off the input, if it is this one: the marker and the name.
    #[inline]
    fn next<const N: usize>(&mut self, input: Input<'_, '_>, name: &[u8; N]) -> bool {
        match input.split_first_chunk::<N>() {
            Some((next, rest)) if next == name && self.left > 0 => {
                self.left -= 1;
                *input = rest;
                true
            }
            _ => false,
        }
    }

    /// Passes over fields of later versions. A known one here is out of order.
    fn skip_rest(self, input: Input<'_, '_>, known: &[&str]) -> Option<()> {
        for _ in 0..self.left {
            if known.contains(&text(input, "event").ok()?) {
                return None;
            }
            skip(input, "event").ok()?;
        }
        Some(())
    }
}

const STORED_FIELDS: [&str; 14] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
];

const REMOVED_FIELDS: [&str; 5] = ["block_hashes", "medium", "group_idx", "locality", "ownership"];

/// All of these give `None` when they meet anything that they don't expect.
impl Spare {
    /// Sets every field.
    fn block_stored(&mut self, input: Input<'_, '_>, mut fields: Fields, stored: &mut BlockStored) -> Option<()> {
        fields.next(input, b"\xacblock_hashes").then_some(())?;
        self.hashes(input, &mut stored.block_hashes)?;
        self.keep_hash(stored.parent_block_hash.take());
        if fields.next(input, b"\xb1parent_block_hash") && !nil(input) {
            stored.parent_block_hash = Some(self.hash(input)?);
        }
        fields.next(input, b"\xa9token_ids").then_some(())?;
        tokens(input, &mut stored.token_ids, &mut self.kept)?;
        fields.next(input, b"\xaablock_size").then_some(())?;
        stored.block_size = integer(input, "block_size").ok()?;
        stored.lora_id = number(fields.next(input, b"\xa7lora_id"), input)?;
        self.text(fields.next(input, b"\xa6medium"), input, &mut stored.medium)?;
        self.text(fields.next(input, b"\xa9lora_name"), input, &mut stored.lora_name)?;
        self.marks(fields.next(input, b"\xaaextra_keys"), input, &mut stored.extra_keys)?;
        stored.group_idx = number(fields.next(input, b"\xa9group_idx"), input)?;
        self.text(fields.next(input, b"\xb2kv_cache_spec_kind"), input, &mut stored.kv_cache_spec_kind)?;
        stored.kv_cache_spec_sliding_window = number(fields.next(input, b"\xbckv_cache_spec_sliding_window"), input)?;
        self.text(fields.next(input, b"\xa8locality"), input, &mut stored.locality)?;
        self.text(fields.next(input, b"\xa9ownership"), input, &mut stored.ownership)?;
        self.text(fields.next(input, b"\xaasession_id"), input, &mut stored.session_id)?;
        fields.skip_rest(input, &STORED_FIELDS)
    }

    /// Sets every field.
    fn block_removed(&mut self, input: Input<'_, '_>, mut fields: Fields, removed: &mut BlockRemoved) -> Option<()> {
        fields.next(input, b"\xacblock_hashes").then_some(())?;
        self.hashes(input, &mut removed.block_hashes)?;
        self.text(fields.next(input, b"\xa6medium"), input, &mut removed.medium)?;
        removed.group_idx = number(fields.next(input, b"\xa9group_idx"), input)?;
        self.text(fields.next(input, b"\xa8locality"), input, &mut removed.locality)?;
        self.text(fields.next(input, b"\xa9ownership"), input, &mut removed.ownership)?;
        fields.skip_rest(input, &REMOVED_FIELDS)
    }

    fn hashes(&mut self, input: Input<'_, '_>, hashes: &mut Vec<ExternalHash>) -> Option<()> {
        let length = length(input)?;
        hashes.drain(..).for_each(|hash| self.keep_hash(Some(hash)));
        // A value takes at least one byte: a length beyond that is a lie that must not reserve memory.
        room(hashes, length.min(input.len()), &mut self.kept);
        // Of 64 random bits hardly any fit a shorter form.
        if let Some((longest, rest)) = length.checked_mul(9).and_then(|bytes| input.split_at_checked(bytes)) {
            let mut other = 0;
            hashes.extend(longest.as_chunks::<9>().0.iter().map(|&[marker, a, b, c, d, e, f, g, h]| {
                other |= marker ^ U64;
                ExternalHash::U64(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
            }));
            if other == 0 {
                *input = rest;
                return Some(());
            }
            hashes.clear();
        }
        for _ in 0..length {
            let hash = self.hash(input)?;
            hashes.push(hash);
        }
        Some(())
    }

    fn hash(&mut self, input: Input<'_, '_>) -> Option<ExternalHash> {
        let mut bytes = *input;
        let Ok(length) = read_bin_len(&mut bytes) else {
            return integer(input, "block_hashes").ok().map(ExternalHash::U64);
        };
        let (bytes, rest) = bytes.split_at_checked(length as usize)?;
        *input = rest;
        let mut hash = reused(&mut self.hashes, &mut self.kept);
        hash.clear();
        room(&mut hash, bytes.len(), &mut self.kept);
        hash.extend_from_slice(bytes);
        Some(ExternalHash::Bytes(hash))
    }

    fn marks(
        &mut self,
        given: bool,
        input: Input<'_, '_>,
        marks: &mut Option<Vec<Option<Vec<ExtraKey>>>>,
    ) -> Option<()> {
        if let Some(mut blocks) = marks.take() {
            blocks.drain(..).flatten().for_each(|keys| self.keep_marks(keys));
            self.marks.push(blocks);
        }
        if !given || nil(input) {
            return Some(());
        }
        let length = length(input)?;
        let mut blocks = reused(&mut self.marks, &mut self.kept);
        room(&mut blocks, length.min(input.len()), &mut self.kept);
        for _ in 0..length {
            let keys = if nil(input) { None } else { Some(self.marks_of_block(input)?) };
            blocks.push(keys);
        }
        *marks = Some(blocks);
        Some(())
    }

    fn marks_of_block(&mut self, input: Input<'_, '_>) -> Option<Vec<ExtraKey>> {
        let length = length(input)?;
        let mut keys = reused(&mut self.marks_of_block, &mut self.kept);
        room(&mut keys, length.min(input.len()), &mut self.kept);
        for _ in 0..length {
            let key = match input.split_first()? {
                (0x92, rest) => {
                    *input = rest;
                    let identifier = self.copy(text(input, "extra_keys").ok()?);
                    ExtraKey::Media { identifier, offset: integer(input, "extra_keys").ok()? }
                }
                _ => ExtraKey::Text(self.copy(text(input, "extra_keys").ok()?)),
            };
            keys.push(key);
        }
        Some(keys)
    }

    fn text(&mut self, given: bool, input: Input<'_, '_>, field: &mut Option<String>) -> Option<()> {
        if !given || nil(input) {
            self.texts.extend(field.take());
            return Some(());
        }
        // As in the event that was here before: there are few media and kinds.
        let same = |before: &String| {
            let (marker, rest) = input.split_first()?;
            let short = usize::from(marker ^ 0xa0) == before.len() && before.len() < 32;
            rest.strip_prefix(before.as_bytes()).filter(|_| short)
        };
        if let Some(rest) = field.as_ref().and_then(same) {
            *input = rest;
            return Some(());
        }
        let text = text(input, "text").ok()?;
        self.texts.extend(field.take());
        *field = Some(self.copy(text));
        Some(())
    }

    fn copy(&mut self, text: &str) -> String {
        let mut bytes = reused(&mut self.texts, &mut self.kept);
        bytes.clear();
        let before = bytes.capacity();
        bytes.push_str(text);
        self.kept += bytes.capacity() - before;
        bytes
    }

    fn keep(&mut self, event: KvEvent) {
        match event {
            KvEvent::BlockStored(stored) => self.stored.push(stored),
            KvEvent::BlockRemoved(removed) => self.removed.push(removed),
            KvEvent::AllBlocksCleared | KvEvent::Unknown(_) => {}
        }
    }

    #[inline]
    fn keep_hash(&mut self, hash: Option<ExternalHash>) {
        if let Some(ExternalHash::Bytes(hash)) = hash {
            self.hashes.push(hash);
        }
    }

    fn keep_marks(&mut self, mut keys: Vec<ExtraKey>) {
        for key in keys.drain(..) {
            if let ExtraKey::Media { identifier: text, .. } | ExtraKey::Text(text) = key {
                self.texts.push(text);
            }
        }
        self.marks_of_block.push(keys);
    }
}

/// Reads a list of token ids without a branch that depends on them: a vocabulary has ids of three widths, in an order that
/// no processor foresees.
fn tokens(input: Input<'_, '_>, tokens: &mut Vec<TokenId>, kept: &mut usize) -> Option<()> {
    let length = length(input)?;
    if length > input.len() {
        return None;
    }
    room(tokens, length.saturating_sub(tokens.len()), kept);
    tokens.resize(length, TokenId(0));
    let (bytes, mut at, mut odd) = (*input, 0, 0);
    for token in &mut tokens[..] {
        // Nothing but a list that ends the payload has none.
        let Some(window) = bytes.get(at..).and_then(<[u8]>::first_chunk::<8>) else {
            odd = 1;
            break;
        };
        // A number below 128 is its own marker; those of the three wider forms are cc, cd and ce.
        let marker = u64::from(window[0]);
        let wide = marker >> 7;
        let length = wide << (marker & 3);
        odd |= wide & u64::from(marker.wrapping_sub(0xcc) > 2);
        at += 1 + length as usize;
        let digits = u64::from_be_bytes(*window) << (8 * wide);
        *token = TokenId((digits >> (64 - 8 * (length | (wide ^ 1)))) as u32);
    }
    if odd == 0 {
        *input = &input[at..];
        return Some(());
    }
    tokens.clear();
    for _ in 0..length {
        tokens.push(TokenId(integer(input, "token_ids").ok()?));
    }
    Some(())
}

/// Of a list.
#[inline]
fn length(input: Input<'_, '_>) -> Option<usize> {
    let (length, rest) = match **input {
        [marker @ 0x90..=0x9f, ref rest @ ..] => (usize::from(marker & 0xf), rest),
        [0xdc, high, low, ref rest @ ..] => (usize::from(u16::from_be_bytes([high, low])), rest),
        _ => return array_len(input, "list").ok().map(|length| length as usize),
    };
    *input = rest;
    Some(length)
}

fn number<T: TryFrom<i128>>(given: bool, input: Input<'_, '_>) -> Option<Option<T>> {
    if given { optional(input, |input| integer(input, "number")).ok() } else { Some(None) }
}

/// Takes a nil off the input, if there is one.
#[inline]
fn nil(input: Input<'_, '_>) -> bool {
    let rest = input.strip_prefix(&[NIL]);
    *input = rest.unwrap_or(input);
    rest.is_some()
}

fn reused<T: Default>(spare: &mut Vec<T>, kept: &mut usize) -> T {
    spare.pop().unwrap_or_else(|| {
        // Here and later among the spare ones.
        *kept += 2 * size_of::<T>();
        T::default()
    })
}

#[inline]
fn room<T>(list: &mut Vec<T>, more: usize, kept: &mut usize) {
    let before = list.capacity();
    if before - list.len() < more {
        list.reserve(more);
        *kept += (list.capacity() - before) * size_of::<T>();
    }
}

#[cfg(test)]
mod tests;
