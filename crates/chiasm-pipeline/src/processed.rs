//! Large tensors of media items that were made before: where they still are, and whose turn it is
//! to make others.

use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{TensorBytes, TensorFormat};
use chiasm_limit::{KeyedLimiter, KeyedPermit};
use chiasm_transfer::WeakSlot;
use chiasm_types::MmHash;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use tokio::time::Instant;

use super::error::RequestError;

/// An item in one of the forms that engines take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub(super) hash: MmHash,
    pub(super) format: TensorFormat,
}

/// Items in arenas whose whereabouts are remembered. An entry takes about 150 bytes.
const KNOWN_SLOTS: usize = 1 << 16;
/// How long an item that could not be processed is not tried again, and how many of them are
/// remembered.
const FAILURES_LAST: Duration = Duration::from_secs(1);
const KNOWN_FAILURES: usize = 1024;

/// Large tensors that were made for any engine.
pub(super) struct ProcessedMedia {
    one_at_a_time: KeyedLimiter<Form>,
    /// A tensor stays in an engine's arena for as long as the engine has use for it; till then
    /// another one can have a copy.
    slots: Cache<Form, WeakSlot>,
    /// Tensors that travel in messages. `None` keeps none.
    here: Option<Cache<Form, Bytes, Weight>>,
    failures: Cache<Form, (RequestError, Instant)>,
}

#[derive(Clone)]
struct Weight;

impl Weighter<Form, Bytes> for Weight {
    fn weight(&self, _: &Form, bytes: &Bytes) -> u64 {
        bytes.len() as u64
    }
}

impl ProcessedMedia {
    /// Keeps at most so many bytes of tensors in this process, 0 for none. What is in arenas needs
    /// no more room here.
    pub(super) fn new(max_bytes: u64) -> Self {
        // One shard: an item may take as much as all of it.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(max_bytes)
            .estimated_items_capacity(1 << 10)
            .build();
        let cache =
            |options| Cache::with_options(options, Weight, Default::default(), Default::default());
        Self {
            one_at_a_time: KeyedLimiter::new(1),
            slots: Cache::new(KNOWN_SLOTS),
            here: options.ok().filter(|_| max_bytes > 0).map(cache),
            failures: Cache::new(KNOWN_FAILURES),
        }
    }

    /// Waits until nobody else makes this item.
    pub(super) async fn turn(&self, form: Form) -> KeyedPermit<'_, Form> {
        self.one_at_a_time.acquire(form).await
    }

    /// The item's tensor, if it is still somewhere; or why it could not be made a moment ago.
    pub(super) fn find(&self, form: &Form) -> Result<Option<TensorBytes>, RequestError> {
        if let Some((error, until)) = self.failures.get(form) {
            if Instant::now() < until {
                return Err(error);
            }
            self.failures.remove(form);
        }
        if let Some(slot) = self.slots.get(form) {
            match slot.upgrade() {
                Some(slot) => return Ok(Some(TensorBytes::Slot(slot))),
                None => drop(self.slots.remove(form)),
            }
        }
        Ok(self.here.as_ref().and_then(|here| here.get(form)).map(TensorBytes::Here))
    }

    /// Remembers where an item's tensor is.
    pub(super) fn made(&self, form: Form, tensor: &TensorBytes) {
        match (tensor, &self.here) {
            (TensorBytes::Slot(slot), _) => self.slots.insert(form, slot.downgrade()),
            (TensorBytes::Here(bytes), Some(here)) => here.insert(form, bytes.clone()),
            (TensorBytes::Here(_), None) => {}
        }
    }

    /// Remembers for a moment that an item can't be processed.
    pub(super) fn failed(&self, form: Form, error: &RequestError) {
        if error.is_permanent() {
            self.failures.insert(form, (error.clone(), Instant::now() + FAILURES_LAST));
        }
    }

    /// Bytes of tensors kept in this process.
    pub(super) fn bytes(&self) -> u64 {
        self.here.as_ref().map_or(0, Cache::weight)
    }
}

#[cfg(test)]
mod tests {
    use chiasm_transfer::Arena;

    use super::*;

    fn form(number: u8) -> Form {
        Form { hash: MmHash::new([number; 32]), format: TensorFormat::Raw }
    }

    #[test]
    fn a_tensor_is_found_as_long_as_somebody_has_use_for_it() {
        let processed = ProcessedMedia::new(100);
        let arena = Arena::create(4096).unwrap();
        let mut writer = arena.slot(4).unwrap();
        writer.fill(9);
        let slot = writer.publish();
        processed.made(form(1), &TensorBytes::Slot(slot.clone()));
        assert_eq!(processed.find(&form(1)).unwrap().unwrap().as_ref(), [9; 4]);
        drop(slot);
        assert!(processed.find(&form(1)).unwrap().is_none());

        processed.made(form(2), &TensorBytes::Here(Bytes::from_static(&[7; 60])));
        assert_eq!(processed.find(&form(2)).unwrap().unwrap().as_ref(), [7; 60]);
        processed.made(form(3), &TensorBytes::Here(Bytes::from_static(&[7; 60])));
        assert!(processed.bytes() <= 100);
        let other = Form { format: TensorFormat::Normalized(chiasm_types::Dtype::BF16), ..form(3) };
        assert!(processed.find(&other).unwrap().is_none());
    }

    #[test]
    fn a_cache_of_no_bytes_keeps_nothing() {
        let processed = ProcessedMedia::new(0);
        processed.made(form(2), &TensorBytes::Here(Bytes::from_static(&[7; 60])));
        assert!(processed.find(&form(2)).unwrap().is_none());
    }

    #[test]
    fn only_what_is_the_items_own_fault_is_believed_for_a_moment() {
        let processed = ProcessedMedia::new(0);
        processed.failed(form(1), &RequestError::internal("no room"));
        assert!(processed.find(&form(1)).is_ok());
        processed.failed(form(1), &RequestError::invalid("x", "corrupt"));
        assert_eq!(processed.find(&form(1)).unwrap_err().to_string(), "corrupt");
        assert!(processed.find(&form(2)).is_ok());
    }
}
