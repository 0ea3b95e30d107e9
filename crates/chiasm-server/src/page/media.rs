//! How media items travelled, and which come again and again.

use std::collections::BTreeMap;

use chiasm_backend::JobItem;
use chiasm_pipeline::{Pipeline, by_source};
use chiasm_types::{MmHash, Modality};
use serde::Serialize;

/// Items that are counted at once.
const COUNTED: usize = 256;
/// Items that pages are told of.
const TOLD: usize = 20;

/// Counts of the items that come most often, by their identities. Space-Saving (Metwally, Agrawal
/// and El Abbadi, 2005): an item that is not counted takes the place of the one with the lowest
/// count, and goes on from there. So every item that comes more often than one in [`COUNTED`] times
/// is among them, and a count is too high by no more than what the place had before.
#[derive(Default)]
pub(super) struct Repeated {
    counts: Vec<Count>,
}

#[derive(Clone, Debug)]
struct Count {
    hash: MmHash,
    modality: Modality,
    times: u64,
    /// By how much `times` may be too high.
    at_most_over: u64,
}

/// An item that comes again and again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Told {
    hash: String,
    modality: String,
    times: u64,
    at_most_over: u64,
}

impl Repeated {
    /// An item was in a request.
    pub(super) fn saw(&mut self, item: &JobItem) {
        self.count(item.hash, &item.modality);
    }

    fn count(&mut self, hash: MmHash, modality: &Modality) {
        if let Some(count) = self.counts.iter_mut().find(|count| count.hash == hash) {
            count.times += 1;
            return;
        }
        let before = match self.counts.len() {
            COUNTED => self
                .counts
                .iter()
                .enumerate()
                .min_by_key(|(_, count)| count.times)
                .map(|(at, _)| at),
            _ => None,
        };
        let times = before.map_or(0, |at| self.counts.swap_remove(at).times);
        self.counts.push(Count {
            hash,
            modality: modality.clone(),
            times: times + 1,
            at_most_over: times,
        });
    }

    /// Those that certainly came more than once, the most frequent first.
    fn told(&self) -> Vec<Told> {
        let mut repeated: Vec<&Count> =
            self.counts.iter().filter(|count| count.times - count.at_most_over > 1).collect();
        repeated.sort_unstable_by_key(|count| std::cmp::Reverse(count.times));
        let told = |count: &&Count| Told {
            hash: count.hash.to_string(),
            modality: count.modality.to_string(),
            times: count.times,
            at_most_over: count.at_most_over,
        };
        repeated.iter().take(TOLD).map(told).collect()
    }
}

/// Media items since the start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Media {
    /// Items handed to engines, by how they travelled.
    ways: BTreeMap<&'static str, u64>,
    /// Items asked for, by where they were found.
    opened: BTreeMap<&'static str, u64>,
    decoded: u64,
    reused: u64,
    /// Bytes of encoded items that are kept.
    cached_bytes: u64,
    /// Bytes of processed items that are kept for engines without shared memory.
    processed_bytes: u64,
    repeated: Vec<Told>,
}

impl Media {
    /// How it is now.
    pub(super) fn now(pipeline: &Pipeline, repeated: &Repeated) -> Self {
        let counts = pipeline.media.counts();
        Self {
            ways: pipeline.fleet.metrics().transfers(),
            opened: BTreeMap::from(by_source(&counts)),
            decoded: pipeline.metrics.media_decoded.get(),
            reused: pipeline.metrics.media_reused.get(),
            cached_bytes: counts.cached_bytes,
            processed_bytes: pipeline.images.kept_bytes(),
            repeated: repeated.told(),
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
    fn what_comes_often_is_found_among_many_that_come_once() {
        let mut repeated = Repeated::default();
        for number in 0..5000 {
            repeated.count(hash(10 + number), &Modality::Image);
            if number % 10 == 0 {
                repeated.count(hash(1), &Modality::Image);
            }
            if number % 50 == 0 {
                repeated.count(hash(2), &Modality::Video);
            }
        }
        let told = repeated.told();
        assert_eq!(repeated.counts.len(), COUNTED);
        assert_eq!(
            (told[0].hash.clone(), told[1].hash.clone()),
            (hash(1).to_string(), hash(2).to_string())
        );
        let right = |told: &Told, times: u64| {
            told.times >= times && told.times - told.at_most_over <= times
        };
        assert!(right(&told[0], 500) && right(&told[1], 100), "{told:?}");
    }

    #[test]
    fn what_came_once_is_not_told() {
        let mut repeated = Repeated::default();
        (0..COUNTED as u32 + 9).for_each(|number| repeated.count(hash(number), &Modality::Image));
        assert_eq!(repeated.told(), []);
    }
}
