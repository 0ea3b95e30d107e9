//! A cache of media items' large tensors, with single-flight processing.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{FieldValue, ItemField, Tensor, TensorBytes, TensorFormat, TensorMemory};
use chiasm_limit::{KeyedLimiter, KeyedPermit};
use chiasm_media::{ByteBudget, ChargedBuffer};
use chiasm_transfer::{SlotWriter, WeakSlot};
use chiasm_types::MmHash;
use chiasm_vision::{Contents, PixelFormat, TensorSpec};
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use tokio::time::Instant;

use super::error::RequestError;

/// The identity of a tensor: a media item, in one of the formats that engines accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TensorKey {
    pub(super) hash: MmHash,
    pub(super) format: TensorFormat,
}

impl TensorKey {
    /// Returns the format of the tensor's values.
    pub(super) fn pixel_format(&self) -> PixelFormat {
        pixel_format(self.format)
    }
}

/// Returns the format in which pixels are written for an engine.
pub(super) fn pixel_format(format: TensorFormat) -> PixelFormat {
    match format {
        TensorFormat::Raw => PixelFormat::RawU8,
        TensorFormat::Normalized(dtype) => PixelFormat::Normalized(dtype),
    }
}

/// Returns an item's field. `pixels` is its large tensor.
pub(super) fn to_field(spec: TensorSpec, pixels: &TensorBytes) -> ItemField {
    let TensorSpec { name, dtype, shape, contents, field } = spec;
    let bytes = match contents {
        Contents::Small(bytes) => TensorBytes::Here(Bytes::from(bytes)),
        Contents::Pixels => pixels.clone(),
    };
    ItemField {
        name: Cow::Borrowed(name),
        field,
        value: FieldValue::Tensor(Tensor { dtype, shape, bytes }),
    }
}

/// Memory for a tensor that is being written: the engine's own, or else this process's.
pub(super) enum TensorWriter {
    Slot(SlotWriter),
    Here(ChargedBuffer),
}

impl TensorWriter {
    /// Reserves memory for a tensor of `bytes` bytes.
    ///
    /// # Errors
    /// Returns an error if this process's memory is exhausted.
    pub(super) fn reserve(
        memory: &dyn TensorMemory,
        budget: &ByteBudget,
        bytes: usize,
    ) -> Result<Self, RequestError> {
        if let Some(slot) = memory.reserve(bytes) {
            return Ok(Self::Slot(slot));
        }
        let mut buffer = budget.buffer();
        buffer.extend_zeroed(bytes)?;
        Ok(Self::Here(buffer))
    }

    /// Returns the memory.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Slot(slot) => slot,
            Self::Here(buffer) => buffer.as_mut_slice(),
        }
    }

    /// Returns the written tensor.
    pub(super) fn publish(self) -> TensorBytes {
        match self {
            Self::Slot(slot) => TensorBytes::Slot(slot.publish()),
            Self::Here(buffer) => TensorBytes::Here(buffer.freeze()),
        }
    }
}

/// The maximum number of remembered tensors in arenas. An entry takes about 150 bytes.
const MAX_SLOTS: usize = 1 << 16;
/// The time for which an item that could not be processed is not retried.
const FAILURE_TTL: Duration = Duration::from_secs(1);
/// The maximum number of remembered failures.
const MAX_FAILURES: usize = 1024;

/// The large tensors that were made for any engine.
pub(super) struct ProcessedMedia {
    single_flight: KeyedLimiter<TensorKey>,
    /// Tensors in engines' arenas. While an engine uses a tensor, other engines can copy it.
    slots: Cache<TensorKey, WeakSlot>,
    /// Tensors that are sent in messages; `None` if none are kept.
    in_process: Option<Cache<TensorKey, Bytes, Weight>>,
    failures: Cache<TensorKey, (RequestError, Instant)>,
}

#[derive(Clone)]
struct Weight;

impl Weighter<TensorKey, Bytes> for Weight {
    fn weight(&self, _: &TensorKey, bytes: &Bytes) -> u64 {
        bytes.len() as u64
    }
}

impl ProcessedMedia {
    /// Creates a cache that keeps at most `max_bytes` of tensors in this process; zero keeps none.
    /// 0. Tensors in arenas do not count.
    pub(super) fn new(max_bytes: u64) -> Self {
        // A single shard, so that one item may use the whole capacity.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(max_bytes)
            .estimated_items_capacity(1 << 10)
            .build();
        let cache =
            |options| Cache::with_options(options, Weight, Default::default(), Default::default());
        Self {
            single_flight: KeyedLimiter::new(1),
            slots: Cache::new(MAX_SLOTS),
            in_process: options.ok().filter(|_| max_bytes > 0).map(cache),
            failures: Cache::new(MAX_FAILURES),
        }
    }

    /// Waits until no other task processes this tensor, and locks it.
    pub(super) async fn lock(&self, key: TensorKey) -> KeyedPermit<'_, TensorKey> {
        self.single_flight.acquire(key).await
    }

    /// Returns a tensor if it is still in memory.
    ///
    /// # Errors
    /// Returns the error of a failed attempt within the last second.
    pub(super) fn get(&self, key: &TensorKey) -> Result<Option<TensorBytes>, RequestError> {
        if let Some((error, until)) = self.failures.get(key) {
            if Instant::now() < until {
                return Err(error);
            }
            self.failures.remove(key);
        }
        if let Some(slot) = self.slots.get(key) {
            match slot.upgrade() {
                Some(slot) => return Ok(Some(TensorBytes::Slot(slot))),
                None => drop(self.slots.remove(key)),
            }
        }
        let in_process = self.in_process.as_ref().and_then(|cache| cache.get(key));
        Ok(in_process.map(TensorBytes::Here))
    }

    /// Remembers a tensor.
    pub(super) fn insert(&self, key: TensorKey, tensor: &TensorBytes) {
        match (tensor, &self.in_process) {
            (TensorBytes::Slot(slot), _) => self.slots.insert(key, slot.downgrade()),
            (TensorBytes::Here(bytes), Some(cache)) => cache.insert(key, bytes.clone()),
            (TensorBytes::Here(_), None) => {}
        }
    }

    /// Remembers a permanent error for [`FAILURE_TTL`]. Ignores other errors.
    pub(super) fn record_failure(&self, key: TensorKey, error: &RequestError) {
        if error.is_permanent() {
            self.failures.insert(key, (error.clone(), Instant::now() + FAILURE_TTL));
        }
    }

    /// Returns the bytes of tensors kept in this process.
    pub(super) fn bytes(&self) -> u64 {
        self.in_process.as_ref().map_or(0, Cache::weight)
    }
}

#[cfg(test)]
mod tests {
    use chiasm_transfer::Arena;

    use super::*;

    fn key(number: u8) -> TensorKey {
        TensorKey { hash: MmHash::new([number; 32]), format: TensorFormat::Raw }
    }

    #[test]
    fn tensor_is_found_while_it_is_in_memory() {
        let processed = ProcessedMedia::new(100);
        let arena = Arena::create(4096).unwrap();
        let mut writer = arena.slot(4).unwrap();
        writer.fill(9);
        let slot = writer.publish();
        processed.insert(key(1), &TensorBytes::Slot(slot.clone()));
        assert_eq!(processed.get(&key(1)).unwrap().unwrap().as_ref(), [9; 4]);
        drop(slot);
        assert!(processed.get(&key(1)).unwrap().is_none());

        processed.insert(key(2), &TensorBytes::Here(Bytes::from_static(&[7; 60])));
        assert_eq!(processed.get(&key(2)).unwrap().unwrap().as_ref(), [7; 60]);
        processed.insert(key(3), &TensorBytes::Here(Bytes::from_static(&[7; 60])));
        assert!(processed.bytes() <= 100);
        let format = TensorFormat::Normalized(chiasm_types::Dtype::BF16);
        let other = TensorKey { format, ..key(3) };
        assert!(processed.get(&other).unwrap().is_none());
    }

    #[test]
    fn zero_capacity_keeps_nothing() {
        let processed = ProcessedMedia::new(0);
        processed.insert(key(2), &TensorBytes::Here(Bytes::from_static(&[7; 60])));
        assert!(processed.get(&key(2)).unwrap().is_none());
    }

    #[test]
    fn only_permanent_errors_are_remembered() {
        let processed = ProcessedMedia::new(0);
        processed.record_failure(key(1), &RequestError::internal("no room"));
        assert!(processed.get(&key(1)).is_ok());
        processed.record_failure(key(1), &RequestError::invalid("x", "corrupt"));
        assert_eq!(processed.get(&key(1)).unwrap_err().to_string(), "corrupt");
        assert!(processed.get(&key(2)).is_ok());
    }
}
