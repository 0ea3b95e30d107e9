//! The engine's hold on a slot of shared memory, and its watch over what is in it.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use chiasm_transfer::SlotView;

use crate::digest::Digest;

/// A view of a slot that the frontend has lent. The lease is returned with the last clone.
///
/// A slot must not change while it is lent. The digest of what it held at first is compared in each
/// step that uses the slot, and once more before the lease is returned.
#[derive(Clone)]
pub(crate) struct LentSlot(Arc<Held>);

struct Held {
    view: SlotView,
    offset: u64,
    digest: Digest,
    alarm: Option<Alarm>,
}

/// A slot's bytes are not those that it was lent with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {offset} was written to while it was lent")]
pub(crate) struct Overwritten {
    /// The slot's beginning in its arena, by which a slot is known.
    pub(crate) offset: u64,
}

/// Makes the engine die, from places that have no caller to tell.
#[derive(Clone)]
pub(crate) struct Alarm(Arc<dyn AlarmTarget>);

/// An engine as its alarms reach it.
pub(crate) trait AlarmTarget: Send + Sync {
    /// Returns `true` if nobody reads alarms any more.
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
    /// Takes the slot that begins at `offset`. Without an alarm nothing is compared.
    pub(crate) fn new(view: SlotView, offset: u64, alarm: Option<Alarm>) -> Self {
        let digest = Digest::of(&view);
        Self(Arc::new(Held { view, offset, digest, alarm }))
    }

    /// The digest of the bytes that it was lent with.
    pub(crate) fn digest(&self) -> Digest {
        self.0.digest
    }

    /// Compares its bytes with those that it was lent with.
    pub(crate) fn check(&self) -> Result<(), Overwritten> {
        self.0.check()
    }
}

/// The slots that were compared since the step began. However many requests use a slot in one step,
/// it is looked at once, and after the last of them has come.
#[derive(Debug, Default)]
pub(crate) struct CheckedSlots(HashSet<usize>);

impl CheckedSlots {
    /// Compares those of these slots that were not compared yet.
    pub(crate) fn check<'a>(
        &mut self,
        slots: impl IntoIterator<Item = &'a LentSlot>,
    ) -> Result<(), Overwritten> {
        for slot in slots {
            // The address is the slot's as long as a request has it, which is longer than a step.
            if self.0.insert(Arc::as_ptr(&slot.0).addr()) {
                slot.check()?;
            }
        }
        Ok(())
    }
}

impl Held {
    fn check(&self) -> Result<(), Overwritten> {
        match self.alarm.is_some() && Digest::of(&self.view) != self.digest {
            true => Err(Overwritten { offset: self.offset }),
            false => Ok(()),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // An engine that has ended has nobody to tell.
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
        let Held { offset, digest, .. } = &*self.0;
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

    /// Bytes in a slot of an arena of their own, and the end at which its alarm is heard.
    pub(crate) struct Lent {
        pub(crate) arena: Arena,
        pub(crate) slot: LentSlot,
        pub(crate) alarms: mpsc::UnboundedReceiver<Work>,
    }

    impl Lent {
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

        /// Writes to the slot behind everybody's back.
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
    fn a_slot_that_stays_as_it_was_is_returned_in_silence() {
        let mut lent = Lent::new(&[7; 100]);
        assert_eq!(lent.slot.check(), Ok(()));
        assert_eq!(lent.slot.digest(), Digest::of(&[7; 100]));
        let Lent { slot, .. } = lent;
        drop(slot);
        assert_eq!(lent.arena.usage().leases, 0);
        assert!(lent.alarms.try_recv().is_err());
    }

    #[test]
    fn a_slot_that_was_written_to_is_noticed_when_it_is_used_and_when_it_is_returned() {
        let lent = Lent::new(&[7; 100]);
        lent.overwrite();
        let overwritten = lent.slot.check().unwrap_err();
        let reason = format!("slot {} was written to while it was lent", overwritten.offset);
        assert_eq!(overwritten.to_string(), reason);
        let Lent { arena, slot, alarms } = lent;
        let clone = slot.clone();
        drop(slot);
        let mut lent = Lent { arena, slot: clone.clone(), alarms };
        assert_eq!(lent.alarm(), None, "there is still a clone");
        drop(clone);
        lent.slot = Lent::new(&[1]).slot;
        assert_eq!(lent.alarm(), Some(reason));
        assert_eq!(lent.arena.usage().leases, 0);
    }

    #[test]
    fn in_one_step_a_slot_is_compared_once_and_in_the_next_again() {
        let (one, other) = (Lent::new(&[7; 100]), Lent::new(&[7; 100]));
        let mut step = CheckedSlots::default();
        assert_eq!(step.check([&one.slot, &one.slot.clone()]), Ok(()));
        one.overwrite();
        assert_eq!(step.check([&one.slot]), Ok(()));
        other.overwrite();
        assert!(step.check([&other.slot]).is_err(), "another slot with the same bytes");
        assert!(CheckedSlots::default().check([&one.slot.clone()]).is_err());
    }

    #[test]
    fn without_an_alarm_nothing_is_compared() {
        let mut lent = Lent::new(&[7; 100]);
        let Some(held) = Arc::get_mut(&mut lent.slot.0) else { panic!("it has no clones") };
        held.alarm = None;
        lent.overwrite();
        assert_eq!(lent.slot.check(), Ok(()));
    }
}
