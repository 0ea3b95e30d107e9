//! The blocks that a worker reports, converted to events for the index.

use std::collections::HashSet;

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

use crate::kv_event::{Change, Event, WorkerEvent};

/// The tier that the engine computes with; other tiers are ignored.
const DEVICE: &str = "device";
/// The maximum number of blocks of one worker, more than the memory of any machine has.
const MAX_BLOCKS: usize = 1 << 24;

/// Events are missing, or more blocks are reported than a machine can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap;

/// The blocks of one worker. In Dynamo a block is held or not, but the index counts copies. So each
/// block is reported to the index once.
#[derive(Debug)]
pub(crate) struct Blocks {
    worker_id: u64,
    dp_rank: u32,
    block_size: u32,
    held: HashSet<u64>,
    /// The id of the last processed event; `None` until the worker has reported all its blocks.
    last: Option<u64>,
}

impl Blocks {
    /// Creates the state of a worker whose blocks are unknown.
    pub(crate) fn new(worker_id: u64, dp_rank: u32, block_size: u32) -> Self {
        Self { worker_id, dp_rank, block_size, held: HashSet::new(), last: None }
    }

    /// Returns the id of the next event; `None` if the whole cache has to be queried.
    pub(crate) fn next(&self) -> Option<u64> {
        self.last.map(|last| last.saturating_add(1))
    }

    /// Requests a new report of the whole cache. The known blocks stay valid until then.
    pub(crate) fn invalidate(&mut self) {
        self.last = None;
    }

    /// Replaces all blocks by a report of the whole cache, which includes all events up to `last`.
    pub(crate) fn replace(
        &mut self,
        events: &[WorkerEvent],
        last: u64,
    ) -> Result<Vec<KvEvent>, Gap> {
        self.held.clear();
        self.last = None;
        let mut changes = vec![KvEvent::AllBlocksCleared];
        for event in self.own(events) {
            self.apply(&event.data, &mut changes)?;
        }
        self.last = Some(last);
        Ok(changes)
    }

    /// Processes the next events and skips those that are already processed.
    ///
    /// # Errors
    /// Returns [`Gap`] if events are missing. The events before the gap are processed, and their
    /// changes are in `changes`.
    pub(crate) fn extend(
        &mut self,
        events: &[WorkerEvent],
        changes: &mut Vec<KvEvent>,
    ) -> Result<(), Gap> {
        for event in self.own(events) {
            let last = self.last.ok_or(Gap)?;
            match event.event_id.checked_sub(last) {
                None | Some(0) => continue,
                Some(1) => {}
                Some(2..) => return Err(Gap),
            }
            self.last = Some(event.event_id);
            self.apply(&event.data, changes)?;
        }
        Ok(())
    }

    /// Returns this worker's events. Events of other tiers count for the numbering but change
    /// nothing.
    fn own<'a>(&self, events: &'a [WorkerEvent]) -> impl Iterator<Item = Event> + use<'a> {
        let worker_id = self.worker_id;
        let dp_rank = self.dp_rank;
        let own = events
            .iter()
            .filter(move |event| event.worker_id == worker_id && event.event.dp_rank == dp_rank);
        own.map(|WorkerEvent { storage_tier, event, .. }| match storage_tier.as_deref() {
            None | Some(DEVICE) => event.clone(),
            Some(_) => {
                Event { data: Change::Removed { block_hashes: Vec::new() }, ..event.clone() }
            }
        })
    }

    fn apply(&mut self, change: &Change, changes: &mut Vec<KvEvent>) -> Result<(), Gap> {
        match change {
            Change::Cleared => {
                self.held.clear();
                changes.push(KvEvent::AllBlocksCleared);
            }
            Change::Removed { block_hashes } => {
                let gone: Vec<ExternalHash> = block_hashes
                    .iter()
                    .filter(|hash| self.held.remove(hash))
                    .map(|hash| ExternalHash::U64(*hash))
                    .collect();
                if !gone.is_empty() {
                    changes.push(KvEvent::BlockRemoved(BlockRemoved {
                        block_hashes: gone,
                        ..Default::default()
                    }));
                }
            }
            Change::Stored { parent_hash, blocks } => {
                if self.held.len() + blocks.len() > MAX_BLOCKS {
                    return Err(Gap);
                }
                let mut before = *parent_hash;
                let mut run: Option<BlockStored> = None;
                for block in blocks {
                    let hash = block.block_hash;
                    if self.held.insert(hash) {
                        let run = run.get_or_insert_with(|| BlockStored {
                            parent_block_hash: before.map(ExternalHash::U64),
                            block_size: self.block_size,
                            ..Default::default()
                        });
                        run.block_hashes.push(ExternalHash::U64(hash));
                    } else {
                        changes.extend(run.take().map(KvEvent::BlockStored));
                    }
                    before = Some(hash);
                }
                changes.extend(run.map(KvEvent::BlockStored));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_event::{PublishedEvents, StoredBlock, tests::envelopes};

    fn event(id: u64, data: Change) -> WorkerEvent {
        WorkerEvent {
            worker_id: 1,
            storage_tier: Some(DEVICE.to_owned()),
            event: Event { event_id: id, data, dp_rank: 0 },
        }
    }

    fn stored(parent_hash: Option<u64>, hashes: &[u64]) -> Change {
        Change::Stored {
            parent_hash,
            blocks: hashes.iter().map(|&block_hash| StoredBlock { block_hash }).collect(),
        }
    }

    fn removed(hashes: &[u64]) -> Change {
        Change::Removed { block_hashes: hashes.to_vec() }
    }

    /// Formats events for the index in short: `+parent:hash,hash -hash`.
    fn format(events: &[KvEvent]) -> String {
        let hash = |hash: &ExternalHash| match hash {
            ExternalHash::U64(hash) => hash.to_string(),
            ExternalHash::Bytes(_) => panic!("no hash of ours"),
        };
        let list = |hashes: &[ExternalHash]| hashes.iter().map(hash).collect::<Vec<_>>().join(",");
        let format_one = |event: &KvEvent| match event {
            KvEvent::BlockStored(stored) => {
                let parent = stored.parent_block_hash.as_ref().map(hash).unwrap_or_default();
                format!("+{parent}:{}", list(&stored.block_hashes))
            }
            KvEvent::BlockRemoved(removed) => format!("-{}", list(&removed.block_hashes)),
            other => format!("{other:?}"),
        };
        events.iter().map(format_one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_block_is_reported_once_until_removed() {
        let mut blocks = Blocks::new(1, 0, 16);
        assert_eq!(blocks.next(), None);
        let changes = blocks.replace(&[event(0, stored(None, &[1, 2, 3]))], 5).unwrap();
        assert_eq!(format(&changes), "AllBlocksCleared +:1,2,3");
        assert_eq!(blocks.next(), Some(6));
        let mut changes = Vec::new();
        let next = [
            event(5, removed(&[1])),
            event(6, stored(Some(1), &[9, 2, 4, 5])),
            event(7, removed(&[3, 77, 2])),
            event(8, stored(None, &[1])),
            event(9, Change::Cleared),
            event(10, stored(None, &[1])),
        ];
        blocks.extend(&next, &mut changes).unwrap();
        assert_eq!(format(&changes), "+1:9 +2:4,5 -3,2 AllBlocksCleared +:1");
        assert_eq!(blocks.next(), Some(11));
    }

    #[test]
    fn gap_is_detected_after_foreign_events() {
        let mut blocks = Blocks::new(1, 0, 16);
        let mut changes = Vec::new();
        assert_eq!(
            blocks.extend(&[event(1, stored(None, &[1]))], &mut changes),
            Err(Gap),
            "the cache was not reported yet"
        );
        blocks.replace(&[], 0).unwrap();
        let other = WorkerEvent { worker_id: 2, ..event(1, stored(None, &[8])) };
        let host = WorkerEvent {
            storage_tier: Some("host_pinned".to_owned()),
            ..event(2, stored(None, &[7]))
        };
        assert_eq!(
            blocks.extend(
                &[other, event(1, stored(None, &[1])), host, event(3, removed(&[1]))],
                &mut changes
            ),
            Ok(())
        );
        assert_eq!(format(&changes), "+:1 -1");
        changes.clear();
        let with_gap = [event(4, stored(None, &[2])), event(6, stored(None, &[3]))];
        assert_eq!(blocks.extend(&with_gap, &mut changes), Err(Gap));
        assert_eq!((format(&changes).as_str(), blocks.next()), ("+:2", Some(5)));
    }

    #[test]
    fn published_events_add_up_to_a_mockers_report() {
        let dump: Vec<u64> =
            serde_json::from_str(include_str!("../tests/recorded/held.json")).unwrap();
        let published: Vec<PublishedEvents> =
            envelopes().iter().map(|bytes| PublishedEvents::decode(bytes).unwrap()).collect();
        let mut blocks = Blocks::new(published[0].events[0].worker_id, 0, 16);
        blocks.replace(&[], 0).unwrap();
        for PublishedEvents { events, .. } in published {
            blocks.extend(&events, &mut Vec::new()).unwrap();
        }
        assert_eq!(blocks.held, dump.into_iter().collect());
    }
}
