//! The source of a processor item's tensors: the tensors from its planning, or another call of the
//! processor.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use chiasm_backend::{
    EncodedItem, FieldValue, ItemField, MediaSource, SourceError, Tensor, TensorBytes,
    TensorMemory, TensorRequest,
};
use chiasm_media::{ByteBudget, EncodedMedia};
use chiasm_processor::{ItemTensor, ItemValue};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};
use tracing::Instrument;

use super::super::error::RequestError;
use super::{ItemMetadata, ItemTensors, ProcessorSettings, ReleaseProcessor};
use chiasm_cpu::{CpuBudget, price};

/// The minimum size of a tensor in shared memory. Smaller tensors are sent in messages, which cost
/// less than a slot.
const MIN_SLOT_BYTES: usize = 4096;

/// The tensors of one item of a request.
pub(super) struct ProcessorItemSource {
    pub(super) processor: Arc<ReleaseProcessor>,
    pub(super) settings: Arc<ProcessorSettings>,
    pub(super) encoded: EncodedMedia,
    pub(super) field: String,
    pub(super) key: MmHash,
    pub(super) metadata: Arc<ItemMetadata>,
    /// The tensors that were in memory when the request was planned, for the first engine that
    /// requests them.
    pub(super) tensors: Mutex<Option<Arc<ItemTensors>>>,
    /// Tensors with other tokens than were predicted. They stay in memory until the request has
    /// been planned again.
    pub(super) mismatched: OnceLock<Arc<ItemTensors>>,
    pub(super) cpu: CpuBudget,
}

impl MediaSource for ProcessorItemSource {
    fn tensors(
        &self,
        order: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        let span = tracing::debug_span!("process", hash = %self.key);
        let fields = async {
            self.make(order).await.map_err(|error| SourceError::new(error.at(&self.field)))
        };
        fields.instrument(span).boxed()
    }

    // The file alone is not enough: the tensors also depend on the processor and its settings.
    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

impl ProcessorItemSource {
    async fn make(&self, order: TensorRequest) -> Result<Option<Vec<ItemField>>, RequestError> {
        let _permit = self.processor.single_flight.acquire(self.key).await;
        // The previous holder of the permit may have sent the item to the same engine.
        if !(order.is_still_needed)() {
            return Ok(None);
        }
        let planned = self.tensors.lock().unwrap_or_else(PoisonError::into_inner).take();
        let tensors = match planned.or_else(|| self.metadata.tensors()) {
            Some(tensors) => tensors,
            None => {
                let tensors = self.make_planned().await?;
                self.metadata.set_tensors(&tensors);
                tensors
            }
        };
        let ticket = self.cpu.ticket(price::copy(tensors.output.used_bytes() as usize))?;
        let budget = self.processor.budget.clone();
        let fields = self.processor.cpu.run(&ticket, move || {
            let copier =
                TensorCopier { tensors: &tensors, memory: &*order.memory, budget: &budget };
            let field = |field: &chiasm_processor::ItemField| {
                let name = Cow::Owned(field.name.clone());
                Ok(ItemField { name, field: field.field, value: copier.value(&field.value)? })
            };
            tensors.output.fields.iter().map(field).collect::<Result<Vec<_>, RequestError>>()
        });
        fields.await?.map(Some)
    }
}

impl ProcessorItemSource {
    /// Lets the processor make the item.
    ///
    /// # Errors
    /// Returns an error if the item's metadata were predicted and are wrong. The true ones replace
    /// them, so planning the request again succeeds.
    async fn make_planned(&self) -> Result<Arc<ItemTensors>, RequestError> {
        let Self { processor, metadata, .. } = self;
        let stale = || RequestError::stale_plan("the recording's length differs from its header's");
        // This request or another one has found out already.
        let is_replaced = || {
            let now = processor.metadata.get(&self.key);
            metadata.is_predicted && now.is_some_and(|now| now.updates != metadata.updates)
        };
        if self.mismatched.get().is_some() || is_replaced() {
            return Err(stale());
        }
        let tensors = processor.make(&self.encoded, &self.settings, self.key).await?;
        if processor.confirm(self.key, metadata, &tensors) {
            return Ok(tensors);
        }
        self.mismatched.get_or_init(|| tensors);
        Err(stale())
    }
}

/// Copies an item's tensors to memory that the engine reads.
struct TensorCopier<'a> {
    tensors: &'a ItemTensors,
    memory: &'a dyn TensorMemory,
    budget: &'a ByteBudget,
}

impl TensorCopier<'_> {
    fn value(&self, value: &ItemValue) -> Result<FieldValue, RequestError> {
        Ok(match value {
            ItemValue::Int(value) => FieldValue::Int(*value),
            ItemValue::Float(value) => FieldValue::Float(*value),
            ItemValue::List(list) => FieldValue::List(
                list.iter().map(|value| self.value(value)).collect::<Result<_, _>>()?,
            ),
            ItemValue::Tensor(tensor) => {
                let shape = tensor.shape.clone();
                let bytes = self.copy(tensor)?;
                FieldValue::Tensor(Tensor { dtype: tensor.dtype, shape, bytes })
            }
        })
    }

    fn copy(&self, tensor: &ItemTensor) -> Result<TensorBytes, RequestError> {
        let bytes = tensor.byte_len();
        if bytes >= MIN_SLOT_BYTES
            && let Some(mut slot) = self.memory.reserve(bytes)
        {
            self.tensors.output.read(tensor, &mut slot)?;
            return Ok(TensorBytes::Slot(slot.publish()));
        }
        let mut buffer = self.budget.buffer();
        self.tensors.output.read(tensor, buffer.extend_zeroed(bytes)?)?;
        Ok(TensorBytes::Here(buffer.freeze()))
    }
}
