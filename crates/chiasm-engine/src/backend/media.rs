//! Media items on their way to the engine: what it lacks is asked of the items' sources, in the
//! memory that it reads.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use chiasm_backend::{
    FieldValue, ItemField, Job, JobError, JobItem, MediaObserver, SourceError, Tensor, TensorBytes,
    TensorMemory, TensorOrder,
};
use chiasm_transfer::{Arena, SlotWriter};
use chiasm_types::{MmHash, TensorField};
use futures_util::future::try_join_all;

use super::Engine;
use crate::EngineClient;
use crate::wire::{FieldKind, MmData, MmFeature, MmField, MmItem, WireTensor};

/// The tensors of a job's media items that have been had so far.
#[derive(Default)]
pub(super) struct Tensors {
    items: HashMap<MmHash, MmItem>,
}

impl Tensors {
    /// Gets the tensors of the items that are wanted, each once however often it stands in the
    /// prompt. What is not wanted any more when its turn comes is left out. With `refused`, the
    /// engine has failed to read slots of this job before.
    pub(super) async fn get(
        &mut self,
        engine: &Arc<Engine>,
        job: &Job,
        refused: bool,
        wanted: &Wanted,
    ) -> Result<(), JobError> {
        let mut lacking: HashMap<MmHash, &JobItem> = HashMap::new();
        for item in job.media.iter() {
            if !self.items.contains_key(&item.hash) && wanted.includes(&item.name(), &engine.client)
            {
                lacking.entry(item.hash).or_insert(item);
            }
        }
        if lacking.is_empty() {
            return Ok(());
        }
        let memory: Arc<dyn TensorMemory> = Arc::new(Memory::of(engine, refused));
        let got = try_join_all(lacking.into_values().map(|item| {
            let (name, client, wanted) = (item.name(), engine.client.clone(), wanted.clone());
            let order = TensorOrder {
                format: engine.format,
                memory: memory.clone(),
                still_wanted: Arc::new(move || wanted.includes(&name, &client)),
            };
            async move {
                let tensors = item.source.tensors(order).await.map_err(JobError::Source)?;
                let item =
                    tensors.map(|tensors| to_item(tensors).map(|tensors| (item.hash, tensors)));
                item.transpose()
            }
        }))
        .await?;
        self.items.extend(got.into_iter().flatten());
        Ok(())
    }

    /// How many items' tensors there are.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// The features of all items, in the order of the prompt; with data where it was had. Places of
    /// one item share it.
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

/// A choice among a job's items.
#[derive(Clone)]
pub(super) enum Wanted {
    /// All that the engine's receiver cache does not hold.
    Lacking,
    /// These, by their names: the engine wants them with their data although it may hold them, as a
    /// request whose items exceed its cache could evict one of its own.
    These(Arc<[String]>),
}

impl Wanted {
    fn includes(&self, name: &str, client: &EngineClient) -> bool {
        match self {
            Self::Lacking => !client.holds(name),
            Self::These(names) => names.iter().any(|wanted| wanted == name),
        }
    }
}

/// Where tensors for an engine are written.
struct Memory {
    place: Place,
    observer: Arc<dyn MediaObserver>,
}

enum Place {
    /// Slots of the engine's arena, as long as there is room.
    Arena(Arena),
    /// Memory of this process.
    Here,
    /// Memory of this process although shared memory was wanted, for this cause.
    HereFor(&'static str),
}

impl Memory {
    fn of(engine: &Engine, refused: bool) -> Self {
        let place = match engine.client.arena() {
            Some(_) if refused => Place::HereFor("engine_refused"),
            Some(arena) => Place::Arena(arena.clone()),
            None if engine.wants_arena => Place::HereFor("no_arena"),
            None => Place::Here,
        };
        Self { place, observer: engine.observer.clone() }
    }
}

impl TensorMemory for Memory {
    fn reserve(&self, bytes: usize) -> Option<SlotWriter> {
        match &self.place {
            Place::Arena(arena) => arena
                .slot(bytes)
                .inspect_err(|no_slot| self.observer.stepped_down(no_slot.cause(), no_slot))
                .ok(),
            Place::Here => None,
            Place::HereFor(cause) => {
                self.observer.stepped_down(cause, &"tensors travel in messages");
                None
            }
        }
    }

    fn takes(&self, bytes: &TensorBytes) -> bool {
        match (&self.place, bytes) {
            (Place::Arena(arena), TensorBytes::Slot(slot)) => arena.owns(slot),
            (Place::Arena(_), TensorBytes::Here(_)) | (_, TensorBytes::Slot(_)) => false,
            (Place::Here | Place::HereFor(_), TensorBytes::Here(_)) => true,
        }
    }
}

/// A source made a tensor whose bytes are not what its shape needs.
#[derive(Debug)]
struct Misshapen(String);

impl fmt::Display for Misshapen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' does not fit its shape", self.0)
    }
}

impl std::error::Error for Misshapen {}

/// The tensors of a media item as vLLM's own types have them.
///
/// # Errors
/// [`JobError::Source`] if a tensor's bytes are not what its shape needs.
pub fn to_item(fields: Vec<ItemField>) -> Result<MmItem, JobError> {
    let field = |ItemField { name, field, value }: ItemField| {
        let name = name.into_owned();
        match to_data(value) {
            Some(data) => Ok((name, MmField { data: Some(data), kind: to_kind(field) })),
            None => Err(JobError::Source(SourceError::new(Misshapen(name)))),
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

/// `None` if a tensor's bytes are not what its shape needs.
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
