//! The parts of events, from memory that earlier ones had.

use rmp::decode::read_bin_len;

use super::form::{Fields, NIL, is_long, length, nil, number, tokens};
use super::room::room;
use crate::event::decode::{Input, integer, integer_hash, text};
use crate::event::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent};

/// What earlier events were made of.
#[derive(Debug, Default)]
pub(super) struct Spare {
    pub(super) stored: Vec<BlockStored>,
    pub(super) removed: Vec<BlockRemoved>,
    texts: Vec<String>,
    hashes: Vec<Vec<u8>>,
    marks: Vec<Vec<Option<Vec<ExtraKey>>>>,
    marks_of_block: Vec<Vec<ExtraKey>>,
    /// Bytes allocated, as far as they are not freed for certain.
    pub(super) kept: usize,
}

const STORED_FIELDS: [&str; 15] = [
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
    "lookahead_token_ids",
];

const REMOVED_FIELDS: [&str; 5] = ["block_hashes", "medium", "group_idx", "locality", "ownership"];

/// Each of these gives `None` when it meets anything that it doesn't expect.
impl Spare {
    /// Sets every field.
    pub(super) fn block_stored(
        &mut self,
        input: Input<'_, '_>,
        mut fields: Fields,
        stored: &mut BlockStored,
    ) -> Option<()> {
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
        self.text(
            fields.next(input, b"\xb2kv_cache_spec_kind"),
            input,
            &mut stored.kv_cache_spec_kind,
        )?;
        stored.kv_cache_spec_sliding_window =
            number(fields.next(input, b"\xbckv_cache_spec_sliding_window"), input)?;
        self.text(fields.next(input, b"\xa8locality"), input, &mut stored.locality)?;
        self.text(fields.next(input, b"\xa9ownership"), input, &mut stored.ownership)?;
        self.text(fields.next(input, b"\xaasession_id"), input, &mut stored.session_id)?;
        stored.lookahead_token_ids = None;
        // Lookahead is rare: such events are read without spare memory.
        fields.skip_rest(input, &STORED_FIELDS)
    }

    /// Sets every field.
    pub(super) fn block_removed(
        &mut self,
        input: Input<'_, '_>,
        mut fields: Fields,
        removed: &mut BlockRemoved,
    ) -> Option<()> {
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
        // A value takes at least one byte: a length beyond that is a lie that must not reserve
        // memory.
        room(hashes, length.min(input.len()), &mut self.kept);
        // Of 64 random bits hardly any fit a shorter form.
        if let Some((longest, rest)) =
            length.checked_mul(9).and_then(|bytes| input.split_at_checked(bytes))
        {
            let mut are_long = true;
            hashes.extend(longest.as_chunks::<9>().0.iter().map(
                |&[marker, a, b, c, d, e, f, g, h]| {
                    are_long &= is_long(marker);
                    ExternalHash::U64(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
                },
            ));
            if are_long {
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

    #[inline]
    fn hash(&mut self, input: Input<'_, '_>) -> Option<ExternalHash> {
        if let Some((&[marker, ref hash @ ..], rest)) = input.split_first_chunk::<9>()
            && is_long(marker)
        {
            *input = rest;
            return Some(ExternalHash::U64(u64::from_be_bytes(*hash)));
        }
        self.uncommon_hash(input)
    }

    fn uncommon_hash(&mut self, input: Input<'_, '_>) -> Option<ExternalHash> {
        let mut bytes = *input;
        let Ok(length) = read_bin_len(&mut bytes) else {
            return integer_hash(input).ok().map(ExternalHash::U64);
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
        if !given || nil(input) {
            if let Some(mut blocks) = marks.take() {
                blocks.drain(..).flatten().for_each(|keys| self.keep_marks(keys));
                self.marks.push(blocks);
            }
            return Some(());
        }
        let length = length(input)?;
        let mut blocks = marks.take().unwrap_or_else(|| reused(&mut self.marks, &mut self.kept));
        blocks.drain(..).flatten().for_each(|keys| self.keep_marks(keys));
        room(&mut blocks, length.min(input.len()), &mut self.kept);
        // Most prompts are text.
        let unmarked = input.iter().take(length).take_while(|marker| **marker == NIL).count();
        *input = &input[unmarked..];
        blocks.resize_with(unmarked, || None);
        for _ in unmarked..length {
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

    fn text(
        &mut self,
        given: bool,
        input: Input<'_, '_>,
        field: &mut Option<String>,
    ) -> Option<()> {
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

    pub(super) fn keep(&mut self, event: KvEvent) {
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

pub(super) fn reused<T: Default>(spare: &mut Vec<T>, kept: &mut usize) -> T {
    spare.pop().unwrap_or_else(|| {
        // Here and later among the spare ones.
        *kept += 2 * size_of::<T>();
        T::default()
    })
}
