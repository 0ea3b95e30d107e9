//! Tensors that frontends have made.

use std::sync::Arc;

use chiasm_backend::{
    EncodedItem, FieldValue, ItemField, MediaSource, SourceError, Tensor, TensorBytes,
    TensorMemory, TensorRequest,
};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};

use super::super::error::RequestError;
use super::received::{ItemData, ReceivedItems};
use chiasm_cpu::{CpuBudget, CpuPool, price};

/// The minimum size of a tensor in shared memory. Smaller tensors are sent in messages, which cost
/// less than a slot.
const MIN_SLOT_BYTES: usize = 4096;

type Fields = Vec<ItemField>;

/// The received tensors, cached for other engines of this machine.
pub(super) struct ReceivedTensors {
    max_bytes: u64,
    items: ReceivedItems<Fields>,
    cpu: CpuPool,
}

impl ItemData for Fields {
    fn bytes(&self) -> u64 {
        self.iter().map(|field| tensor_bytes(&field.value)).sum::<usize>() as u64
    }
}

/// Returns the total size of the tensors in a value.
fn tensor_bytes(value: &FieldValue) -> usize {
    match value {
        FieldValue::Tensor(tensor) => tensor.bytes.as_ref().len(),
        FieldValue::Int(_) | FieldValue::Float(_) => 0,
        FieldValue::List(list) => list.iter().map(tensor_bytes).sum(),
    }
}

impl ReceivedTensors {
    /// Accepts items of at most `max_bytes`, and caches `cached_bytes` of them.
    pub(super) fn new(max_bytes: u64, cached_bytes: u64, cpu: CpuPool) -> Self {
        Self { max_bytes, items: ReceivedItems::new(cached_bytes), cpu }
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Accepts the tensors of an item, for the waiting task and for later ones.
    pub(super) fn put(&self, hash: MmHash, fields: Fields) {
        // Any tensors are expected, so this does not fail.
        let _ = self.items.put(hash, fields);
    }

    /// Returns the source of an item. `request` requests its tensors from the frontend.
    pub(super) fn source(
        self: &Arc<Self>,
        hash: MmHash,
        request: Arc<dyn Fn() + Send + Sync>,
    ) -> Arc<dyn MediaSource> {
        Arc::new(TensorSource { tensors: self.clone(), hash, request })
    }
}

struct TensorSource {
    tensors: Arc<ReceivedTensors>,
    hash: MmHash,
    request: Arc<dyn Fn() + Send + Sync>,
}

impl MediaSource for TensorSource {
    fn tensors(
        &self,
        order: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        async { self.place(order).await.map_err(SourceError::new) }.boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

impl TensorSource {
    /// Copies the tensors to memory that the engine reads.
    async fn place(&self, order: TensorRequest) -> Result<Option<Vec<ItemField>>, RequestError> {
        let ReceivedTensors { items, cpu, .. } = &*self.tensors;
        let _permit = items.lock(self.hash).await;
        // The previous holder of the permit may have sent the item to the same engine.
        if !(order.is_still_needed)() {
            return Ok(None);
        }
        let fields = items.get(self.hash, Box::new(|_| true), || (self.request)()).await?;
        let size = fields.iter().map(|field| tensor_bytes(&field.value)).sum();
        let ticket = CpuBudget::shared().ticket(price::copy(size))?;
        let placed = cpu.run(&ticket, move || {
            let place = |field: &ItemField| {
                let value = place_value(&field.value, &*order.memory);
                ItemField { name: field.name.clone(), field: field.field, value }
            };
            fields.iter().map(place).collect()
        });
        Ok(Some(placed.await?))
    }
}

/// Copies a value's large tensors to the engine's memory, if there is room.
fn place_value(value: &FieldValue, memory: &dyn TensorMemory) -> FieldValue {
    match value {
        FieldValue::Int(value) => FieldValue::Int(*value),
        FieldValue::Float(value) => FieldValue::Float(*value),
        FieldValue::List(list) => {
            FieldValue::List(list.iter().map(|value| place_value(value, memory)).collect())
        }
        FieldValue::Tensor(Tensor { dtype, shape, bytes }) => {
            let source = bytes.as_ref();
            let is_large = source.len() >= MIN_SLOT_BYTES;
            let slot = is_large.then(|| memory.reserve(source.len())).flatten();
            let bytes = match slot {
                Some(mut slot) => {
                    slot.copy_from_slice(source);
                    TensorBytes::Slot(slot.publish())
                }
                None => bytes.clone(),
            };
            FieldValue::Tensor(Tensor { dtype: *dtype, shape: shape.clone(), bytes })
        }
    }
}
