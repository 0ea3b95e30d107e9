//! Items whose tensors the frontend has made.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    EncodedItem, FieldValue, ItemField, MediaSource, SourceError, Tensor, TensorBytes,
    TensorMemory, TensorOrder,
};
use chiasm_limit::KeyedLimiter;
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::super::error::RequestError;
use crate::cpu::{CpuBudget, CpuPool, price};

/// How long tensors may take from the frontend that has them, or makes them again. Requests have
/// deadlines of their own.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// Tensors below this many bytes travel in messages: a slot costs more than they do.
const LARGE: usize = 4096;

type Fields = Arc<Vec<ItemField>>;

/// Tensors as they came: kept for a while, for other engines of this machine.
pub(super) struct Tensors {
    max_bytes: u64,
    kept: Option<Cache<MmHash, Fields, Weight>>,
    one_at_a_time: KeyedLimiter<MmHash>,
    /// Who waits for an item's: one at most, who has the item's turn.
    waiting: Mutex<HashMap<MmHash, oneshot::Sender<Fields>>>,
    cpu: CpuPool,
}

#[derive(Clone)]
struct Weight;

impl Weighter<MmHash, Fields> for Weight {
    fn weight(&self, _: &MmHash, fields: &Fields) -> u64 {
        1024 + fields.iter().map(|field| bytes(&field.value)).sum::<usize>() as u64
    }
}

fn bytes(value: &FieldValue) -> usize {
    match value {
        FieldValue::Tensor(tensor) => tensor.bytes.as_ref().len(),
        FieldValue::Int(_) | FieldValue::Float(_) => 0,
        FieldValue::List(list) => list.iter().map(bytes).sum(),
    }
}

impl Tensors {
    /// Takes items of so many bytes at most, and keeps so many bytes of them.
    pub(super) fn new(max_bytes: u64, kept_bytes: u64, cpu: CpuPool) -> Self {
        // One shard: an item may take as much as all of it.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(kept_bytes)
            .estimated_items_capacity(1 << 10)
            .build();
        let cache =
            |options| Cache::with_options(options, Weight, Default::default(), Default::default());
        let kept = options.ok().filter(|_| kept_bytes > 0).map(cache);
        Self {
            max_bytes,
            kept,
            one_at_a_time: KeyedLimiter::new(1),
            waiting: Mutex::default(),
            cpu,
        }
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Takes in what has come, for who waits for it and whoever asks soon.
    pub(super) fn put(&self, hash: MmHash, fields: Vec<ItemField>) {
        let fields = Arc::new(fields);
        if let Some(kept) = &self.kept {
            kept.insert(hash, fields.clone());
        }
        if let Some(waits) = self.waiting().remove(&hash) {
            let _ = waits.send(fields);
        }
    }

    /// An item whose frontend `ask` asks.
    pub(super) fn source(
        self: &Arc<Self>,
        hash: MmHash,
        ask: Arc<dyn Fn() + Send + Sync>,
    ) -> Arc<dyn MediaSource> {
        Arc::new(TensorSource { tensors: self.clone(), hash, ask })
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<MmHash, oneshot::Sender<Fields>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct TensorSource {
    tensors: Arc<Tensors>,
    hash: MmHash,
    ask: Arc<dyn Fn() + Send + Sync>,
}

impl MediaSource for TensorSource {
    fn tensors(
        &self,
        order: TensorOrder,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        async { self.take(order).await.map_err(SourceError::new) }.boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

impl TensorSource {
    async fn take(&self, order: TensorOrder) -> Result<Option<Vec<ItemField>>, RequestError> {
        let Tensors { one_at_a_time, cpu, .. } = &*self.tensors;
        let _permit = one_at_a_time.acquire(self.hash).await;
        // The one before may have sent it to the same engine.
        if !(order.still_wanted)() {
            return Ok(None);
        }
        let fields = self.fields().await?;
        let size = fields.iter().map(|field| bytes(&field.value)).sum();
        let ticket = CpuBudget::shared().ticket(price::copy(size))?;
        let placed = cpu.run(&ticket, move || {
            let place = |field: &ItemField| {
                let value = place(&field.value, &*order.memory);
                ItemField { name: field.name.clone(), field: field.field, value }
            };
            fields.iter().map(place).collect()
        });
        Ok(Some(placed.await?))
    }

    /// What is kept, or comes. The caller has the item's turn.
    async fn fields(&self) -> Result<Fields, RequestError> {
        if let Some(fields) = self.tensors.kept.as_ref().and_then(|kept| kept.get(&self.hash)) {
            return Ok(fields);
        }
        let (here, came) = oneshot::channel();
        self.tensors.waiting().insert(self.hash, here);
        let _waits = Waits(self);
        (self.ask)();
        let came = timeout(PATIENCE, came).await;
        let lost = || RequestError::internal("the frontend did not send a media item's tensors");
        came.ok().and_then(Result::ok).ok_or_else(lost)
    }
}

/// Forgets, when dropped, who waits no more.
struct Waits<'a>(&'a TensorSource);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.tensors.waiting().remove(&self.0.hash);
    }
}

/// The value where an engine finds it.
fn place(value: &FieldValue, memory: &dyn TensorMemory) -> FieldValue {
    match value {
        FieldValue::Int(value) => FieldValue::Int(*value),
        FieldValue::Float(value) => FieldValue::Float(*value),
        FieldValue::List(list) => {
            FieldValue::List(list.iter().map(|value| place(value, memory)).collect())
        }
        FieldValue::Tensor(Tensor { dtype, shape, bytes }) => {
            let from = bytes.as_ref();
            let slot = (from.len() >= LARGE).then(|| memory.reserve(from.len())).flatten();
            let bytes = match slot {
                Some(mut slot) => {
                    slot.copy_from_slice(from);
                    TensorBytes::Slot(slot.publish())
                }
                None => bytes.clone(),
            };
            FieldValue::Tensor(Tensor { dtype: *dtype, shape: shape.clone(), bytes })
        }
    }
}
