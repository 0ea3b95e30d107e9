//! What an engine's receiver cache holds, known here without asking.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::wire::{MmData, MmFeature, MmItem};

/// Bytes that vLLM counts for a plain integer: `sys.getsizeof` of a small one.
const INT_BYTES: u64 = 28;
/// Bytes that vLLM counts for a plain float.
const FLOAT_BYTES: u64 = 24;

/// A mirror of one engine's receiver cache, kept exact by running the engine's own algorithm over
/// the same requests in the same order (`LruKeyReplicatedReceiverCache` in
/// `vllm/multimodal/cache`).
///
/// Items that it holds are sent without data. The order of all touches matters, so a request must
/// be [applied](Self::apply) and sent under one lock.
#[derive(Debug)]
pub struct ReceiverMirror {
    capacity: u64,
    used: u64,
    entries: HashMap<String, Entry>,
    /// Keys by their last touch, oldest first.
    order: BTreeMap<u64, String>,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    touched: u64,
}

impl ReceiverMirror {
    /// The mirror of an engine that has just started, whose receiver cache of `capacity` bytes is
    /// empty.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, used: 0, entries: HashMap::new(), order: BTreeMap::new(), clock: 0 }
    }

    /// Whether the engine holds this item now.
    pub fn holds(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// Keys of the items that would have to come with data and do not. Empty when the request can
    /// be applied.
    ///
    /// A request whose items together exceed the capacity could evict one of its own while it is
    /// read, so all of them need data.
    pub fn missing(&self, features: &[MmFeature]) -> Vec<String> {
        let mut seen = HashSet::new();
        let bytes: u64 = features
            .iter()
            .filter(|feature| seen.insert(feature.cache_key()))
            .map(|feature| match &feature.data {
                Some(item) => size(item),
                None => self.entries.get(feature.cache_key()).map_or(0, |entry| entry.bytes),
            })
            .sum();
        let all_fit = bytes <= self.capacity;
        // A key that comes with data once is there for the places after it.
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

    /// Follows the engine through a request that is about to be sent, and takes the data off the
    /// items that the engine holds. [`missing`](Self::missing) must be empty. Returns the keys of
    /// the items that the engine will evict.
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
                let bytes = size(item);
                self.insert_if_fits(key, bytes, &mut evicted);
            }
        }
        evicted
    }

    /// Drops an item that the engine turned out not to hold.
    pub fn forget(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.touched);
            self.used -= entry.bytes;
        }
    }

    fn touch(&mut self, key: &str) {
        if let Some(entry) = self.entries.get_mut(key) {
            self.clock += 1;
            if let Some(key) = self.order.remove(&entry.touched) {
                self.order.insert(self.clock, key);
            }
            entry.touched = self.clock;
        }
    }

    fn insert_if_fits(&mut self, key: String, bytes: u64, evicted: &mut Vec<String>) {
        if bytes > self.capacity {
            return;
        }
        while self.used + bytes > self.capacity {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            if let Some(entry) = self.entries.remove(&oldest) {
                self.used -= entry.bytes;
            }
            evicted.push(oldest);
        }
        self.clock += 1;
        self.used += bytes;
        self.order.insert(self.clock, key.clone());
        self.entries.insert(key, Entry { bytes, touched: self.clock });
    }
}

/// Bytes that vLLM counts for an item (`MultiModalCache.get_item_size`).
fn size(item: &MmItem) -> u64 {
    fn of(data: &MmData) -> u64 {
        match data {
            MmData::Tensor(tensor) => tensor.nbytes().unwrap_or(0) as u64,
            MmData::Int(_) => INT_BYTES,
            MmData::Float(_) => FLOAT_BYTES,
            MmData::List(list) => list.iter().map(of).sum(),
        }
    }
    item.0.iter().filter_map(|(_, field)| field.data.as_ref()).map(of).sum()
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

    /// Applies a request, and says of each feature whether it still has data, so whether it is
    /// sent.
    fn sent(mirror: &mut ReceiverMirror, mut features: Vec<MmFeature>) -> Vec<bool> {
        assert_eq!(mirror.missing(&features), Vec::<String>::new());
        mirror.apply(&mut features);
        features.iter().map(|feature| feature.data.is_some()).collect()
    }

    #[test]
    fn an_item_is_sent_once_and_again_after_its_eviction() {
        let mut mirror = ReceiverMirror::new(100);
        assert_eq!(sent(&mut mirror, vec![feature("a", Some(60))]), [true]);
        assert_eq!(sent(&mut mirror, vec![feature("a", Some(60))]), [false]);
        assert_eq!(sent(&mut mirror, vec![feature("b", Some(60))]), [true]);
        assert!(!mirror.holds("a"));
        assert_eq!(mirror.missing(&[feature("a", None)]), ["a"]);
    }

    #[test]
    fn an_item_that_stands_twice_in_a_request_is_sent_once() {
        let mut mirror = ReceiverMirror::new(100);
        assert_eq!(
            sent(&mut mirror, vec![feature("a", Some(60)), feature("a", Some(60))]),
            [true, false]
        );
        assert_eq!(sent(&mut mirror, vec![feature("a", None), feature("a", None)]), [false, false]);
    }

    #[test]
    fn a_request_that_exceeds_the_cache_needs_all_its_data() {
        let mut mirror = ReceiverMirror::new(100);
        sent(&mut mirror, vec![feature("a", Some(60))]);
        assert_eq!(mirror.missing(&[feature("a", None), feature("b", Some(60))]), ["a"]);
    }

    #[test]
    fn an_item_larger_than_the_cache_is_sent_every_time() {
        let mut mirror = ReceiverMirror::new(100);
        for _ in 0..2 {
            assert_eq!(sent(&mut mirror, vec![feature("a", Some(101))]), [true]);
        }
    }

    #[test]
    fn what_the_engine_misses_is_forgotten() {
        let mut mirror = ReceiverMirror::new(100);
        sent(&mut mirror, vec![feature("a", Some(60)), feature("b", Some(40))]);
        mirror.forget("a");
        assert_eq!(mirror.missing(&[feature("a", None), feature("b", None)]), ["a"]);
        assert_eq!(sent(&mut mirror, vec![feature("a", Some(60))]), [true]);
        assert!(mirror.holds("b"));
    }
}
