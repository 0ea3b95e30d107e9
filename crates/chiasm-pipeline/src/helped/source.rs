//! Where a helped item's tensors come from: from when it was planned, or from another call of the
//! processor.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use chiasm_backend::{
    EncodedItem, FieldValue, ItemField, MediaSource, SourceError, Tensor, TensorBytes,
    TensorMemory, TensorOrder,
};
use chiasm_media::{ByteBudget, EncodedMedia};
use chiasm_processor::{ItemTensor, ItemValue};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};
use tracing::Instrument;

use super::super::error::RequestError;
use super::{Held, Helped, HelpedSettings, Meaning};
use crate::cpu::{CpuBudget, price};

/// Tensors below this many bytes travel in messages: a slot costs more than they do.
const LARGE: usize = 4096;

/// One helped item of a request.
pub(super) struct HelpedSource {
    pub(super) helped: Arc<Helped>,
    pub(super) settings: Arc<HelpedSettings>,
    pub(super) encoded: EncodedMedia,
    pub(super) field: String,
    pub(super) key: MmHash,
    pub(super) meaning: Arc<Meaning>,
    /// The tensors that were there when the request was planned, for the first engine that wants
    /// them.
    pub(super) held: Mutex<Option<Arc<Held>>>,
    pub(super) cpu: CpuBudget,
}

impl MediaSource for HelpedSource {
    fn tensors(
        &self,
        order: TensorOrder,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        let span = tracing::debug_span!("process", hash = %self.key);
        let made = async {
            self.make(order).await.map_err(|error| SourceError::new(error.at(&self.field)))
        };
        made.instrument(span).boxed()
    }

    // What it becomes depends on the processor, too, and on how files are read.
    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

impl HelpedSource {
    async fn make(&self, order: TensorOrder) -> Result<Option<Vec<ItemField>>, RequestError> {
        let _permit = self.helped.one_at_a_time.acquire(self.key).await;
        // The one before may have sent it to the same engine.
        if !(order.still_wanted)() {
            return Ok(None);
        }
        let held = self
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .or_else(|| self.meaning.held());
        let held = match held {
            Some(held) => held,
            None => {
                let held = self.helped.make(&self.encoded, &self.settings, self.key).await?;
                self.meaning.remember(&held);
                held
            }
        };
        let ticket = self.cpu.ticket(price::copy(held.made.used() as usize))?;
        let budget = self.helped.budget.clone();
        let fields = self.helped.cpu.run(&ticket, move || {
            let room = Room { held: &held, memory: &*order.memory, budget: &budget };
            let field = |field: &chiasm_processor::ItemField| {
                let (name, join) = (Cow::Owned(field.name.clone()), field.field);
                Ok(ItemField { name, field: join, value: room.value(&field.value)? })
            };
            held.made.fields.iter().map(field).collect::<Result<Vec<_>, RequestError>>()
        });
        fields.await?.map(Some)
    }
}

/// Where an item's tensors are copied to.
struct Room<'a> {
    held: &'a Held,
    memory: &'a dyn TensorMemory,
    budget: &'a ByteBudget,
}

impl Room<'_> {
    fn value(&self, value: &ItemValue) -> Result<FieldValue, RequestError> {
        Ok(match value {
            ItemValue::Int(value) => FieldValue::Int(*value),
            ItemValue::Float(value) => FieldValue::Float(*value),
            ItemValue::List(list) => FieldValue::List(
                list.iter().map(|value| self.value(value)).collect::<Result<_, _>>()?,
            ),
            ItemValue::Tensor(tensor) => {
                let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                FieldValue::Tensor(Tensor { dtype, shape, bytes: self.bytes(tensor)? })
            }
        })
    }

    fn bytes(&self, tensor: &ItemTensor) -> Result<TensorBytes, RequestError> {
        let bytes = tensor.bytes();
        if bytes >= LARGE
            && let Some(mut slot) = self.memory.reserve(bytes)
        {
            self.held.made.read(tensor, &mut slot)?;
            return Ok(TensorBytes::Slot(slot.publish()));
        }
        let mut buffer = self.budget.buffer();
        self.held.made.read(tensor, buffer.extend_zeroed(bytes)?)?;
        Ok(TensorBytes::Here(buffer.freeze()))
    }
}
