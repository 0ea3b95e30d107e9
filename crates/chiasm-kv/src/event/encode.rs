//! Encoding of events as msgpack, byte for byte as msgspec writes vLLM's structs.
//!
//! The tag comes first, then the fields in declared order. Fields that have their default are left
//! out.

use std::convert::Infallible;

use rmp::encode::{self, ByteBuf, ValueWriteError};

use super::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};

type Written = Result<(), ValueWriteError<Infallible>>;

impl KvEventBatch {
    /// Encodes the batch as the payload frame of one message.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ByteBuf::new();
        #[expect(clippy::expect_used, reason = "the writer's error type is Infallible")]
        batch(&mut out, self).expect("writing to memory can't fail");
        out.into_vec()
    }
}

fn batch(out: &mut ByteBuf, batch: &KvEventBatch) -> Written {
    encode::write_array_len(out, 2 + u32::from(batch.data_parallel_rank.is_some()))?;
    encode::write_f64(out, batch.timestamp)?;
    encode::write_array_len(out, batch.events.len() as u32)?;
    for kv_event in &batch.events {
        event(out, kv_event)?;
    }
    if let Some(rank) = batch.data_parallel_rank {
        encode::write_uint(out, rank.into())?;
    }
    Ok(())
}

fn event(out: &mut ByteBuf, event: &KvEvent) -> Written {
    match event {
        KvEvent::BlockStored(stored) => block_stored(out, stored),
        KvEvent::BlockRemoved(removed) => block_removed(out, removed),
        KvEvent::AllBlocksCleared => tagged(out, "AllBlocksCleared", 0),
        KvEvent::Unknown(name) => tagged(out, name, 0),
    }
}

fn tagged(out: &mut ByteBuf, tag: &str, fields: usize) -> Written {
    encode::write_map_len(out, 1 + fields as u32)?;
    encode::write_str(out, "type")?;
    encode::write_str(out, tag)
}

fn block_stored(out: &mut ByteBuf, stored: &BlockStored) -> Written {
    let optional_fields = [
        stored.extra_keys.is_some(),
        stored.group_idx.is_some(),
        stored.kv_cache_spec_kind.is_some(),
        stored.kv_cache_spec_sliding_window.is_some(),
        stored.locality.is_some(),
        stored.ownership.is_some(),
        stored.session_id.is_some(),
        stored.lookahead_token_ids.is_some(),
    ];
    tagged(out, "BlockStored", 7 + optional_fields.into_iter().filter(|is_set| *is_set).count())?;
    list(out, "block_hashes", &stored.block_hashes, external_hash)?;
    encode::write_str(out, "parent_block_hash")?;
    or_nil(out, stored.parent_block_hash.as_ref(), external_hash)?;
    list(out, "token_ids", &stored.token_ids, |out, token| unsigned(out, token.0))?;
    encode::write_str(out, "block_size")?;
    unsigned(out, stored.block_size)?;
    encode::write_str(out, "lora_id")?;
    or_nil(out, stored.lora_id, signed)?;
    encode::write_str(out, "medium")?;
    or_nil(out, stored.medium.as_deref(), encode::write_str)?;
    encode::write_str(out, "lora_name")?;
    or_nil(out, stored.lora_name.as_deref(), encode::write_str)?;
    if let Some(blocks) = &stored.extra_keys {
        list(out, "extra_keys", blocks, |out, block| or_nil(out, block.as_deref(), extra_keys))?;
    }
    if_some(out, "group_idx", stored.group_idx, unsigned)?;
    if_some(out, "kv_cache_spec_kind", stored.kv_cache_spec_kind.as_deref(), encode::write_str)?;
    if_some(out, "kv_cache_spec_sliding_window", stored.kv_cache_spec_sliding_window, unsigned)?;
    if_some(out, "locality", stored.locality.as_deref(), encode::write_str)?;
    if_some(out, "ownership", stored.ownership.as_deref(), encode::write_str)?;
    if_some(out, "session_id", stored.session_id.as_deref(), encode::write_str)?;
    if let Some(blocks) = &stored.lookahead_token_ids {
        list(out, "lookahead_token_ids", blocks, |out, ahead| {
            elements(out, ahead, |out, token| unsigned(out, token.0))
        })?;
    }
    Ok(())
}

fn block_removed(out: &mut ByteBuf, removed: &BlockRemoved) -> Written {
    let optional_fields =
        [removed.group_idx.is_some(), removed.locality.is_some(), removed.ownership.is_some()];
    tagged(out, "BlockRemoved", 2 + optional_fields.into_iter().filter(|is_set| *is_set).count())?;
    list(out, "block_hashes", &removed.block_hashes, external_hash)?;
    encode::write_str(out, "medium")?;
    or_nil(out, removed.medium.as_deref(), encode::write_str)?;
    if_some(out, "group_idx", removed.group_idx, unsigned)?;
    if_some(out, "locality", removed.locality.as_deref(), encode::write_str)?;
    if_some(out, "ownership", removed.ownership.as_deref(), encode::write_str)
}

fn external_hash(out: &mut ByteBuf, hash: &ExternalHash) -> Written {
    match hash {
        ExternalHash::U64(hash) => encode::write_uint(out, *hash).map(drop),
        ExternalHash::Bytes(hash) => encode::write_bin(out, hash),
    }
}

fn extra_keys(out: &mut ByteBuf, keys: &[ExtraKey]) -> Written {
    encode::write_array_len(out, keys.len() as u32)?;
    keys.iter().try_for_each(|key| match key {
        ExtraKey::Media { identifier, offset } => {
            encode::write_array_len(out, 2)?;
            encode::write_str(out, identifier)?;
            signed(out, *offset)
        }
        ExtraKey::Text(text) => encode::write_str(out, text),
        ExtraKey::Other(raw) => {
            out.as_mut_vec().extend_from_slice(raw);
            Ok(())
        }
    })
}

fn list<T>(
    out: &mut ByteBuf,
    name: &str,
    values: &[T],
    write: impl FnMut(&mut ByteBuf, &T) -> Written,
) -> Written {
    encode::write_str(out, name)?;
    elements(out, values, write)
}

fn elements<T>(
    out: &mut ByteBuf,
    values: &[T],
    mut write: impl FnMut(&mut ByteBuf, &T) -> Written,
) -> Written {
    encode::write_array_len(out, values.len() as u32)?;
    values.iter().try_for_each(|value| write(out, value))
}

fn if_some<T>(
    out: &mut ByteBuf,
    name: &str,
    value: Option<T>,
    write: impl FnOnce(&mut ByteBuf, T) -> Written,
) -> Written {
    let Some(value) = value else { return Ok(()) };
    encode::write_str(out, name)?;
    write(out, value)
}

fn or_nil<T>(
    out: &mut ByteBuf,
    value: Option<T>,
    write: impl FnOnce(&mut ByteBuf, T) -> Written,
) -> Written {
    match value {
        Some(value) => write(out, value),
        None => encode::write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite),
    }
}

fn unsigned(out: &mut ByteBuf, value: u32) -> Written {
    encode::write_uint(out, value.into()).map(drop)
}

fn signed(out: &mut ByteBuf, value: i64) -> Written {
    encode::write_sint(out, value).map(drop)
}
