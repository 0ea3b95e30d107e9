//! Tensors that frontends have made.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    EncodedItem, FieldValue, ItemField, MediaSource, SourceError, Tensor, TensorBytes,
    TensorMemory, TensorRequest,
};
use chiasm_limit::KeyedLimiter;
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::super::error::RequestError;
use chiasm_cpu::{CpuBudget, CpuPool, price};

/// The timeout for tensors from the frontend that has them, or makes them again. Requests have
/// their own deadlines.
pub(super) const TENSORS_TIMEOUT: Duration = Duration::from_secs(120);

/// The minimum size of a tensor in shared memory. Smaller tensors are sent in messages, which cost
/// less than a slot.
const MIN_SLOT_BYTES: usize = 4096;

type Fields = Arc<Vec<ItemField>>;

/// The received tensors, cached for other engines of this machine.
pub(super) struct ReceivedTensors {
    max_bytes: u64,
    cache: Option<Cache<MmHash, Fields, Weight>>,
    single_flight: KeyedLimiter<MmHash>,
    /// The task that waits for each item; only the holder of the item's permit waits.
    waiting: Mutex<HashMap<MmHash, oneshot::Sender<Fields>>>,
    cpu: CpuPool,
}

#[derive(Clone)]
struct Weight;

impl Weighter<MmHash, Fields> for Weight {
    fn weight(&self, _: &MmHash, fields: &Fields) -> u64 {
        1024 + fields.iter().map(|field| tensor_bytes(&field.value)).sum::<usize>() as u64
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
        // A single shard, so that one item may use the whole capacity.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(cached_bytes)
            .estimated_items_capacity(1 << 10)
            .build();
        let cache =
            |options| Cache::with_options(options, Weight, Default::default(), Default::default());
        let cache = options.ok().filter(|_| cached_bytes > 0).map(cache);
        Self {
            max_bytes,
            cache,
            single_flight: KeyedLimiter::new(1),
            waiting: Mutex::default(),
            cpu,
        }
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Accepts the tensors of an item, for the waiting task and for later ones.
    pub(super) fn put(&self, hash: MmHash, fields: Vec<ItemField>) {
        let fields = Arc::new(fields);
        if let Some(cache) = &self.cache {
            cache.insert(hash, fields.clone());
        }
        if let Some(sender) = self.waiting().remove(&hash) {
            let _ = sender.send(fields);
        }
    }

    /// Returns the source of an item. `request` requests its tensors from the frontend.
    pub(super) fn source(
        self: &Arc<Self>,
        hash: MmHash,
        request: Arc<dyn Fn() + Send + Sync>,
    ) -> Arc<dyn MediaSource> {
        Arc::new(TensorSource { tensors: self.clone(), hash, request })
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<MmHash, oneshot::Sender<Fields>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
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
        let ReceivedTensors { single_flight, cpu, .. } = &*self.tensors;
        let _permit = single_flight.acquire(self.hash).await;
        // The previous holder of the permit may have sent the item to the same engine.
        if !(order.is_still_needed)() {
            return Ok(None);
        }
        let fields = self.fields().await?;
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

    /// Returns the tensors from the cache, or from the frontend. The caller holds the item's
    /// permit.
    async fn fields(&self) -> Result<Fields, RequestError> {
        let cache = self.tensors.cache.as_ref();
        if let Some(fields) = cache.and_then(|cache| cache.get(&self.hash)) {
            return Ok(fields);
        }
        let (sender, receiver) = oneshot::channel();
        self.tensors.waiting().insert(self.hash, sender);
        let _guard = WaitGuard(self);
        (self.request)();
        let fields = timeout(TENSORS_TIMEOUT, receiver).await;
        let lost = || RequestError::internal("the frontend did not send a media item's tensors");
        fields.ok().and_then(Result::ok).ok_or_else(lost)
    }
}

/// Removes the waiting task when dropped.
struct WaitGuard<'a>(&'a TensorSource);

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        self.0.tensors.waiting().remove(&self.0.hash);
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
