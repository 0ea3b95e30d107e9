//! The engine's views of slots in shared memory, and the checks of their contents.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use chiasm_transfer::SlotView;

use crate::digest::Digest;

/// A view of a slot that the frontend has lent. The lease is returned with the last clone.
///
/// A slot must not change while it is lent. The digest of its first contents is compared in each
/// step that uses the slot, and once more before the lease is returned.
#[derive(Clone)]
pub(crate) struct LentSlot(Arc<Lease>);

struct Lease {
    view: SlotView,
    offset: u64,
    digest: Digest,
    alarm: Option<Alarm>,
}

/// A slot was overwritten while it was lent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {offset} was written to while it was lent")]
pub(crate) struct Overwritten {
    /// The slot's beginning in its arena, which identifies the slot.
    pub(crate) offset: u64,
}

/// Makes the engine die, from code that can't return an error.
#[derive(Clone)]
pub(crate) struct Alarm(Arc<dyn AlarmTarget>);

/// An engine that an alarm can end.
pub(crate) trait AlarmTarget: Send + Sync {
    /// Returns `true` if the engine no longer receives alarms.
    fn has_ended(&self) -> bool;

    /// Ends the engine, for this reason.
    fn die(&self, reason: String);
}

impl Alarm {
    pub(crate) fn new(target: impl AlarmTarget + 'static) -> Self {
        Self(Arc::new(target))
    }

    fn raise(&self, overwritten: &Overwritten) {
        self.0.die(overwritten.to_string());
    }
}

impl LentSlot {
    /// Creates a view of the slot that begins at `offset`. Without an alarm nothing is checked.
    pub(crate) fn new(view: SlotView, offset: u64, alarm: Option<Alarm>) -> Self {
        let digest = Digest::compute(&view);
        Self(Arc::new(Lease { view, offset, digest, alarm }))
    }

    /// Returns the digest of the slot's first contents.
    pub(crate) fn digest(&self) -> Digest {
        self.0.digest
    }

    /// Checks that the slot still has its first contents.
    pub(crate) fn check(&self) -> Result<(), Overwritten> {
        self.0.check()
    }
}

/// The slots that were checked since the step began. A slot is checked once per step, after all its
/// requests have arrived, however many requests use it.
#[derive(Debug, Default)]
pub(crate) struct CheckedSlots(HashSet<usize>);

impl CheckedSlots {
    /// Checks the slots that were not checked yet.
    pub(crate) fn check<'a>(
        &mut self,
        slots: impl IntoIterator<Item = &'a LentSlot>,
    ) -> Result<(), Overwritten> {
        for slot in slots {
            // The address identifies the slot for as long as a request holds it, which is longer
            // than a step.
            if self.0.insert(Arc::as_ptr(&slot.0).addr()) {
                slot.check()?;
            }
        }
        Ok(())
    }
}

impl Lease {
    fn check(&self) -> Result<(), Overwritten> {
        if self.alarm.is_some() && Digest::compute(&self.view) != self.digest {
            return Err(Overwritten { offset: self.offset });
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // An engine that has ended receives no alarms.
        let Some(alarm) = self.alarm.as_ref().filter(|alarm| !alarm.0.has_ended()) else { return };
        if let Err(overwritten) = self.check() {
            alarm.raise(&overwritten);
        }
    }
}

impl AsRef<[u8]> for LentSlot {
    fn as_ref(&self) -> &[u8] {
        &self.0.view
    }
}

impl fmt::Debug for LentSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lease { offset, digest, .. } = &*self.0;
        f.debug_struct("LentSlot")
            .field("offset", offset)
            .field("digest", digest)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::work::Work;
    use chiasm_transfer::{Arena, ArenaReader, SHM_DIR};
    use tokio::sync::mpsc;

    /// A slot in an arena of its own, and the receiver of its alarms.
    pub(crate) struct TestSlot {
        pub(crate) arena: Arena,
        pub(crate) slot: LentSlot,
        pub(crate) alarms: mpsc::UnboundedReceiver<Work>,
    }

    impl TestSlot {
        pub(crate) fn new(bytes: &[u8]) -> Self {
            let arena = Arena::create(bytes.len() as u64).unwrap();
            let mut writer = arena.slot(bytes.len()).unwrap();
            writer.copy_from_slice(bytes);
            let handle = writer.publish().lend().unwrap().handle;
            let view = ArenaReader::open(arena.name()).unwrap().resolve(&handle).unwrap();
            let (sender, alarms) = mpsc::unbounded_channel();
            let slot = LentSlot::new(view, handle.offset, Some(Alarm::new(sender)));
            Self { arena, slot, alarms }
        }

        /// Overwrites the slot through the file.
        pub(crate) fn overwrite(&self) {
            let path = std::path::Path::new(SHM_DIR).join(self.arena.name());
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.write_all_at(&[self.slot.as_ref()[0] ^ 1], self.slot.0.offset).unwrap();
        }

        fn alarm(&mut self) -> Option<String> {
            match self.alarms.try_recv() {
                Ok(Work::Die(reason)) => Some(reason),
                _ => None,
            }
        }
    }

    #[test]
    fn unchanged_slot_is_returned_without_an_alarm() {
        let mut lent = TestSlot::new(&[7; 100]);
        assert_eq!(lent.slot.check(), Ok(()));
        assert_eq!(lent.slot.digest(), Digest::compute(&[7; 100]));
        let TestSlot { slot, .. } = lent;
        drop(slot);
        assert_eq!(lent.arena.usage().leases, 0);
        assert!(lent.alarms.try_recv().is_err());
    }

    #[test]
    fn overwritten_slot_fails_checks_or_its_return() {
        let lent = TestSlot::new(&[7; 100]);
        lent.overwrite();
        let overwritten = lent.slot.check().unwrap_err();
        let reason = format!("slot {} was written to while it was lent", overwritten.offset);
        assert_eq!(overwritten.to_string(), reason);
        let TestSlot { arena, slot, alarms } = lent;
        let clone = slot.clone();
        drop(slot);
        let mut lent = TestSlot { arena, slot: clone.clone(), alarms };
        assert_eq!(lent.alarm(), None, "a clone is left");
        drop(clone);
        lent.slot = TestSlot::new(&[1]).slot;
        assert_eq!(lent.alarm(), Some(reason));
        assert_eq!(lent.arena.usage().leases, 0);
    }

    #[test]
    fn slot_is_checked_once_per_step() {
        let one = TestSlot::new(&[7; 100]);
        let other = TestSlot::new(&[7; 100]);
        let mut step = CheckedSlots::default();
        assert_eq!(step.check([&one.slot, &one.slot.clone()]), Ok(()));
        one.overwrite();
        assert_eq!(step.check([&one.slot]), Ok(()));
        other.overwrite();
        assert!(step.check([&other.slot]).is_err(), "another slot with the same bytes");
        assert!(CheckedSlots::default().check([&one.slot.clone()]).is_err());
    }

    #[test]
    fn slot_without_an_alarm_is_not_checked() {
        let mut lent = TestSlot::new(&[7; 100]);
        let Some(lease) = Arc::get_mut(&mut lent.slot.0) else { panic!("it has no clones") };
        lease.alarm = None;
        lent.overwrite();
        assert_eq!(lent.slot.check(), Ok(()));
    }
}
