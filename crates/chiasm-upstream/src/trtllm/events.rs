//! Translates TensorRT-LLM's KV events into vLLM's.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_types::{BlockSize, TokenId};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::block::{ItemKey, MAX_NAME_BYTES, StoredBlock, medium};
use super::chains::Chains;
use super::error::FollowError;
use super::recent_prompts::RecentPrompts;

#[derive(Deserialize)]
struct Event {
    event_id: u64,
    #[serde(default)]
    attention_dp_rank: Option<u64>,
    /// Models with several kinds of attention have a cache for each window size.
    #[serde(default)]
    window_size: Option<u64>,
    data: Data,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Data {
    Created {},
    Stored {
        parent_hash: Option<Hash>,
        blocks: Vec<Block>,
    },
    Removed {
        block_hashes: Vec<Hash>,
    },
    Updated {
        block_hash: Hash,
        cache_level: Option<Change>,
    },
    #[serde(other)]
    Unknown,
}

#[derive(Deserialize)]
struct Block {
    block_hash: Hash,
    tokens: Vec<Token>,
    #[serde(default)]
    lora_id: Option<IgnoredAny>,
    /// Reported by later versions, as the salt's text or as a hash of it.
    #[serde(default)]
    cache_salt: Option<IgnoredAny>,
    #[serde(default)]
    cache_level: usize,
    /// The media items in the block: `{"type": "mm_key", "hash": …, "start_offset": …}` for each
    /// run of an item's tokens. The hash is one of decoded pixels. The offset is the number of the
    /// item's tokens before the first one of the run (`generateBlockHashExtraKeys` of
    /// `blockKey.cpp`).
    #[serde(default)]
    mm_keys: Vec<Value>,
}

#[derive(Deserialize)]
struct Token {
    token_id: TokenName,
    #[serde(default)]
    token_extra_id: u64,
}

/// A token's id. A token of text is a number. Within an item there are, depending on model and
/// version, numbers from the vocabulary's size on, the marker's number, or before them the item's
/// hash (`decodeEventBlock` of `kv_cache_manager_v2/eventData.cpp`).
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenName {
    Number(u64),
    Text(IgnoredAny),
}

#[derive(Deserialize)]
struct Change {
    new_value: usize,
    old_value: usize,
}

/// The server's hash of a block: a number or a text of hex digits. It is only used as a name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Hash {
    Number(u64),
    Text(String),
}

impl From<Hash> for ExternalHash {
    fn from(hash: Hash) -> Self {
        match hash {
            Hash::Number(number) => Self::U64(number),
            Hash::Text(text) => Self::Bytes(text.into_bytes()),
        }
    }
}

/// The translated events of one answer.
#[derive(Debug, Default, PartialEq)]
pub(super) struct TranslatedEvents {
    /// `true` if all earlier events are void.
    pub(super) is_void: bool,
    pub(super) batch: Option<KvEventBatch>,
    /// `true` if every event since the cache was empty has been seen.
    pub(super) history_known: bool,
}

/// The state of translating one server's events.
pub(super) struct Translation {
    block_size: BlockSize,
    /// The expected id of the next event.
    next: Option<u64>,
    /// The largest window, which is that of full attention.
    window: Option<u64>,
    history_known: bool,
    chains: Chains,
}

impl Translation {
    pub(super) fn new(recent: Arc<RecentPrompts>) -> Self {
        let block_size = recent.block_size();
        Self {
            block_size,
            next: None,
            window: None,
            history_known: false,
            chains: Chains::new(recent),
        }
    }

    /// Translates the events of an answer.
    ///
    /// # Errors
    /// Returns [`FollowError`] if the contents of this server's cache can't be known.
    pub(super) fn translate(
        &mut self,
        answer: &[u8],
        now: Instant,
    ) -> Result<TranslatedEvents, FollowError> {
        let events: Vec<Event> = serde_json::from_slice(answer)?;
        let mut is_void = false;
        let mut translated = Vec::new();
        self.chains.begin(now);
        for event in events {
            if event.attention_dp_rank.is_some_and(|rank| rank > 0) {
                return Err(FollowError::SeveralEngines);
            }
            match self.next {
                // Events are numbered from 0 since the cache was empty.
                None => self.history_known = event.event_id == 0,
                Some(next) if next == event.event_id => {}
                Some(_) => {
                    is_void = true;
                    self.history_known = false;
                    translated.clear();
                    self.chains.forget();
                }
            }
            self.next = event.event_id.checked_add(1);
            self.translate_event(event, now, &mut translated)?;
        }
        self.chains.resolve(now, &mut translated);
        if translated.is_empty() && !is_void {
            return Ok(TranslatedEvents::default());
        }
        let timestamp =
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let batch = KvEventBatch { timestamp, events: translated, data_parallel_rank: None };
        Ok(TranslatedEvents { is_void, batch: Some(batch), history_known: self.history_known })
    }

    fn translate_event(
        &mut self,
        event: Event,
        now: Instant,
        translated: &mut Vec<KvEvent>,
    ) -> Result<(), FollowError> {
        if matches!(event.data, Data::Created {}) {
            self.window = self.window.max(event.window_size);
        }
        if event.window_size.is_some() && event.window_size < self.window {
            return Ok(());
        }
        match event.data {
            Data::Stored { parent_hash, blocks } => {
                self.stored(parent_hash, blocks, now, translated)?
            }
            Data::Removed { block_hashes } => {
                let block_hashes = block_hashes.into_iter().map(ExternalHash::from);
                let block_hashes: Vec<_> =
                    block_hashes.filter(|hash| !self.chains.removed(hash)).collect();
                if !block_hashes.is_empty() {
                    translated.push(KvEvent::BlockRemoved(BlockRemoved {
                        block_hashes,
                        ..removed_from(medium(0))
                    }));
                }
            }
            Data::Updated { block_hash, cache_level: Some(Change { new_value, old_value }) } => {
                let hash = ExternalHash::from(block_hash);
                if self.chains.moved(&hash, new_value) {
                    return Ok(());
                }
                // The event has only the hash: the index knows the tokens from the other tier.
                let stored = BlockStored {
                    block_hashes: vec![hash.clone()],
                    block_size: self.block_size_u32(),
                    medium: medium(new_value),
                    ..BlockStored::default()
                };
                let removed =
                    BlockRemoved { block_hashes: vec![hash], ..removed_from(medium(old_value)) };
                translated.extend([KvEvent::BlockStored(stored), KvEvent::BlockRemoved(removed)]);
            }
            Data::Created {} | Data::Updated { cache_level: None, .. } | Data::Unknown => {}
        }
        Ok(())
    }

    /// Processes stored blocks up to one that is not full, or belongs to an adapter or a salted
    /// prompt.
    fn stored(
        &mut self,
        parent_hash: Option<Hash>,
        blocks: Vec<Block>,
        now: Instant,
        translated: &mut Vec<KvEvent>,
    ) -> Result<(), FollowError> {
        let mut parent = parent_hash.map(ExternalHash::from);
        for block in blocks {
            let found = block.tokens.len();
            let expected = self.block_size.get();
            if found > expected {
                return Err(FollowError::BlockSize { found, expected });
            }
            let Some(block) = block.parse() else { break };
            let hash = block.hash.clone();
            self.chains.stored(parent.as_ref(), block, now, translated);
            if found < expected {
                break;
            }
            parent = Some(hash);
        }
        Ok(())
    }

    /// Returns `true` if prompts had images but no name of an image was learned.
    pub(super) fn has_unlearned_names(&self) -> bool {
        self.chains.has_unlearned_names()
    }

    /// Returns the number of waiting blocks.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.chains.waiting()
    }

    fn block_size_u32(&self) -> u32 {
        u32::try_from(self.block_size.get()).unwrap_or(u32::MAX)
    }
}

impl Block {
    /// Parses a block. Returns `None` for a malformed block, and for one that belongs to an adapter
    /// or a salted prompt.
    fn parse(self) -> Option<StoredBlock> {
        let has_extra = self.tokens.iter().any(|token| token.token_extra_id != 0);
        if has_extra
            || self.lora_id.is_some()
            || self.cache_salt.is_some()
            || self.mm_keys.len() > self.tokens.len()
        {
            return None;
        }
        let token = |token: &Token| match token.token_id {
            TokenName::Number(number) => u32::try_from(number).ok().map(TokenId),
            TokenName::Text(_) => None,
        };
        let key = |key: &Value| {
            let name = key["hash"].as_str().filter(|name| name.len() <= MAX_NAME_BYTES)?.to_owned();
            Some(ItemKey { name, offset: key["start_offset"].as_u64()? })
        };
        Some(StoredBlock {
            tokens: self.tokens.iter().map(token).collect(),
            keys: self.mm_keys.iter().map(key).collect::<Option<_>>()?,
            hash: self.block_hash.into(),
            level: self.cache_level,
        })
    }
}

/// Returns an event that removes no blocks from a tier.
fn removed_from(medium: Option<String>) -> BlockRemoved {
    BlockRemoved { medium, ..BlockRemoved::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SIZE: BlockSize = BlockSize::new(2).unwrap();

    fn new() -> Translation {
        Translation::new(Arc::new(RecentPrompts::new(SIZE)))
    }

    fn block(hash: u64, tokens: &[u32]) -> Value {
        let token = |id: &u32| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0});
        let tokens: Vec<Value> = tokens.iter().map(token).collect();
        json!({
            "type": "stored_block", "block_hash": hash, "tokens": tokens, "cache_level": 0,
            "priority": 35,
        })
    }

    fn event(id: u64, data: &Value) -> Value {
        json!({"event_id": id, "data": data, "window_size": 4096})
    }

    fn created() -> Value {
        json!({"type": "created", "num_blocks_per_cache_level": [100, 0]})
    }

    fn stored(parent: Option<u64>, blocks: &[Value]) -> Value {
        json!({"type": "stored", "parent_hash": parent, "blocks": blocks})
    }

    fn translate(translation: &mut Translation, events: &[Value]) -> TranslatedEvents {
        let answer = Value::from(events).to_string();
        translation.translate(answer.as_bytes(), Instant::now()).unwrap()
    }

    fn hashes(translated: &TranslatedEvents) -> Vec<ExternalHash> {
        let events = translated.batch.iter().flat_map(|batch| &batch.events);
        let event_hashes = |event: &KvEvent| match event {
            KvEvent::BlockStored(stored) => stored.block_hashes.clone(),
            other => panic!("{other:?}"),
        };
        events.flat_map(event_hashes).collect()
    }

    #[test]
    fn full_text_blocks_are_translated() {
        let mut translation = new();
        let blocks = [block(7, &[1, 2]), block(8, &[3, 4]), block(9, &[5])];
        let translated =
            translate(&mut translation, &[event(0, &created()), event(1, &stored(None, &blocks))]);
        assert!(translated.history_known && !translated.is_void);
        let batch = translated.batch.unwrap();
        let [KvEvent::BlockStored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
        assert_eq!(stored.block_hashes, [ExternalHash::U64(7), ExternalHash::U64(8)]);
        assert_eq!(stored.token_ids, [1, 2, 3, 4].map(TokenId));
        assert_eq!(
            (stored.block_size, &stored.parent_block_hash, stored.medium.as_deref()),
            (2, &None, Some("GPU"))
        );

        let removed = json!({"type": "removed", "block_hashes": [8, "ab12"]});
        let translated = translate(&mut translation, &[event(2, &removed)]);
        let batch = translated.batch.unwrap();
        let [KvEvent::BlockRemoved(removed)] = &batch.events[..] else { panic!("{batch:?}") };
        assert_eq!(
            removed.block_hashes,
            [ExternalHash::U64(8), ExternalHash::Bytes(b"ab12".to_vec())]
        );
    }

    #[test]
    fn blocks_from_the_first_odd_one_on_are_skipped() {
        let mut with_item = block(8, &[3, 4]);
        with_item["mm_keys"] = json!([{"type": "mm_key", "hash": "00ff", "start_offset": 1}]);
        let mut with_extra = block(8, &[3, 4]);
        with_extra["tokens"][1]["token_extra_id"] = json!(5);
        let mut of_adapter = block(8, &[3, 4]);
        of_adapter["lora_id"] = json!(1);
        for odd in [with_item, with_extra, of_adapter] {
            let blocks = [block(7, &[1, 2]), odd, block(9, &[5, 6])];
            let translated = translate(&mut new(), &[event(0, &stored(None, &blocks))]);
            assert_eq!(hashes(&translated), [ExternalHash::U64(7)]);
        }
    }

    #[test]
    fn gap_voids_earlier_events() {
        let mut translation = new();
        let one = |hash| stored(None, &[block(hash, &[1, 2])]);
        assert!(translate(&mut translation, &[event(0, &one(1))]).history_known);
        let translated =
            translate(&mut translation, &[event(1, &one(2)), event(5, &one(3)), event(6, &one(4))]);
        assert!(translated.is_void && !translated.history_known);
        assert_eq!(hashes(&translated), [ExternalHash::U64(3), ExternalHash::U64(4)]);
        assert!(
            !translate(&mut translation, &[event(7, &one(5))]).history_known,
            "lost events stay unknown"
        );
        // Another client has read the first events.
        assert!(!translate(&mut new(), &[event(3, &one(1))]).history_known);
    }

    #[test]
    fn smaller_windows_or_unknown_events_are_ignored() {
        let mut translation = new();
        let mut small = event(1, &stored(None, &[block(7, &[1, 2])]));
        small["window_size"] = json!(512);
        let unknown = event(2, &json!({"type": "of a later version", "x": 1}));
        let priority = event(
            3,
            &json!({"type": "updated", "block_hash": 1, "cache_level": null, "priority": null}),
        );
        let translated =
            translate(&mut translation, &[event(0, &created()), small, unknown, priority]);
        assert_eq!(translated, TranslatedEvents::default());
    }

    #[test]
    fn offloaded_block_changes_its_tier() {
        let change = json!({"type": "event_diff", "new_value": 1, "old_value": 0});
        let moved =
            json!({"type": "updated", "block_hash": 7, "cache_level": change, "priority": null});
        let batch = translate(&mut new(), &[event(0, &moved)]).batch.unwrap();
        let [KvEvent::BlockStored(stored), KvEvent::BlockRemoved(removed)] = &batch.events[..]
        else {
            panic!()
        };
        assert_eq!(
            (stored.medium.as_deref(), removed.medium.as_deref()),
            (Some("CPU"), Some("GPU"))
        );
        assert_eq!(
            (&stored.block_hashes, &removed.block_hashes),
            (&removed.block_hashes, &vec![ExternalHash::U64(7)])
        );
    }

    #[test]
    fn unusable_events_are_refused_with_a_reason() {
        let refused = |events: &[Value]| {
            new().translate(Value::from(events).to_string().as_bytes(), Instant::now())
        };
        let large = event(0, &stored(None, &[block(7, &[1, 2, 3, 4])]));
        assert!(refused(&[large]).unwrap_err().to_string().contains("block-size=N"));
        let mut ranked = event(0, &created());
        ranked["attention_dp_rank"] = json!(1);
        assert!(refused(&[ranked]).unwrap_err().to_string().contains("several engines"));
        for broken in
            [&b"[{}]"[..], b"{}", b"[", b"[{\"event_id\": -1, \"data\": {\"type\": \"created\"}}]"]
        {
            let error = new().translate(broken, Instant::now()).unwrap_err().to_string();
            assert!(error.contains("can't be read"));
        }
    }
}
