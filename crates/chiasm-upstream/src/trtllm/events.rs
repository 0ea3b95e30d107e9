//! KV events as TensorRT-LLM tells them, translated into vLLM's.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_types::{BlockSize, TokenId};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::asked::Asked;
use super::block::{ItemKey, LONGEST_NAME, StoredBlock, medium};
use super::chains::Chains;
use super::untold::Untold;

#[derive(Deserialize)]
struct Event {
    event_id: u64,
    #[serde(default)]
    attention_dp_rank: Option<u64>,
    /// Models with several kinds of attention have a cache for each.
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
    /// Told by later versions, as the salt's text or as a hash of it.
    #[serde(default)]
    cache_salt: Option<IgnoredAny>,
    #[serde(default)]
    cache_level: usize,
    /// The media items in it: `{"type": "mm_key", "hash": …, "start_offset": …}` for each run of an
    /// item's tokens. The hash is one of decoded pixels, the offset the number of the item's tokens
    /// in front of the run's first one (`generateBlockHashExtraKeys` of `blockKey.cpp`).
    #[serde(default)]
    mm_keys: Vec<Value>,
}

#[derive(Deserialize)]
struct Token {
    token_id: TokenName,
    #[serde(default)]
    token_extra_id: u64,
}

/// A token of text is a number. In the place of an item's tokens there are numbers from the
/// vocabulary's size on, those of the marker, and in front of them the item's hash
/// (`decodeEventBlock` of `kv_cache_manager_v2/eventData.cpp`): by models and versions.
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

/// A number, or text of hex digits; either way nothing but a name.
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

/// What an answer tells.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Told {
    /// What was told before is void.
    pub(super) is_void: bool,
    pub(super) batch: Option<KvEventBatch>,
    /// Everything since the cache was empty has been told.
    pub(super) history_known: bool,
}

/// What has to be known of the events so far to understand the next ones.
pub(super) struct Translation {
    block_size: BlockSize,
    /// The number of the next event.
    next: Option<u64>,
    /// The largest window, which is that of full attention.
    window: Option<u64>,
    history_known: bool,
    chains: Chains,
}

impl Translation {
    pub(super) fn new(asked: Arc<Asked>) -> Self {
        let block_size = asked.block_size();
        Self {
            block_size,
            next: None,
            window: None,
            history_known: false,
            chains: Chains::new(asked),
        }
    }

    /// Takes the events of an answer.
    ///
    /// # Errors
    /// Nothing can be known of this server's cache.
    pub(super) fn take(&mut self, answer: &[u8], now: Instant) -> Result<Told, Untold> {
        let events: Vec<Event> = serde_json::from_slice(answer)?;
        let (mut is_void, mut translated) = (false, Vec::new());
        self.chains.begin(now);
        for event in events {
            if event.attention_dp_rank.is_some_and(|rank| rank > 0) {
                return Err(Untold::SeveralEngines);
            }
            match self.next {
                // Events are numbered from the start with an empty cache on.
                None => self.history_known = event.event_id == 0,
                Some(next) if next == event.event_id => {}
                Some(_) => {
                    (is_void, self.history_known) = (true, false);
                    translated.clear();
                    self.chains.forget();
                }
            }
            self.next = event.event_id.checked_add(1);
            self.translate(event, now, &mut translated)?;
        }
        self.chains.settle(now, &mut translated);
        if translated.is_empty() && !is_void {
            return Ok(Told::default());
        }
        let timestamp =
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let batch = KvEventBatch { timestamp, events: translated, data_parallel_rank: None };
        Ok(Told { is_void, batch: Some(batch), history_known: self.history_known })
    }

    fn translate(
        &mut self,
        event: Event,
        now: Instant,
        translated: &mut Vec<KvEvent>,
    ) -> Result<(), Untold> {
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
                    translated
                        .push(KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..in_tier(0).0 }));
                }
            }
            Data::Updated { block_hash, cache_level: Some(Change { new_value, old_value }) } => {
                let hash = ExternalHash::from(block_hash);
                if self.chains.moved(&hash, new_value) {
                    return Ok(());
                }
                let (_, stored) = in_tier(new_value);
                // By its hash alone: where it was before it is known by its tokens.
                let stored = BlockStored {
                    block_hashes: vec![hash.clone()],
                    block_size: self.size(),
                    ..stored
                };
                let (removed, _) = in_tier(old_value);
                let removed = BlockRemoved { block_hashes: vec![hash], ..removed };
                translated.extend([KvEvent::BlockStored(stored), KvEvent::BlockRemoved(removed)]);
            }
            Data::Created {} | Data::Updated { cache_level: None, .. } | Data::Unknown => {}
        }
        Ok(())
    }

    /// The blocks up to one that is not full, or is of an adapter or of a prompt with a salt.
    fn stored(
        &mut self,
        parent_hash: Option<Hash>,
        blocks: Vec<Block>,
        now: Instant,
        translated: &mut Vec<KvEvent>,
    ) -> Result<(), Untold> {
        let mut parent = parent_hash.map(ExternalHash::from);
        for block in blocks {
            let (found, expected) = (block.tokens.len(), self.block_size.get());
            if found > expected {
                return Err(Untold::BlockSize { found, expected });
            }
            let Some(block) = block.read() else { break };
            let hash = block.hash.clone();
            self.chains.stored(parent.as_ref(), block, now, translated);
            if found < expected {
                break;
            }
            parent = Some(hash);
        }
        Ok(())
    }

    /// Whether nothing was learned of images although there were some.
    pub(super) fn is_at_a_loss(&self) -> bool {
        self.chains.is_at_a_loss()
    }

    /// How many blocks wait until more is known.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.chains.waiting()
    }

    fn size(&self) -> u32 {
        u32::try_from(self.block_size.get()).unwrap_or(u32::MAX)
    }
}

impl Block {
    /// The block, if it is one that prompts without adapter and salt can have, and can be read.
    fn read(self) -> Option<StoredBlock> {
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
            let name = key["hash"].as_str().filter(|name| name.len() <= LONGEST_NAME)?.to_owned();
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

/// Events of nothing, about the tier of this level.
fn in_tier(level: usize) -> (BlockRemoved, BlockStored) {
    let medium = medium(level);
    (
        BlockRemoved { medium: medium.clone(), ..BlockRemoved::default() },
        BlockStored { medium, ..BlockStored::default() },
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SIZE: BlockSize = BlockSize::new(2).unwrap();

    fn new() -> Translation {
        Translation::new(Arc::new(Asked::new(SIZE)))
    }

    fn block(hash: u64, tokens: &[u32]) -> Value {
        let token = |id: &u32| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0});
        let tokens: Vec<Value> = tokens.iter().map(token).collect();
        json!({"type": "stored_block", "block_hash": hash, "tokens": tokens, "cache_level": 0, "priority": 35})
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

    fn take(translation: &mut Translation, events: &[Value]) -> Told {
        translation.take(Value::from(events).to_string().as_bytes(), Instant::now()).unwrap()
    }

    fn hashes(told: &Told) -> Vec<ExternalHash> {
        let events = told.batch.iter().flat_map(|batch| &batch.events);
        let of_event = |event: &KvEvent| match event {
            KvEvent::BlockStored(stored) => stored.block_hashes.clone(),
            other => panic!("{other:?}"),
        };
        events.flat_map(of_event).collect()
    }

    #[test]
    fn full_blocks_of_text_are_stored_as_they_are() {
        let mut translation = new();
        let blocks = [block(7, &[1, 2]), block(8, &[3, 4]), block(9, &[5])];
        let told =
            take(&mut translation, &[event(0, &created()), event(1, &stored(None, &blocks))]);
        assert!(told.history_known && !told.is_void);
        let batch = told.batch.unwrap();
        let [KvEvent::BlockStored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
        assert_eq!(stored.block_hashes, [ExternalHash::U64(7), ExternalHash::U64(8)]);
        assert_eq!(stored.token_ids, [1, 2, 3, 4].map(TokenId));
        assert_eq!(
            (stored.block_size, &stored.parent_block_hash, stored.medium.as_deref()),
            (2, &None, Some("GPU"))
        );

        let removed = json!({"type": "removed", "block_hashes": [8, "ab12"]});
        let told = take(&mut translation, &[event(2, &removed)]);
        let batch = told.batch.unwrap();
        let [KvEvent::BlockRemoved(removed)] = &batch.events[..] else { panic!("{batch:?}") };
        assert_eq!(
            removed.block_hashes,
            [ExternalHash::U64(8), ExternalHash::Bytes(b"ab12".to_vec())]
        );
    }

    #[test]
    fn nothing_is_stored_from_the_first_block_on_that_is_not_text_alone() {
        let mut with_item = block(8, &[3, 4]);
        with_item["mm_keys"] = json!([{"type": "mm_key", "hash": "00ff", "start_offset": 1}]);
        let mut with_extra = block(8, &[3, 4]);
        with_extra["tokens"][1]["token_extra_id"] = json!(5);
        let mut of_adapter = block(8, &[3, 4]);
        of_adapter["lora_id"] = json!(1);
        for odd in [with_item, with_extra, of_adapter] {
            let blocks = [block(7, &[1, 2]), odd, block(9, &[5, 6])];
            let told = take(&mut new(), &[event(0, &stored(None, &blocks))]);
            assert_eq!(hashes(&told), [ExternalHash::U64(7)]);
        }
    }

    #[test]
    fn what_was_told_before_a_gap_is_void() {
        let mut translation = new();
        let one = |hash| stored(None, &[block(hash, &[1, 2])]);
        assert!(take(&mut translation, &[event(0, &one(1))]).history_known);
        let told =
            take(&mut translation, &[event(1, &one(2)), event(5, &one(3)), event(6, &one(4))]);
        assert!(told.is_void && !told.history_known);
        assert_eq!(hashes(&told), [ExternalHash::U64(3), ExternalHash::U64(4)]);
        assert!(
            !take(&mut translation, &[event(7, &one(5))]).history_known,
            "what was lost stays unknown"
        );
        // Somebody was told before.
        assert!(!take(&mut new(), &[event(3, &one(1))]).history_known);
    }

    #[test]
    fn smaller_windows_and_what_is_not_known_do_not_count() {
        let mut translation = new();
        let mut small = event(1, &stored(None, &[block(7, &[1, 2])]));
        small["window_size"] = json!(512);
        let unknown = event(2, &json!({"type": "of a later version", "x": 1}));
        let priority = event(
            3,
            &json!({"type": "updated", "block_hash": 1, "cache_level": null, "priority": null}),
        );
        let told = take(&mut translation, &[event(0, &created()), small, unknown, priority]);
        assert_eq!(told, Told::default());
    }

    #[test]
    fn a_block_that_is_offloaded_changes_its_tier() {
        let change = json!({"type": "event_diff", "new_value": 1, "old_value": 0});
        let moved =
            json!({"type": "updated", "block_hash": 7, "cache_level": change, "priority": null});
        let batch = take(&mut new(), &[event(0, &moved)]).batch.unwrap();
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
    fn servers_of_which_nothing_can_be_known_say_why() {
        let refused = |events: &[Value]| {
            new().take(Value::from(events).to_string().as_bytes(), Instant::now())
        };
        let large = event(0, &stored(None, &[block(7, &[1, 2, 3, 4])]));
        assert!(refused(&[large]).unwrap_err().to_string().contains("block-size=N"));
        let mut ranked = event(0, &created());
        ranked["attention_dp_rank"] = json!(1);
        assert!(refused(&[ranked]).unwrap_err().to_string().contains("several engines"));
        for broken in
            [&b"[{}]"[..], b"{}", b"[", b"[{\"event_id\": -1, \"data\": {\"type\": \"created\"}}]"]
        {
            let error = new().take(broken, Instant::now()).unwrap_err().to_string();
            assert!(error.contains("can't be read"));
        }
    }
}
