//! The engine's own cache of media items' tensors, which lets a frontend send an item once.

use chiasm_engine_model::WeightedLru;

/// A least-recently-used cache by bytes, updated request by request.
///
/// This is vLLM's `LruKeyReplicatedReceiverCache`. A frontend mirrors its contents by running the
/// same algorithm over the same requests, so the order of every touch matters.
#[derive(Debug)]
pub(crate) struct ReceiverCache<T>(WeightedLru<String, T>);

/// One item of a request: its key, and the data that the frontend sent.
#[derive(Clone, Debug)]
pub(crate) struct Incoming<T> {
    pub(crate) key: String,
    /// The item and its size in bytes; `None` if the frontend expects the item in the cache.
    pub(crate) data: Option<(T, u64)>,
}

impl<T: Clone> ReceiverCache<T> {
    /// Creates an empty cache for `capacity` bytes.
    pub(crate) fn new(capacity: u64) -> Self {
        Self(WeightedLru::new(capacity))
    }

    /// Processes one request's items in prompt order and returns the item for each.
    ///
    /// # Errors
    ///
    /// Returns the keys without data that were not cached, in prompt order. Items with data are
    /// cached nevertheless.
    pub(crate) fn update(&mut self, items: Vec<Incoming<T>>) -> Result<Vec<T>, Vec<String>> {
        for item in &items {
            self.0.get(&item.key);
        }
        let mut values = Vec::with_capacity(items.len());
        let mut missing = Vec::new();
        for Incoming { key, data } in items {
            match data {
                Some((value, bytes)) => {
                    self.0.insert(key, bytes, value.clone());
                    values.push(value);
                }
                None => match self.0.get(&key) {
                    Some(value) => values.push(value.clone()),
                    None => missing.push(key),
                },
            }
        }
        if missing.is_empty() { Ok(values) } else { Err(missing) }
    }

    /// Returns the cached items, in no order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, _, value)| value)
    }

    /// Removes all items.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns keys and sizes, least recently used first.
    #[cfg(test)]
    fn contents(&self) -> Vec<(String, u64)> {
        let mut contents: Vec<_> =
            self.0.iter().map(|(key, bytes, _)| (key.clone(), bytes)).collect();
        contents.reverse();
        contents
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chiasm_engine::ReceiverMirror;
    use chiasm_engine::wire::{MmFeature, MmField, MmItem, WireTensor};
    use chiasm_types::{Dtype, Placeholder};
    use proptest::prelude::*;

    fn sent(key: &str, bytes: u64) -> Incoming<String> {
        Incoming { key: key.into(), data: Some((key.to_uppercase(), bytes)) }
    }

    fn expected(key: &str) -> Incoming<String> {
        Incoming { key: key.into(), data: None }
    }

    fn keys(cache: &ReceiverCache<String>) -> Vec<String> {
        cache.contents().into_iter().map(|(key, _)| key).collect()
    }

    #[test]
    fn hit_becomes_the_most_recent() {
        let mut cache = ReceiverCache::new(30);
        cache.update(vec![sent("a", 10), sent("b", 10)]).unwrap();
        assert_eq!(cache.update(vec![expected("a")]), Ok(vec!["A".to_owned()]));
        cache.update(vec![sent("c", 20)]).unwrap();
        assert_eq!(keys(&cache), ["a", "c"]);
    }

    #[test]
    fn used_items_are_touched_before_insertions() {
        let mut cache = ReceiverCache::new(30);
        cache.update(vec![sent("old", 10), sent("other", 10), sent("third", 10)]).unwrap();
        // Without the first pass, "new" would evict "old" before it is looked up.
        assert_eq!(
            cache.update(vec![sent("new", 10), expected("old")]),
            Ok(vec!["NEW".to_owned(), "OLD".to_owned()])
        );
        assert_eq!(keys(&cache), ["third", "new", "old"]);
    }

    #[test]
    fn misses_are_named_while_other_items_are_kept() {
        let mut cache = ReceiverCache::new(30);
        let misses = cache.update(vec![expected("x"), sent("a", 10), expected("y")]);
        assert_eq!(misses, Err(vec!["x".to_owned(), "y".to_owned()]));
        assert_eq!(keys(&cache), ["a"]);
    }

    #[test]
    fn too_large_item_only_evicts_its_predecessor() {
        let mut cache = ReceiverCache::new(30);
        cache.update(vec![sent("a", 10), sent("b", 10)]).unwrap();
        assert_eq!(cache.update(vec![sent("a", 31)]), Ok(vec!["A".to_owned()]));
        assert_eq!(keys(&cache), ["b"]);
    }

    /// The same algorithm on a list.
    struct Naive {
        capacity: u64,
        /// The items, the oldest first.
        items: Vec<(String, u64)>,
    }

    impl Naive {
        fn position(&self, key: &str) -> Option<usize> {
            self.items.iter().position(|(at, _)| at == key)
        }

        fn touch(&mut self, key: &str) {
            if let Some(at) = self.position(key) {
                let item = self.items.remove(at);
                self.items.push(item);
            }
        }

        fn update(&mut self, items: &[Incoming<String>]) -> Vec<String> {
            items.iter().for_each(|item| self.touch(&item.key));
            let mut missing = Vec::new();
            for item in items {
                match &item.data {
                    Some((_, bytes)) => {
                        if let Some(at) = self.position(&item.key) {
                            self.items.remove(at);
                        }
                        if *bytes <= self.capacity {
                            while self.items.iter().map(|(_, bytes)| bytes).sum::<u64>() + bytes
                                > self.capacity
                            {
                                self.items.remove(0);
                            }
                            self.items.push((item.key.clone(), *bytes));
                        }
                    }
                    None if self.position(&item.key).is_some() => self.touch(&item.key),
                    None => missing.push(item.key.clone()),
                }
            }
            missing
        }
    }

    proptest! {
        #[test]
        fn cache_agrees_with_the_naive_model(
            requests in prop::collection::vec(
                prop::collection::vec((0usize..8, prop::option::of(0u64..40)), 0..5),
                0..60,
            ),
        ) {
            let mut cache = ReceiverCache::new(100);
            let mut naive = Naive { capacity: 100, items: Vec::new() };
            for request in requests {
                let items: Vec<_> = request
                    .into_iter()
                    .map(|(key, bytes)| Incoming {
                        key: format!("k{key}"),
                        data: bytes.map(|bytes| (format!("k{key}"), bytes)),
                    })
                    .collect();
                let missing = naive.update(&items);
                match cache.update(items.clone()) {
                    Ok(values) => {
                        prop_assert!(missing.is_empty());
                        let expected: Vec<String> =
                            items.into_iter().map(|item| item.key).collect();
                        prop_assert_eq!(values, expected);
                    }
                    Err(misses) => prop_assert_eq!(misses, missing),
                }
                prop_assert_eq!(cache.contents(), naive.items.clone());
            }
        }
    }

    /// Returns an image of `bytes` bytes with its own key.
    fn feature(key: u8, bytes: usize, with_data: bool) -> MmFeature {
        let tensor = WireTensor::new(Dtype::U8, vec![bytes], vec![0; bytes].into()).unwrap();
        let name = format!("{key:064x}");
        MmFeature {
            data: with_data
                .then(|| MmItem(vec![("pixel_values".to_owned(), MmField::flat(tensor, bytes))])),
            modality: "image".to_owned(),
            identifier: name.clone(),
            position: Placeholder { offset: 0, length: 1, is_embed: None },
            mm_hash: Some(name),
        }
    }

    proptest! {
        /// A frontend with a mirror never misses, sends no item that the engine holds, and stays in
        /// sync.
        #[test]
        fn frontend_mirror_knows_the_cached_items(
            requests in prop::collection::vec(
                prop::collection::vec((0_u8..8, any::<bool>()), 1..5),
                1..60,
            ),
        ) {
            let mut mirror = ReceiverMirror::new(100);
            let mut cache = ReceiverCache::new(100);
            for items in requests {
                // Sizes differ by key, and one size exceeds the cache of 100 bytes.
                let size = |key: u8| 10 + 15 * usize::from(key);
                // A frontend makes data for items that the mirror lacks, and sometimes for more.
                let mut features: Vec<MmFeature> = items
                    .iter()
                    .map(|&(key, eager)| {
                        let has_data = eager || !mirror.holds(&format!("{key:064x}"));
                        feature(key, size(key), has_data)
                    })
                    .collect();
                let needed = mirror.missing(&features);
                for (feature, (key, _)) in features.iter_mut().zip(&items) {
                    if needed.iter().any(|name| name == feature.cache_key()) {
                        *feature = self::feature(*key, size(*key), true);
                    }
                }
                prop_assert_eq!(mirror.missing(&features), Vec::<String>::new());
                mirror.apply(&mut features);
                let incoming = features
                    .iter()
                    .zip(&items)
                    .map(|(feature, (key, _))| Incoming {
                        key: feature.cache_key().to_owned(),
                        data: feature.data.as_ref().map(|_| (*key, size(*key) as u64)),
                    })
                    .collect();
                let expected: Vec<u8> = items.iter().map(|&(key, _)| key).collect();
                prop_assert_eq!(cache.update(incoming), Ok(expected));
                for key in 0..8 {
                    let name = format!("{key:064x}");
                    let held = cache.contents().iter().any(|(cached, _)| *cached == name);
                    prop_assert_eq!(mirror.holds(&name), held);
                }
            }
        }
    }
}
