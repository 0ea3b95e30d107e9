//! A media item inside the engine.

use bytes::Bytes;
use chiasm_engine::wire::{MmData, MmItem, TensorData, WireTensor};

use crate::digest::Digest;
use crate::image::{ItemFacts, digested_tensor};
use crate::lent_slot::{LentSlot, Overwritten};

/// The facts about an item, and the slots of its tensors. Inline tensors are not kept, because
/// nothing reads them and they would fill the caches. Clones hold the same slots.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    facts: ItemFacts,
    slots: Vec<LentSlot>,
}

impl Item {
    /// Receives an item of a request. `resolve` returns the slots of out-of-band tensors.
    ///
    /// # Errors
    ///
    /// Returns the errors of `resolve`.
    pub(crate) fn receive<E>(
        mut item: MmItem,
        mut resolve: impl FnMut(&WireTensor) -> Result<Option<LentSlot>, E>,
    ) -> Result<Self, E> {
        let mut slots = Vec::new();
        for data in item.0.iter_mut().filter_map(|(_, field)| field.data.as_mut()) {
            for_tensors(data, &mut |tensor| {
                if let Some(slot) = resolve(tensor)? {
                    tensor.data = TensorData::Bytes(Bytes::from_owner(slot.clone()));
                    slots.push(slot);
                }
                Ok(())
            })?;
        }
        let digest = digested_tensor(&item).and_then(WireTensor::bytes).map(|pixels| {
            // The bytes of a slot were digested when it was resolved.
            let known = slots
                .iter()
                .find(|slot| slot.as_ref().as_ptr() == pixels.as_ptr())
                .map(LentSlot::digest);
            known.unwrap_or_else(|| Digest::compute(pixels))
        });
        Ok(Self { facts: ItemFacts::new(&item, digest), slots })
    }

    pub(crate) fn facts(&self) -> &ItemFacts {
        &self.facts
    }

    pub(crate) fn slots(&self) -> &[LentSlot] {
        &self.slots
    }

    /// Checks that the slots still have their first contents.
    pub(crate) fn check(&self) -> Result<(), Overwritten> {
        self.slots.iter().try_for_each(LentSlot::check)
    }
}

/// Visits all tensors. The wire limits the depth of lists.
fn for_tensors<E>(
    data: &mut MmData,
    visit: &mut impl FnMut(&mut WireTensor) -> Result<(), E>,
) -> Result<(), E> {
    match data {
        MmData::Tensor(tensor) => visit(tensor),
        MmData::List(list) => list.iter_mut().try_for_each(|data| for_tensors(data, visit)),
        MmData::Int(_) | MmData::Float(_) => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::image::tests::{facts, item as image};
    use crate::lent_slot::tests::TestSlot;

    /// Receives an item with inline tensors.
    pub(crate) fn inline(item: MmItem) -> Item {
        Item::receive(item, |_| Ok::<_, ()>(None)).unwrap()
    }

    /// Receives an item with its tensors in slots; also returns the slots in order.
    pub(crate) fn by_slot(mut item: MmItem) -> (Item, Vec<TestSlot>) {
        let mut lent = Vec::new();
        for data in item.0.iter_mut().filter_map(|(_, field)| field.data.as_mut()) {
            let moved = for_tensors(data, &mut |tensor| {
                lent.push(TestSlot::new(tensor.bytes().unwrap()));
                tensor.data = TensorData::OutOfBand(chiasm_engine::wire::Value::Nil);
                Ok::<_, ()>(())
            });
            moved.unwrap();
        }
        let mut slots = lent.iter().map(|lent| lent.slot.clone());
        let item = Item::receive(item, |_| Ok::<_, ()>(slots.next())).unwrap();
        (item, lent)
    }

    #[test]
    fn inline_item_equals_item_by_slot() {
        let (item, lent) = by_slot(image(16, 20));
        assert_eq!(item.facts(), inline(image(16, 20)).facts());
        assert_eq!(item.facts(), &facts(&image(16, 20)));
        assert_eq!((item.slots.len(), lent.len()), (2, 2), "pixels and grid");
        assert!(inline(image(16, 20)).slots.is_empty());
    }

    #[test]
    fn slots_in_lists_are_resolved() {
        let mut nested = image(16, 20);
        let tensors = nested.0.iter_mut().map(|(_, field)| field.data.take().unwrap()).collect();
        nested.0[0].1.data = Some(MmData::List(vec![MmData::Int(1), MmData::List(tensors)]));
        assert_eq!(by_slot(nested).0.slots.len(), 2);
    }

    #[test]
    fn overwritten_slot_fails_its_items_check() {
        let (item, lent) = by_slot(image(16, 20));
        assert_eq!(item.check(), Ok(()));
        lent[1].overwrite();
        assert!(item.check().is_err());
    }

    #[test]
    fn unresolvable_tensor_refuses_the_item() {
        let mut seen = 0;
        let refused = Item::receive(image(16, 20), |_| {
            seen += 1;
            if seen == 2 { Err("no") } else { Ok(None) }
        });
        assert_eq!((refused.unwrap_err(), seen), ("no", 2));
    }
}
