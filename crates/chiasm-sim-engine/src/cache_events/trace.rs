//! Replays what vLLM's own KVCacheManager did: see `tests/goldens/make_kv_cache_trace.py`.

use super::cache_with_events::CacheWithEvents;
use super::*;
use std::collections::HashMap;

use crate::block_chain::MediaRange;
use chiasm_engine_model::BlockTable;
use chiasm_kv::event::ExtraKey;
use serde_json::{Value, json};

const TRACE: &str = include_str!("../../tests/goldens/kv_cache_trace.json");

struct Live {
    tokens: Vec<TokenId>,
    chain: BlockChain,
    table: BlockTable,
    computed: usize,
}

fn tokens(value: &Value) -> Vec<TokenId> {
    let number = |token: &Value| TokenId(token.as_u64().unwrap() as u32);
    value.as_array().unwrap().iter().map(number).collect()
}

fn media(value: &Value) -> Vec<MediaRange> {
    let range = |item: &Value| MediaRange {
        identifier: item[0].as_str().unwrap().to_owned(),
        offset: item[1].as_u64().unwrap() as usize,
        length: item[2].as_u64().unwrap() as usize,
    };
    value.as_array().unwrap().iter().map(range).collect()
}

/// Hashes, numbered in the order of their first use.
#[derive(Default)]
struct HashNumbers(HashMap<ExternalHash, usize>);

impl HashNumbers {
    fn number(&mut self, hash: &ExternalHash) -> usize {
        let next = self.0.len();
        *self.0.entry(hash.clone()).or_insert(next)
    }

    fn numbers(&mut self, hashes: &[ExternalHash]) -> Vec<usize> {
        hashes.iter().map(|hash| self.number(hash)).collect()
    }

    fn event(&mut self, event: &KvEvent) -> Value {
        match event {
            KvEvent::BlockStored(stored) => {
                // The order matters: vLLM's script numbers the blocks first.
                let blocks = self.numbers(&stored.block_hashes);
                let parent = stored.parent_block_hash.as_ref().map(|hash| self.number(hash));
                let tokens: Vec<u32> = stored.token_ids.iter().map(|token| token.0).collect();
                let keys = stored.extra_keys.as_ref().unwrap().iter();
                let keys: Vec<_> = keys.map(|keys| keys.as_deref().map(extra_keys)).collect();
                json!({ "stored": blocks, "parent": parent, "tokens": tokens, "extra_keys": keys })
            }
            KvEvent::BlockRemoved(removed) => {
                json!({ "removed": self.numbers(&removed.block_hashes) })
            }
            KvEvent::AllBlocksCleared => json!({ "cleared": true }),
            other => panic!("{other:?}"),
        }
    }
}

fn extra_keys(keys: &[ExtraKey]) -> Value {
    let key = |key: &ExtraKey| match key {
        ExtraKey::Media { identifier, offset } => json!([identifier, offset]),
        ExtraKey::Text(text) => json!(text),
        ExtraKey::Other(_) => panic!("{key:?}"),
    };
    keys.iter().map(key).collect()
}

#[test]
fn cache_replays_vllms_trace() {
    let trace: Value = serde_json::from_str(TRACE).unwrap();
    let size = |name: &str| trace[name].as_u64().unwrap();
    let block_size = size("block_size") as usize;
    let mut cache = CacheWithEvents::new(size("num_blocks") as u32, block_size);
    let mut live: HashMap<String, Live> = HashMap::new();
    let mut hash_numbers = HashNumbers::default();

    for (at, operation) in trace["operations"].as_array().unwrap().iter().enumerate() {
        let id = operation["id"].as_str().unwrap_or_default().to_owned();
        let result = match operation["op"].as_str().unwrap() {
            "start" => {
                let salt = operation["salt"].as_str().map(str::to_owned);
                let mut request = Live {
                    tokens: tokens(&operation["tokens"]),
                    chain: BlockChain::new(block_size, media(&operation["media"]), None, salt),
                    table: BlockTable::default(),
                    computed: 0,
                };
                request.chain.extend(&request.tokens);
                let hits = cache.find(request.chain.hashes(), request.tokens.len() - 1);
                let cached = hits.len() * block_size;
                request.computed = cached + operation["new"].as_u64().unwrap() as usize;
                let fits = cache.fits(&request.table, &hits, request.tokens.len())
                    && cache.grow(&mut request.table, &hits, request.computed);
                if fits {
                    let Live { tokens, chain, table, computed } = &mut request;
                    cache.store(table, chain, tokens, *computed);
                    live.insert(id, request);
                }
                fits.then_some(cached).into()
            }
            "grow" => {
                let request = live.get_mut(&id).unwrap();
                request.tokens.extend(tokens(&operation["tokens"]));
                request.chain.extend(&request.tokens);
                let end = request.tokens.len();
                let fits = cache.grow(&mut request.table, &[], end);
                if fits {
                    cache.store(&mut request.table, &request.chain, &request.tokens, end);
                }
                fits.into()
            }
            "finish" => {
                cache.release(&mut live.remove(&id).unwrap().table);
                Value::Null
            }
            "reset" => cache.reset().into(),
            other => panic!("{other}"),
        };
        let events: Vec<Value> =
            cache.take_events().iter().map(|event| hash_numbers.event(event)).collect();
        assert_eq!(result, operation["result"], "result of operation {at}: {operation}");
        assert_eq!(
            Value::from(events),
            operation["events"],
            "events of operation {at}: {operation}"
        );
        assert_eq!(
            cache.usage(),
            operation["usage"].as_f64().unwrap(),
            "usage after operation {at}"
        );
    }
}
