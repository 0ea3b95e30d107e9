//! The media items of a job: tensors that the engine lacks are fetched from the items' sources,
//! into memory that the engine can read.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use chiasm_backend::{
    FieldValue, ItemField, Job, JobError, JobItem, MediaObserver, SourceError, Tensor, TensorBytes,
    TensorMemory, TensorRequest,
};
use chiasm_transfer::{Arena, SlotWriter};
use chiasm_types::{MmHash, TensorField};
use futures_util::future::try_join_all;

use super::Engine;
use crate::EngineClient;
use crate::wire::{FieldKind, MmData, MmFeature, MmField, MmItem, WireTensor};

/// The tensors of a job's media items that have been fetched so far.
#[derive(Default)]
pub(super) struct Tensors {
    items: HashMap<MmHash, MmItem>,
}

impl Tensors {
    /// Fetches the tensors of the items that `filter` selects, each once even if the prompt repeats
    /// it. Skips items that are no longer selected when their source starts on them.
    ///
    /// Uses no slots if `without_slots` is set, because the engine has failed to read slots of this
    /// job.
    ///
    /// # Errors
    /// [`JobError::Source`]: a source fails, or makes a tensor whose size does not fit its shape.
    pub(super) async fn fetch(
        &mut self,
        engine: &Arc<Engine>,
        job: &Job,
        without_slots: bool,
        filter: &ItemFilter,
    ) -> Result<(), JobError> {
        let mut missing: HashMap<MmHash, &JobItem> = HashMap::new();
        for item in job.media.iter() {
            if !self.items.contains_key(&item.hash) && filter.selects(&item.name(), &engine.client)
            {
                missing.entry(item.hash).or_insert(item);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let memory: Arc<dyn TensorMemory> = Arc::new(EngineMemory::new(engine, without_slots));
        let fetched = try_join_all(missing.into_values().map(|item| {
            let name = item.name();
            let client = engine.client.clone();
            let filter = filter.clone();
            let request = TensorRequest {
                format: engine.format,
                model_dtype: engine.model_dtype,
                memory: memory.clone(),
                is_still_needed: Arc::new(move || filter.selects(&name, &client)),
            };
            // Called for all items before any is awaited, so that the source knows all the work.
            let fields = item.source.tensors(request);
            async move {
                let fields = fields.await.map_err(JobError::Source)?;
                let tensors = fields.map(to_item).transpose()?;
                Ok::<_, JobError>(tensors.map(|tensors| (item.hash, tensors)))
            }
        }))
        .await?;
        self.items.extend(fetched.into_iter().flatten());
        Ok(())
    }

    /// Returns the number of items whose tensors have been fetched.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns the features of all items, in the order of the prompt. They have the data that has
    /// been fetched; features of one item share it.
    pub(super) fn features(&self, job: &Job) -> Vec<MmFeature> {
        let feature = |item: &JobItem| {
            let name = item.name();
            MmFeature {
                data: self.items.get(&item.hash).cloned(),
                modality: item.modality.name().to_owned(),
                identifier: name.clone(),
                position: item.placeholder.clone(),
                mm_hash: Some(name),
            }
        };
        job.media.iter().map(feature).collect()
    }
}

/// A selection of a job's items.
#[derive(Clone)]
pub(super) enum ItemFilter {
    /// Items that the engine's receiver cache does not hold.
    NotHeld,
    /// Items with these names. The engine may hold them, but needs their data: a request whose
    /// items exceed its cache could evict one of its own.
    Named(Arc<[String]>),
}

impl ItemFilter {
    fn selects(&self, name: &str, client: &EngineClient) -> bool {
        match self {
            Self::NotHeld => !client.holds(name),
            Self::Named(names) => names.iter().any(|selected| selected == name),
        }
    }
}

/// The memory for an engine's tensors.
struct EngineMemory {
    location: Location,
    observer: Arc<dyn MediaObserver>,
}

enum Location {
    /// Slots of the engine's arena, as long as there is room.
    Arena(Arena),
    /// Memory of this process.
    Local,
    /// Memory of this process in place of an arena, for this cause.
    Fallback(&'static str),
}

impl EngineMemory {
    fn new(engine: &Engine, without_slots: bool) -> Self {
        let location = match engine.client.arena() {
            Some(_) if without_slots => Location::Fallback("engine_refused"),
            Some(arena) => Location::Arena(arena.clone()),
            None if engine.wants_arena => Location::Fallback("no_arena"),
            None => Location::Local,
        };
        Self { location, observer: engine.observer.clone() }
    }
}

impl TensorMemory for EngineMemory {
    fn reserve(&self, bytes: usize) -> Option<SlotWriter> {
        match &self.location {
            Location::Arena(arena) => arena
                .slot(bytes)
                .inspect_err(|error| self.observer.stepped_down(error.cause(), error))
                .ok(),
            Location::Local => None,
            Location::Fallback(cause) => {
                self.observer.stepped_down(cause, &"tensors are sent in messages");
                None
            }
        }
    }

    fn takes(&self, bytes: &TensorBytes) -> bool {
        match (&self.location, bytes) {
            (Location::Arena(arena), TensorBytes::Slot(slot)) => arena.owns(slot),
            (Location::Arena(_), TensorBytes::Here(_)) | (_, TensorBytes::Slot(_)) => false,
            (Location::Local | Location::Fallback(_), TensorBytes::Here(_)) => true,
        }
    }
}

/// A tensor whose size does not fit its shape, by its name.
#[derive(Debug)]
struct SizeMismatch(String);

impl fmt::Display for SizeMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' does not fit its shape", self.0)
    }
}

impl std::error::Error for SizeMismatch {}

/// Converts the tensors of a media item to vLLM's types.
///
/// # Errors
/// [`JobError::Source`]: a tensor's size does not fit its shape.
pub fn to_item(fields: Vec<ItemField>) -> Result<MmItem, JobError> {
    let field = |ItemField { name, field, value }: ItemField| {
        let name = name.into_owned();
        match to_data(value) {
            Some(data) => Ok((name, MmField { data: Some(data), kind: to_kind(field) })),
            None => Err(JobError::Source(SourceError::new(SizeMismatch(name)))),
        }
    };
    fields.into_iter().map(field).collect::<Result<_, _>>().map(MmItem)
}

fn to_kind(field: TensorField) -> FieldKind {
    match field {
        TensorField::Flat { rows, dim, keep_on_cpu } => {
            FieldKind::Flat { slices: vec![[Some(0), Some(rows as i64), None]], dim, keep_on_cpu }
        }
        TensorField::Batched { keep_on_cpu } => FieldKind::Batched { keep_on_cpu },
        TensorField::Shared { keep_on_cpu } => FieldKind::Shared { batch_size: 1, keep_on_cpu },
    }
}

/// Converts a field's value. Returns `None` if a tensor's size does not fit its shape.
fn to_data(value: FieldValue) -> Option<MmData> {
    Some(match value {
        FieldValue::Tensor(Tensor { dtype, shape, bytes }) => MmData::Tensor(match bytes {
            TensorBytes::Here(bytes) => WireTensor::new(dtype, shape, bytes)?,
            TensorBytes::Slot(slot) => WireTensor::in_slot(dtype, shape, slot)?,
        }),
        FieldValue::Int(value) => MmData::Int(value),
        FieldValue::Float(value) => MmData::Float(value),
        FieldValue::List(list) => {
            MmData::List(list.into_iter().map(to_data).collect::<Option<_>>()?)
        }
    })
}
