//! The parts of events, read into memory of earlier events.

use rmp::decode::read_bin_len;

use super::form::{Fields, NIL, is_long, length, nil, number, tokens};
use super::room::reserve;
use crate::event::decode::{Input, integer, integer_hash, text};
use crate::event::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent};

/// The unused parts of earlier events, whose memory is reused.
#[derive(Debug, Default)]
pub(super) struct Spare {
    pub(super) stored: Vec<BlockStored>,
    pub(super) removed: Vec<BlockRemoved>,
    texts: Vec<String>,
    hashes: Vec<Vec<u8>>,
    extra_keys: Vec<Vec<Option<Vec<ExtraKey>>>>,
    block_extra_keys: Vec<Vec<ExtraKey>>,
    /// An upper bound of the bytes that are allocated: those not known to be freed.
    pub(super) kept_bytes: usize,
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

/// The reading functions return `None` for input that they do not expect; the general decoder reads
/// the event then.
impl Spare {
    /// Reads a `BlockStored` event after its tag. Sets every field of `stored`.
    pub(super) fn block_stored(
        &mut self,
        input: Input<'_, '_>,
        mut fields: Fields,
        stored: &mut BlockStored,
    ) -> Option<()> {
        fields.take_name(input, b"\xacblock_hashes").then_some(())?;
        self.hashes(input, &mut stored.block_hashes)?;
        self.recycle_hash(stored.parent_block_hash.take());
        if fields.take_name(input, b"\xb1parent_block_hash") && !nil(input) {
            stored.parent_block_hash = Some(self.hash(input)?);
        }
        fields.take_name(input, b"\xa9token_ids").then_some(())?;
        tokens(input, &mut stored.token_ids, &mut self.kept_bytes)?;
        fields.take_name(input, b"\xaablock_size").then_some(())?;
        stored.block_size = integer(input, "block_size").ok()?;
        stored.lora_id = number(fields.take_name(input, b"\xa7lora_id"), input)?;
        self.text(fields.take_name(input, b"\xa6medium"), input, &mut stored.medium)?;
        self.text(fields.take_name(input, b"\xa9lora_name"), input, &mut stored.lora_name)?;
        self.extra_keys(fields.take_name(input, b"\xaaextra_keys"), input, &mut stored.extra_keys)?;
        stored.group_idx = number(fields.take_name(input, b"\xa9group_idx"), input)?;
        self.text(
            fields.take_name(input, b"\xb2kv_cache_spec_kind"),
            input,
            &mut stored.kv_cache_spec_kind,
        )?;
        stored.kv_cache_spec_sliding_window =
            number(fields.take_name(input, b"\xbckv_cache_spec_sliding_window"), input)?;
        self.text(fields.take_name(input, b"\xa8locality"), input, &mut stored.locality)?;
        self.text(fields.take_name(input, b"\xa9ownership"), input, &mut stored.ownership)?;
        self.text(fields.take_name(input, b"\xaasession_id"), input, &mut stored.session_id)?;
        stored.lookahead_token_ids = None;
        // Lookahead is rare: events that have it go to the general decoder.
        fields.skip_rest(input, &STORED_FIELDS)
    }

    /// Reads a `BlockRemoved` event after its tag. Sets every field of `removed`.
    pub(super) fn block_removed(
        &mut self,
        input: Input<'_, '_>,
        mut fields: Fields,
        removed: &mut BlockRemoved,
    ) -> Option<()> {
        fields.take_name(input, b"\xacblock_hashes").then_some(())?;
        self.hashes(input, &mut removed.block_hashes)?;
        self.text(fields.take_name(input, b"\xa6medium"), input, &mut removed.medium)?;
        removed.group_idx = number(fields.take_name(input, b"\xa9group_idx"), input)?;
        self.text(fields.take_name(input, b"\xa8locality"), input, &mut removed.locality)?;
        self.text(fields.take_name(input, b"\xa9ownership"), input, &mut removed.ownership)?;
        fields.skip_rest(input, &REMOVED_FIELDS)
    }

    fn hashes(&mut self, input: Input<'_, '_>, hashes: &mut Vec<ExternalHash>) -> Option<()> {
        let length = length(input)?;
        hashes.drain(..).for_each(|hash| self.recycle_hash(Some(hash)));
        // A value takes at least one byte, so a longer list is impossible and must not reserve
        // memory.
        reserve(hashes, length.min(input.len()), &mut self.kept_bytes);
        // Hardly any hash of 64 random bits fits a shorter form.
        if let Some((long_hashes, rest)) =
            length.checked_mul(9).and_then(|bytes| input.split_at_checked(bytes))
        {
            let mut are_long = true;
            hashes.extend(long_hashes.as_chunks::<9>().0.iter().map(
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
        let mut hash = take_or_default(&mut self.hashes, &mut self.kept_bytes);
        hash.clear();
        reserve(&mut hash, bytes.len(), &mut self.kept_bytes);
        hash.extend_from_slice(bytes);
        Some(ExternalHash::Bytes(hash))
    }

    /// Reads the extra keys of all blocks if their field `is_present`.
    fn extra_keys(
        &mut self,
        is_present: bool,
        input: Input<'_, '_>,
        extra_keys: &mut Option<Vec<Option<Vec<ExtraKey>>>>,
    ) -> Option<()> {
        if !is_present || nil(input) {
            if let Some(mut blocks) = extra_keys.take() {
                blocks.drain(..).flatten().for_each(|keys| self.recycle_extra_keys(keys));
                self.extra_keys.push(blocks);
            }
            return Some(());
        }
        let length = length(input)?;
        let mut blocks = extra_keys
            .take()
            .unwrap_or_else(|| take_or_default(&mut self.extra_keys, &mut self.kept_bytes));
        blocks.drain(..).flatten().for_each(|keys| self.recycle_extra_keys(keys));
        reserve(&mut blocks, length.min(input.len()), &mut self.kept_bytes);
        // Most prompts are text, whose blocks have no extra keys.
        let without_keys = input.iter().take(length).take_while(|marker| **marker == NIL).count();
        *input = &input[without_keys..];
        blocks.resize_with(without_keys, || None);
        for _ in without_keys..length {
            let keys = if nil(input) { None } else { Some(self.block_extra_keys(input)?) };
            blocks.push(keys);
        }
        *extra_keys = Some(blocks);
        Some(())
    }

    fn block_extra_keys(&mut self, input: Input<'_, '_>) -> Option<Vec<ExtraKey>> {
        let length = length(input)?;
        let mut keys = take_or_default(&mut self.block_extra_keys, &mut self.kept_bytes);
        reserve(&mut keys, length.min(input.len()), &mut self.kept_bytes);
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

    /// Reads an optional text if its field `is_present`.
    fn text(
        &mut self,
        is_present: bool,
        input: Input<'_, '_>,
        field: &mut Option<String>,
    ) -> Option<()> {
        if !is_present || nil(input) {
            self.texts.extend(field.take());
            return Some(());
        }
        // Often the text equals the earlier event's, because there are few media and kinds.
        let rest_after_same = |before: &String| {
            let (marker, rest) = input.split_first()?;
            let short = usize::from(marker ^ 0xa0) == before.len() && before.len() < 32;
            rest.strip_prefix(before.as_bytes()).filter(|_| short)
        };
        if let Some(rest) = field.as_ref().and_then(rest_after_same) {
            *input = rest;
            return Some(());
        }
        let text = text(input, "text").ok()?;
        self.texts.extend(field.take());
        *field = Some(self.copy(text));
        Some(())
    }

    /// Copies `text` into a spare string.
    fn copy(&mut self, text: &str) -> String {
        let mut copy = take_or_default(&mut self.texts, &mut self.kept_bytes);
        copy.clear();
        let before = copy.capacity();
        copy.push_str(text);
        self.kept_bytes += copy.capacity() - before;
        copy
    }

    /// Keeps the memory of an event for later events.
    pub(super) fn recycle(&mut self, event: KvEvent) {
        match event {
            KvEvent::BlockStored(stored) => self.stored.push(stored),
            KvEvent::BlockRemoved(removed) => self.removed.push(removed),
            KvEvent::AllBlocksCleared | KvEvent::Unknown(_) => {}
        }
    }

    #[inline]
    fn recycle_hash(&mut self, hash: Option<ExternalHash>) {
        if let Some(ExternalHash::Bytes(hash)) = hash {
            self.hashes.push(hash);
        }
    }

    fn recycle_extra_keys(&mut self, mut keys: Vec<ExtraKey>) {
        for key in keys.drain(..) {
            if let ExtraKey::Media { identifier: text, .. } | ExtraKey::Text(text) = key {
                self.texts.push(text);
            }
        }
        self.block_extra_keys.push(keys);
    }
}

/// Returns a spare value, or a new one, which is added to `kept_bytes`.
pub(super) fn take_or_default<T: Default>(spare: &mut Vec<T>, kept_bytes: &mut usize) -> T {
    spare.pop().unwrap_or_else(|| {
        // Counted twice, for its places in the event and in the spare list.
        *kept_bytes += 2 * size_of::<T>();
        T::default()
    })
}
