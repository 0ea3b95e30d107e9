//! Decoding of msgpack into events: accepts every valid form and allocates.

use chiasm_types::TokenId;
use rmp::Marker;
use rmp::decode;
use rmpv::ValueRef;

use super::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};
use crate::KvError;

/// The maximum number of values for which memory is reserved before they have been read.
const MAX_RESERVED_VALUES: usize = 1 << 10;

/// The unread part of a payload. Each function below reads one value from its front.
pub(super) type Input<'i, 'p> = &'i mut &'p [u8];
pub(super) type Decoded<T> = Result<T, KvError>;

/// Decodes the payload frame of one message.
///
/// # Errors
/// [`KvError::Malformed`] if the bytes are not a batch or a known field has another type. Unknown
/// events, fields and appended positions are not an error.
pub fn decode(payload: &[u8]) -> Decoded<KvEventBatch> {
    let (timestamp, events, data_parallel_rank) =
        batch(payload, |input| list(input, "events", event))?;
    Ok(KvEventBatch { timestamp, events, data_parallel_rank })
}

/// Reads the positions of a batch: timestamp, events, rank. `events` reads the list of events.
pub(super) fn batch<E>(
    payload: &[u8],
    events: impl FnOnce(Input<'_, '_>) -> Decoded<E>,
) -> Decoded<(f64, E, Option<u32>)> {
    let input = &mut &payload[..];
    let positions = array_len(input, "batch")?;
    if positions < 2 {
        return Err(malformed("batch"));
    }
    let timestamp = float(input, "timestamp")?;
    let events = events(input)?;
    let data_parallel_rank = match positions {
        2 => None,
        _ => optional(input, |input| integer(input, "data_parallel_rank"))?,
    };
    for _ in 3..positions {
        skip(input, "batch")?;
    }
    Ok((timestamp, events, data_parallel_rank))
}

/// Reads one event.
pub(super) fn event(input: Input<'_, '_>) -> Decoded<KvEvent> {
    match tag(input)? {
        "BlockStored" => Ok(KvEvent::BlockStored(block_stored(input)?)),
        "BlockRemoved" => Ok(KvEvent::BlockRemoved(block_removed(input)?)),
        "AllBlocksCleared" => {
            skip(input, "AllBlocksCleared")?;
            Ok(KvEvent::AllBlocksCleared)
        }
        unknown => {
            let unknown = unknown.to_owned();
            skip(input, "event")?;
            Ok(KvEvent::Unknown(unknown))
        }
    }
}

/// Returns the `type` of the event at the front of `input` without consuming the event. msgspec
/// writes the type first, but does not guarantee it.
fn tag(mut input: &[u8]) -> Decoded<&str> {
    for _ in 0..map_len(&mut input, "event")? {
        if text(&mut input, "event")? == "type" {
            return text(&mut input, "type");
        }
        skip(&mut input, "event")?;
    }
    Err(malformed("type"))
}

fn block_stored(input: Input<'_, '_>) -> Decoded<BlockStored> {
    let mut stored = BlockStored::default();
    let mut seen = Required::<3>::default();
    for _ in 0..map_len(input, "BlockStored")? {
        match text(input, "BlockStored")? {
            "block_hashes" => {
                seen.mark(0);
                stored.block_hashes = list(input, "block_hashes", external_hash)?;
            }
            "token_ids" => {
                seen.mark(1);
                stored.token_ids = token_ids(input)?;
            }
            "block_size" => {
                seen.mark(2);
                stored.block_size = integer(input, "block_size")?;
            }
            "parent_block_hash" => stored.parent_block_hash = optional(input, external_hash)?,
            "lora_id" => stored.lora_id = optional(input, |input| integer(input, "lora_id"))?,
            "medium" => stored.medium = optional_string(input, "medium")?,
            "lora_name" => stored.lora_name = optional_string(input, "lora_name")?,
            "extra_keys" => {
                stored.extra_keys = optional(input, |input| {
                    list(input, "extra_keys", |input| optional(input, extra_keys))
                })?;
            }
            "group_idx" => stored.group_idx = optional(input, |input| integer(input, "group_idx"))?,
            "kv_cache_spec_kind" => {
                stored.kv_cache_spec_kind = optional_string(input, "kv_cache_spec_kind")?
            }
            "kv_cache_spec_sliding_window" => {
                stored.kv_cache_spec_sliding_window =
                    optional(input, |input| integer(input, "kv_cache_spec_sliding_window"))?;
            }
            "locality" => stored.locality = optional_string(input, "locality")?,
            "ownership" => stored.ownership = optional_string(input, "ownership")?,
            "session_id" => stored.session_id = optional_string(input, "session_id")?,
            "lookahead_token_ids" => {
                let tokens = |input: Input<'_, '_>| list(input, "lookahead_token_ids", token_id);
                stored.lookahead_token_ids =
                    optional(input, |input| list(input, "lookahead_token_ids", tokens))?;
            }
            _ => {
                skip(input, "BlockStored")?;
            }
        }
    }
    seen.check(["block_hashes", "token_ids", "block_size"])?;
    Ok(stored)
}

fn block_removed(input: Input<'_, '_>) -> Decoded<BlockRemoved> {
    let mut removed = BlockRemoved::default();
    let mut seen = Required::<1>::default();
    for _ in 0..map_len(input, "BlockRemoved")? {
        match text(input, "BlockRemoved")? {
            "block_hashes" => {
                seen.mark(0);
                removed.block_hashes = list(input, "block_hashes", external_hash)?;
            }
            "medium" => removed.medium = optional_string(input, "medium")?,
            "group_idx" => {
                removed.group_idx = optional(input, |input| integer(input, "group_idx"))?
            }
            "locality" => removed.locality = optional_string(input, "locality")?,
            "ownership" => removed.ownership = optional_string(input, "ownership")?,
            _ => {
                skip(input, "BlockRemoved")?;
            }
        }
    }
    seen.check(["block_hashes"])?;
    Ok(removed)
}

/// The set of fields without a default that an event has had so far.
struct Required<const N: usize>([bool; N]);

impl<const N: usize> Default for Required<N> {
    fn default() -> Self {
        Self([false; N])
    }
}

impl<const N: usize> Required<N> {
    fn mark(&mut self, field: usize) {
        self.0[field] = true;
    }

    /// Returns an error that names the first missing field.
    fn check(&self, names: [&'static str; N]) -> Decoded<()> {
        match self.0.iter().position(|seen| !seen) {
            Some(missing) => Err(malformed(names[missing])),
            None => Ok(()),
        }
    }
}

/// Reads a hash: an integer or a binary string.
pub(super) fn external_hash(input: Input<'_, '_>) -> Decoded<ExternalHash> {
    match peek(input) {
        Some(Marker::Bin8 | Marker::Bin16 | Marker::Bin32) => {
            let length =
                decode::read_bin_len(input).map_err(|_| malformed("block_hashes"))? as usize;
            let (hash, rest) = input.split_at_checked(length).ok_or(malformed("block_hashes"))?;
            *input = rest;
            Ok(ExternalHash::Bytes(hash.to_vec()))
        }
        _ => integer_hash(input).map(ExternalHash::U64),
    }
}

/// Reads an integer as 64 bits. vLLM's hashes are unsigned, SGLang's are signed.
pub(super) fn integer_hash(input: Input<'_, '_>) -> Decoded<u64> {
    let hash: i128 = integer(input, "block_hashes")?;
    u64::try_from(hash)
        .or_else(|_| i64::try_from(hash).map(i64::cast_unsigned))
        .map_err(|_| malformed("block_hashes"))
}

/// Reads the tokens of an event. Returns an empty list if a number exceeds 32 bits: SGLang
/// substitutes such numbers for the tokens of media items.
pub(super) fn token_ids(input: Input<'_, '_>) -> Decoded<Vec<TokenId>> {
    let numbers: Vec<Option<TokenId>> = list(input, "token_ids", |input| {
        integer(input, "token_ids").map(|number: u64| u32::try_from(number).ok().map(TokenId))
    })?;
    Ok(numbers.into_iter().collect::<Option<_>>().unwrap_or_default())
}

fn token_id(input: Input<'_, '_>) -> Decoded<TokenId> {
    integer(input, "token_ids").map(TokenId)
}

fn extra_keys(input: Input<'_, '_>) -> Decoded<Vec<ExtraKey>> {
    match peek(input) {
        Some(Marker::FixArray(_) | Marker::Array16 | Marker::Array32) => {
            list(input, "extra_keys", extra_key)
        }
        // A later version's form: kept as an unreadable mark.
        _ => skip(input, "extra_keys").map(|raw| vec![ExtraKey::Other(raw.to_vec())]),
    }
}

fn extra_key(input: Input<'_, '_>) -> Decoded<ExtraKey> {
    let mut rest = *input;
    let value = rmpv::decode::read_value_ref(&mut rest).map_err(|_| malformed("extra_keys"))?;
    let raw = &input[..input.len() - rest.len()];
    *input = rest;
    Ok(read_extra_key(&value).unwrap_or_else(|| ExtraKey::Other(raw.to_vec())))
}

fn read_extra_key(value: &ValueRef<'_>) -> Option<ExtraKey> {
    match value {
        ValueRef::String(text) => Some(ExtraKey::Text(text.as_str()?.to_owned())),
        ValueRef::Array(pair) => match &pair[..] {
            [ValueRef::String(identifier), ValueRef::Integer(offset)] => Some(ExtraKey::Media {
                identifier: identifier.as_str()?.to_owned(),
                offset: offset.as_i64()?,
            }),
            _ => None,
        },
        _ => None,
    }
}

fn malformed(field: &'static str) -> KvError {
    KvError::Malformed { field }
}

fn peek(input: &[u8]) -> Option<Marker> {
    input.first().map(|byte| Marker::from_u8(*byte))
}

pub(super) fn array_len(input: Input<'_, '_>, field: &'static str) -> Decoded<u32> {
    decode::read_array_len(input).map_err(|_| malformed(field))
}

pub(super) fn map_len(input: Input<'_, '_>, field: &'static str) -> Decoded<u32> {
    decode::read_map_len(input).map_err(|_| malformed(field))
}

pub(super) fn text<'p>(input: Input<'_, 'p>, field: &'static str) -> Decoded<&'p str> {
    let (text, rest) = decode::read_str_from_slice(*input).map_err(|_| malformed(field))?;
    *input = rest;
    Ok(text)
}

pub(super) fn integer<T: TryFrom<i128>>(input: Input<'_, '_>, field: &'static str) -> Decoded<T> {
    // Hashes may exceed i64 and offsets may be negative; i128 holds both.
    let wide: i128 = match peek(input) {
        Some(Marker::FixPos(small)) => {
            *input = &input[1..];
            small.into()
        }
        Some(Marker::U64) => decode::read_u64(input).map_err(|_| malformed(field))?.into(),
        _ => decode::read_int::<i64, _>(input).map_err(|_| malformed(field))?.into(),
    };
    T::try_from(wide).map_err(|_| malformed(field))
}

fn float(input: Input<'_, '_>, field: &'static str) -> Decoded<f64> {
    match peek(input) {
        Some(Marker::F64) => decode::read_f64(input).map_err(|_| malformed(field)),
        Some(Marker::F32) => decode::read_f32(input).map(f64::from).map_err(|_| malformed(field)),
        // A whole number of seconds may come as an integer.
        _ => integer::<i64>(input, field).map(|whole| whole as f64),
    }
}

pub(super) fn optional<'p, T>(
    input: Input<'_, 'p>,
    read: impl FnOnce(Input<'_, 'p>) -> Decoded<T>,
) -> Decoded<Option<T>> {
    if peek(input) == Some(Marker::Null) {
        *input = &input[1..];
        return Ok(None);
    }
    read(input).map(Some)
}

fn optional_string(input: Input<'_, '_>, field: &'static str) -> Decoded<Option<String>> {
    optional(input, |input| text(input, field).map(str::to_owned))
}

fn list<'p, T>(
    input: Input<'_, 'p>,
    field: &'static str,
    mut read: impl FnMut(Input<'_, 'p>) -> Decoded<T>,
) -> Decoded<Vec<T>> {
    let length = array_len(input, field)? as usize;
    // The announced length is untrusted and must not reserve memory by itself. A value takes at
    // least one byte of input, and an event some hundred times as much memory here.
    let mut list = Vec::with_capacity(length.min(input.len()).min(MAX_RESERVED_VALUES));
    for _ in 0..length {
        list.push(read(input)?);
    }
    Ok(list)
}

/// Skips one value of any type and returns its bytes.
pub(super) fn skip<'p>(input: Input<'_, 'p>, field: &'static str) -> Decoded<&'p [u8]> {
    let mut rest = *input;
    rmpv::decode::read_value_ref(&mut rest).map_err(|_| malformed(field))?;
    let skipped = &input[..input.len() - rest.len()];
    *input = rest;
    Ok(skipped)
}
