//! Which blocks a worker holds, by what it says; and that as events for the index.

use std::collections::HashSet;

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

use crate::kv_event::{Change, Event, WorkerEvent};

/// What the engine computes with; other tiers don't count.
const DEVICE: &str = "device";
/// Blocks that a worker may say that it holds: more than any machine's memory has.
const MOST: usize = 1 << 24;

/// Events are missing, or more is told than can be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap;

/// The blocks of one worker. To Dynamo a block is held or not; the index counts copies, so it is
/// told of each once.
#[derive(Debug)]
pub(crate) struct Blocks {
    worker_id: u64,
    dp_rank: u32,
    block_size: u32,
    held: HashSet<u64>,
    /// The number of the last event that was taken in; `None` until the worker has told of all that
    /// it holds.
    last: Option<u64>,
}

impl Blocks {
    /// Nothing is known yet.
    pub(crate) fn new(worker_id: u64, dp_rank: u32, block_size: u32) -> Self {
        Self { worker_id, dp_rank, block_size, held: HashSet::new(), last: None }
    }

    /// The event from which on there is something new to this.
    pub(crate) fn next(&self) -> Option<u64> {
        self.last.map(|last| last.saturating_add(1))
    }

    /// All has to be told again. What was told stands until then.
    pub(crate) fn forget(&mut self) {
        self.last = None;
    }

    /// The worker has told of all that it holds, after the event of a number.
    pub(crate) fn replace(
        &mut self,
        events: &[WorkerEvent],
        last: u64,
    ) -> Result<Vec<KvEvent>, Gap> {
        self.held.clear();
        self.last = None;
        let mut told = vec![KvEvent::AllBlocksCleared];
        for event in self.own(events) {
            self.change(&event.data, &mut told)?;
        }
        self.last = Some(last);
        Ok(told)
    }

    /// Takes in what comes next. Events that were taken in before are passed over.
    ///
    /// # Errors
    /// [`Gap`] where some are missing. Those before it are taken in, and in `told`.
    pub(crate) fn extend(
        &mut self,
        events: &[WorkerEvent],
        told: &mut Vec<KvEvent>,
    ) -> Result<(), Gap> {
        for event in self.own(events) {
            let last = self.last.ok_or(Gap)?;
            match event.event_id.checked_sub(last) {
                None | Some(0) => continue,
                Some(1) => {}
                Some(2..) => return Err(Gap),
            }
            self.last = Some(event.event_id);
            self.change(&event.data, told)?;
        }
        Ok(())
    }

    /// Events of this worker. Those of other tiers have numbers too, and change nothing.
    fn own<'a>(&self, events: &'a [WorkerEvent]) -> impl Iterator<Item = Event> + use<'a> {
        let (worker_id, dp_rank) = (self.worker_id, self.dp_rank);
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

    fn change(&mut self, change: &Change, told: &mut Vec<KvEvent>) -> Result<(), Gap> {
        match change {
            Change::Cleared => {
                self.held.clear();
                told.push(KvEvent::AllBlocksCleared);
            }
            Change::Removed { block_hashes } => {
                let gone: Vec<ExternalHash> = block_hashes
                    .iter()
                    .filter(|hash| self.held.remove(hash))
                    .map(|hash| ExternalHash::U64(*hash))
                    .collect();
                if !gone.is_empty() {
                    told.push(KvEvent::BlockRemoved(BlockRemoved {
                        block_hashes: gone,
                        ..Default::default()
                    }));
                }
            }
            Change::Stored { parent_hash, blocks } => {
                if self.held.len() + blocks.len() > MOST {
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
                        told.extend(run.take().map(KvEvent::BlockStored));
                    }
                    before = Some(hash);
                }
                told.extend(run.map(KvEvent::BlockStored));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_event::{Published, StoredBlock, tests::envelopes};

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

    /// What the index is told, in short: `+parent:hash,hash -hash`.
    fn short(told: &[KvEvent]) -> String {
        let hash = |hash: &ExternalHash| match hash {
            ExternalHash::U64(hash) => hash.to_string(),
            ExternalHash::Bytes(_) => panic!("no hash of ours"),
        };
        let list = |hashes: &[ExternalHash]| hashes.iter().map(hash).collect::<Vec<_>>().join(",");
        let one = |event: &KvEvent| match event {
            KvEvent::BlockStored(stored) => {
                let parent = stored.parent_block_hash.as_ref().map(hash).unwrap_or_default();
                format!("+{parent}:{}", list(&stored.block_hashes))
            }
            KvEvent::BlockRemoved(removed) => format!("-{}", list(&removed.block_hashes)),
            other => format!("{other:?}"),
        };
        told.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_block_is_told_of_once_until_it_is_gone() {
        let mut blocks = Blocks::new(1, 0, 16);
        assert_eq!(blocks.next(), None);
        let told = blocks.replace(&[event(0, stored(None, &[1, 2, 3]))], 5).unwrap();
        assert_eq!(short(&told), "AllBlocksCleared +:1,2,3");
        assert_eq!(blocks.next(), Some(6));
        let mut told = Vec::new();
        let next = [
            event(5, removed(&[1])),
            event(6, stored(Some(1), &[9, 2, 4, 5])),
            event(7, removed(&[3, 77, 2])),
            event(8, stored(None, &[1])),
            event(9, Change::Cleared),
            event(10, stored(None, &[1])),
        ];
        blocks.extend(&next, &mut told).unwrap();
        assert_eq!(short(&told), "+1:9 +2:4,5 -3,2 AllBlocksCleared +:1");
        assert_eq!(blocks.next(), Some(11));
    }

    #[test]
    fn what_is_missing_is_noticed_and_what_is_not_of_the_worker_passed_over() {
        let mut blocks = Blocks::new(1, 0, 16);
        let mut told = Vec::new();
        assert_eq!(
            blocks.extend(&[event(1, stored(None, &[1]))], &mut told),
            Err(Gap),
            "nothing is known yet"
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
                &mut told
            ),
            Ok(())
        );
        assert_eq!(short(&told), "+:1 -1");
        told.clear();
        assert_eq!(
            blocks.extend(&[event(4, stored(None, &[2])), event(6, stored(None, &[3]))], &mut told),
            Err(Gap)
        );
        assert_eq!((short(&told).as_str(), blocks.next()), ("+:2", Some(5)));
    }

    #[test]
    fn what_a_mocker_published_is_what_it_holds_when_it_is_asked() {
        let dump: Vec<u64> =
            serde_json::from_str(include_str!("../tests/recorded/held.json")).unwrap();
        let published: Vec<Published> =
            envelopes().iter().map(|bytes| Published::decode(bytes).unwrap()).collect();
        let mut blocks = Blocks::new(published[0].events[0].worker_id, 0, 16);
        blocks.replace(&[], 0).unwrap();
        for Published { events, .. } in published {
            blocks.extend(&events, &mut Vec::new()).unwrap();
        }
        assert_eq!(blocks.held, dump.into_iter().collect());
    }
}
