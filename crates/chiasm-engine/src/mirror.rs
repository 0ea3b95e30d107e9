//! A mirror of an engine's receiver cache.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::wire::{MmData, MmFeature, MmItem};

/// The size that vLLM counts for a plain integer: `sys.getsizeof` of a small one.
const INT_BYTES: u64 = 28;
/// The size that vLLM counts for a plain float.
const FLOAT_BYTES: u64 = 24;

/// A mirror of one engine's receiver cache. It stays exact because it runs the engine's algorithm
/// on the same requests in the same order (`LruKeyReplicatedReceiverCache` in
/// `vllm/multimodal/cache`).
///
/// Items in the cache are sent without data. The order of requests matters, so each request must
/// be [applied](Self::apply) and sent under one lock.
#[derive(Debug)]
pub struct ReceiverMirror {
    capacity_bytes: u64,
    used_bytes: u64,
    entries: HashMap<String, Entry>,
    /// The keys by the time of their last use, oldest first.
    order: BTreeMap<u64, String>,
    /// A logical clock that counts uses.
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    used_at: u64,
}

impl ReceiverMirror {
    /// Creates the mirror of an engine that has just started, with an empty receiver cache of
    /// `capacity_bytes`.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            used_bytes: 0,
            entries: HashMap::new(),
            order: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Returns `true` if the engine holds this item now.
    pub fn holds(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// Returns the keys of the items that need data and have none. The request can be applied if
    /// there are none.
    ///
    /// A request whose items together exceed the capacity could evict its own items while the
    /// engine reads it, so all of them need data.
    pub fn missing(&self, features: &[MmFeature]) -> Vec<String> {
        let mut seen = HashSet::new();
        let bytes: u64 = features
            .iter()
            .filter(|feature| seen.insert(feature.cache_key()))
            .map(|feature| match &feature.data {
                Some(item) => item_size(item),
                None => self.entries.get(feature.cache_key()).map_or(0, |entry| entry.bytes),
            })
            .sum();
        let all_fit = bytes <= self.capacity_bytes;
        // An item that has data once is in the cache for its later occurrences.
        let mut sent = HashSet::new();
        let mut missing = Vec::new();
        for feature in features {
            let key = feature.cache_key();
            if feature.data.is_some() {
                sent.insert(key);
            } else if !all_fit || !(self.holds(key) || sent.contains(key)) {
                missing.push(key.to_owned());
            }
        }
        missing
    }

    /// Applies a request that is about to be sent, and removes the data of the items that the
    /// engine holds. Returns the keys of the items that the engine will evict.
    ///
    /// [`missing`](Self::missing) must be empty.
    pub fn apply(&mut self, features: &mut [MmFeature]) -> Vec<String> {
        let mut evicted = Vec::new();
        for feature in features.iter() {
            self.touch(feature.cache_key());
        }
        for feature in features {
            let key = feature.cache_key().to_owned();
            if self.holds(&key) {
                feature.data = None;
                self.touch(&key);
            } else if let Some(item) = &feature.data {
                let bytes = item_size(item);
                self.insert_if_fits(key, bytes, &mut evicted);
            }
        }
        evicted
    }

    /// Removes an item that the engine reported as missing.
    pub fn forget(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.used_at);
            self.used_bytes -= entry.bytes;
        }
    }

    fn touch(&mut self, key: &str) {
        if let Some(entry) = self.entries.get_mut(key) {
            self.clock += 1;
            if let Some(key) = self.order.remove(&entry.used_at) {
                self.order.insert(self.clock, key);
            }
            entry.used_at = self.clock;
        }
    }

    fn insert_if_fits(&mut self, key: String, bytes: u64, evicted: &mut Vec<String>) {
        if bytes > self.capacity_bytes {
            return;
        }
        while self.used_bytes + bytes > self.capacity_bytes {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            if let Some(entry) = self.entries.remove(&oldest) {
                self.used_bytes -= entry.bytes;
            }
            evicted.push(oldest);
        }
        self.clock += 1;
        self.used_bytes += bytes;
        self.order.insert(self.clock, key.clone());
        self.entries.insert(key, Entry { bytes, used_at: self.clock });
    }
}

/// Returns the size in bytes that vLLM counts for an item (`MultiModalCache.get_item_size`).
fn item_size(item: &MmItem) -> u64 {
    item.0.iter().filter_map(|(_, field)| field.data.as_ref()).map(data_size).sum()
}

fn data_size(data: &MmData) -> u64 {
    match data {
        MmData::Tensor(tensor) => tensor.nbytes().unwrap_or(0) as u64,
        MmData::Int(_) => INT_BYTES,
        MmData::Float(_) => FLOAT_BYTES,
        MmData::List(list) => list.iter().map(data_size).sum(),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use chiasm_types::{Dtype, Placeholder};

    use super::*;
    use crate::wire::{MmField, WireTensor};

    fn feature(key: &str, bytes: Option<usize>) -> MmFeature {
        let item = |bytes| {
            let tensor =
                WireTensor::new(Dtype::U8, vec![bytes], Bytes::from(vec![0; bytes])).unwrap();
            MmItem(vec![("pixel_values".to_owned(), MmField::flat(tensor, bytes))])
        };
        MmFeature {
            data: bytes.map(item),
            modality: "image".to_owned(),
            identifier: key.to_owned(),
            position: Placeholder { offset: 0, length: 1, is_embed: None },
            mm_hash: None,
        }
    }

    /// Applies a request. Returns for each feature whether its data is sent.
    fn sent(mirror: &mut ReceiverMirror, mut features: Vec<MmFeature>) -> Vec<bool> {
        assert_eq!(mirror.missing(&features), Vec::<String>::new());
        mirror.apply(&mut features);
        features.iter().map(|feature| feature.data.is_some()).collect()
    }

    #[test]
    fn evicted_item_is_sent_again() {
        let mut mirror = ReceiverMirror::new(100);
        assert_eq!(sent(&mut mirror, vec![feature("a", Some(60))]), [true]);
        assert_eq!(sent(&mut mirror, vec![feature("a", Some(60))]), [false]);
        assert_eq!(sent(&mut mirror, vec![feature("b", Some(60))]), [true]);
        assert!(!mirror.holds("a"));
        assert_eq!(mirror.missing(&[feature("a", None)]), ["a"]);
    }

    #[test]
    fn repeated_item_is_sent_once() {
        let mut mirror = ReceiverMirror::new(100);
        assert_eq!(
            sent(&mut mirror, vec![feature("a", Some(60)), feature("a", Some(60))]),
            [true, false]
        );
        assert_eq!(sent(&mut mirror, vec![feature("a", None), feature("a", None)]), [false, false]);
    }

    #[test]
    fn request_larger_than_cache_needs_all_data() {
        let mut mirror = ReceiverMirror::new(100);
        sent(&mut mirror, vec![feature("a", Some(60))]);
        assert_eq!(mirror.missing(&[feature("a", None), feature("b", Some(60))]), ["a"]);
    }

    #[test]
    fn item_larger_than_cache_is_always_sent() {
        let mut mirror = ReceiverMirror::new(100);
        for _ in 0..2 {
            assert_eq!(sent(&mut mirror, vec![feature("a", Some(101))]), [true]);
        }
    }

    #[test]
    fn forgotten_item_is_missing() {
        let mut mirror = ReceiverMirror::new(100);
        sent(&mut mirror, vec![feature("a", Some(60)), feature("b", Some(40))]);
        mirror.forget("a");
        assert_eq!(mirror.missing(&[feature("a", None), feature("b", None)]), ["a"]);
        assert_eq!(sent(&mut mirror, vec![feature("a", Some(60))]), [true]);
        assert!(mirror.holds("b"));
    }
}
