//! Transfers of media items, and the most frequent items.

use std::collections::BTreeMap;

use chiasm_pipeline::{Pipeline, by_source};
use chiasm_types::{MmHash, Modality};
use serde::Serialize;

/// The maximum number of items that are counted at once.
const MAX_COUNTED_ITEMS: usize = 256;
/// The maximum number of items that pages show.
const MAX_SHOWN_ITEMS: usize = 20;

/// Counts of the most frequent items, by identity, with the Space-Saving algorithm (Metwally,
/// Agrawal and El Abbadi, 2005).
///
/// An item that is not counted yet replaces the one with the lowest count and continues from that
/// count. So an item is counted if it makes up more than one in [`MAX_COUNTED_ITEMS`] of all items,
/// and a count is too high by at most the count that it replaced.
#[derive(Default)]
pub(super) struct FrequentItems {
    counts: Vec<Count>,
}

#[derive(Clone, Debug)]
struct Count {
    hash: MmHash,
    modality: Modality,
    times: u64,
    /// The amount by which `times` may be too high.
    at_most_over: u64,
}

/// A frequent item, as pages show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct FrequentItem {
    hash: String,
    modality: String,
    times: u64,
    at_most_over: u64,
}

impl FrequentItems {
    /// Counts an item of a request.
    pub(super) fn count(&mut self, hash: MmHash, modality: &Modality) {
        if let Some(count) = self.counts.iter_mut().find(|count| count.hash == hash) {
            count.times += 1;
            return;
        }
        let replaced = if self.counts.len() == MAX_COUNTED_ITEMS {
            let counts = self.counts.iter().enumerate();
            counts.min_by_key(|(_, count)| count.times).map(|(index, _)| index)
        } else {
            None
        };
        let times = replaced.map_or(0, |index| self.counts.swap_remove(index).times);
        self.counts.push(Count {
            hash,
            modality: modality.clone(),
            times: times + 1,
            at_most_over: times,
        });
    }

    /// Returns the items that were certainly requested more than once, the most frequent first.
    fn top(&self) -> Vec<FrequentItem> {
        let mut repeated: Vec<&Count> =
            self.counts.iter().filter(|count| count.times - count.at_most_over > 1).collect();
        repeated.sort_unstable_by_key(|count| std::cmp::Reverse(count.times));
        let item = |count: &&Count| FrequentItem {
            hash: count.hash.to_string(),
            modality: count.modality.to_string(),
            times: count.times,
            at_most_over: count.at_most_over,
        };
        repeated.iter().take(MAX_SHOWN_ITEMS).map(item).collect()
    }
}

/// Counts of media items since the start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Media {
    /// Items handed to engines, by transfer.
    ways: BTreeMap<&'static str, u64>,
    /// Items requested, by source.
    opened: BTreeMap<&'static str, u64>,
    decoded: u64,
    reused: u64,
    /// Bytes of cached encoded items.
    cached_bytes: u64,
    /// Bytes of processed items kept for engines without shared memory.
    processed_bytes: u64,
    repeated: Vec<FrequentItem>,
}

impl Media {
    /// Reads the current counts.
    pub(super) fn new(pipeline: &Pipeline, frequent: &FrequentItems) -> Self {
        let counts = pipeline.media.counts();
        Self {
            ways: pipeline.fleet.metrics().transfers(),
            opened: BTreeMap::from(by_source(&counts)),
            decoded: pipeline.metrics.media_decoded.get(),
            reused: pipeline.metrics.media_reused.get(),
            cached_bytes: counts.cached_bytes,
            processed_bytes: pipeline.images.kept_bytes(),
            repeated: frequent.top(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u32) -> MmHash {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        MmHash::new(bytes)
    }

    #[test]
    fn frequent_items_are_found_among_many_rare_ones() {
        let mut frequent = FrequentItems::default();
        for number in 0..5000 {
            frequent.count(hash(10 + number), &Modality::Image);
            if number % 10 == 0 {
                frequent.count(hash(1), &Modality::Image);
            }
            if number % 50 == 0 {
                frequent.count(hash(2), &Modality::Video);
            }
        }
        let top = frequent.top();
        assert_eq!(frequent.counts.len(), MAX_COUNTED_ITEMS);
        assert_eq!(
            (top[0].hash.clone(), top[1].hash.clone()),
            (hash(1).to_string(), hash(2).to_string())
        );
        let is_right = |item: &FrequentItem, times: u64| {
            item.times >= times && item.times - item.at_most_over <= times
        };
        assert!(is_right(&top[0], 500) && is_right(&top[1], 100), "{top:?}");
    }

    #[test]
    fn items_seen_once_are_not_shown() {
        let mut frequent = FrequentItems::default();
        for number in 0..MAX_COUNTED_ITEMS as u32 + 9 {
            frequent.count(hash(number), &Modality::Image);
        }
        assert_eq!(frequent.top(), []);
    }
}
