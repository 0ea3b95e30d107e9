//! Media items that vLLM's own processor makes.
//!
//! The metadata of items is cached. An item's tensors are kept until the chosen engine has them.
//! The metadata of most recordings is predicted, so that they are made for an engine only.

mod conversation;
mod expansion;
mod identity;
mod processors;
mod recordings;
mod source;
mod start;
mod video_slots;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{MediaSource, PlanClass};
use chiasm_fleet::PresentClass;
use chiasm_limit::KeyedLimiter;
use chiasm_media::{ByteBudget, Charge, ContentHash, EncodedMedia};
use chiasm_metrics::{PipelineMetrics, Stage};
use chiasm_processor::{
    Greeting, ItemCall, ItemOutput, ItemValue, Processor, ProcessorOptions, PromptUpdate,
};
use chiasm_request::MediaKwargs;
use chiasm_types::{MmHash, Modality, TokenId, TokenRun};
use chiasm_video::VideoIndex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::error::RequestError;
use super::item::ItemPlan;
use chiasm_cpu::{CpuBudget, CpuPool, price};

pub(crate) use conversation::conversation;
pub(crate) use expansion::PromptItem;
use identity::{digest, sorted};
pub use processors::VllmProcessors;
use source::ProcessorItemSource;
use start::Start;
pub(crate) use video_slots::VideoSlots;

/// The maximum size of the cached metadata. Most items take a kilobyte, a long video takes a
/// hundred.
const MAX_METADATA_BYTES: u64 = 64 << 20;
/// The estimated number of items with cached metadata.
const ESTIMATED_ITEMS: usize = 1 << 14;
/// The time for which an item that could not be processed is not retried.
const FAILURE_TTL: Duration = Duration::from_secs(1);
/// The maximum number of remembered failures.
const MAX_FAILURES: usize = 1024;

/// The options of vLLM's own processors in this server.
#[derive(Clone, Debug)]
pub struct VllmProcessorOptions {
    /// The options of the process.
    pub processor: ProcessorOptions,
    /// The Pythons with other releases of vLLM, whose processors serve workers of those releases.
    pub other_pythons: Vec<PathBuf>,
    /// `true` if the server can't work without the processor.
    pub required: bool,
    /// `true` to start the processor with the server, not with the first item.
    pub at_start: bool,
    /// `true` if vLLM may have code that renders the model's conversations, because there is no
    /// chat template.
    pub may_render_conversations: bool,
    /// `true` if requests may change the processor's settings.
    pub trust_request_kwargs: bool,
    /// `true` to predict the metadata of recordings from their headers. Otherwise the processor
    /// makes them before their requests are routed.
    pub predicts_recordings: bool,
    /// The slots for decoding videos, which all processors share. A video takes one or more, by
    /// its cost.
    pub concurrent_videos: usize,
}

/// The processor of one release of vLLM, for one served model.
pub(crate) struct ReleaseProcessor {
    options: VllmProcessorOptions,
    start: Start,
    /// The digest of the model's files without the weights.
    model: ContentHash,
    metadata: Cache<MmHash, Arc<ItemMetadata>, ItemMetadataWeight>,
    failures: Cache<MmHash, (RequestError, Instant)>,
    single_flight: KeyedLimiter<MmHash>,
    videos: Arc<VideoSlots>,
    cpu: CpuPool,
    budget: ByteBudget,
    metrics: Arc<PipelineMetrics>,
}

/// The metadata of an item that is the same for all engines.
struct ItemMetadata {
    /// The alternative ways to expand the item in a prompt.
    updates: Vec<PromptUpdate>,
    /// The number of elements of the largest tensor.
    elements: u64,
    /// Set if the processor has not reported these metadata yet.
    is_predicted: bool,
    /// The item's tensors, if they are still in memory.
    tensors: Mutex<Weak<ItemTensors>>,
}

#[derive(Clone)]
struct ItemMetadataWeight;

impl Weighter<MmHash, Arc<ItemMetadata>> for ItemMetadataWeight {
    fn weight(&self, _: &MmHash, metadata: &Arc<ItemMetadata>) -> u64 {
        let runs = metadata
            .updates
            .iter()
            .map(|update| update.full.len() + update.is_embed.as_ref().map_or(0, Vec::len));
        512 + 16 * runs.sum::<usize>() as u64
    }
}

/// An item's tensors, charged to the memory budget while they are in memory.
struct ItemTensors {
    output: ItemOutput,
    _charge: Charge,
}

/// A processor, and a request's settings for it.
pub(crate) struct ProcessorSettings {
    processor: Processor,
    processor_kwargs: Map<String, Value>,
    /// The settings for reading files, by modality.
    io_kwargs: Map<String, Value>,
}

/// An item of a request whose metadata is known.
pub(crate) struct ProcessorItem {
    settings: Arc<ProcessorSettings>,
    encoded: EncodedMedia,
    field: String,
    /// Everything that changes the item's tensors, apart from the file.
    fingerprint: Vec<u8>,
    /// The item's identity, independent of any class of workers.
    key: MmHash,
    metadata: Arc<ItemMetadata>,
    /// The item's tensors, if they are still in memory.
    tensors: Option<Arc<ItemTensors>>,
}

impl ReleaseProcessor {
    fn new(
        options: VllmProcessorOptions,
        videos: Arc<VideoSlots>,
        cpu: CpuPool,
        budget: ByteBudget,
        metrics: Arc<PipelineMetrics>,
    ) -> Self {
        let metadata =
            Cache::with_weighter(ESTIMATED_ITEMS, MAX_METADATA_BYTES, ItemMetadataWeight);
        Self {
            metrics,
            start: Start::new(options.processor.clone()),
            model: digest(&options.processor.model),
            metadata,
            failures: Cache::new(MAX_FAILURES),
            single_flight: KeyedLimiter::new(1),
            videos,
            options,
            cpu,
            budget,
        }
    }

    /// Returns `true` if the processor is required and not running yet.
    fn is_missing(&self) -> bool {
        self.options.required && !self.start.is_running()
    }

    /// Returns `true` if vLLM's code renders the model's conversations. Waits for the processor if
    /// only the processor knows.
    ///
    /// # Errors
    /// Returns an error if a required processor is unavailable.
    async fn renders_conversations(&self) -> Result<bool, RequestError> {
        if !self.options.required && !self.options.may_render_conversations {
            return Ok(false);
        }
        match self.start.processor().await {
            Ok(processor) => Ok(processor.greeting().writes_conversations),
            Err(_) if !self.options.required => Ok(false),
            Err(error) => Err(RequestError::from(error).at("messages")),
        }
    }

    /// Checks a request's settings, and waits for the processor.
    ///
    /// # Errors
    /// Returns an error if the settings are invalid or not allowed, or if the processor is
    /// unavailable.
    pub(crate) async fn settings(
        &self,
        kwargs: &MediaKwargs,
    ) -> Result<Arc<ProcessorSettings>, RequestError> {
        let MediaKwargs { processor: processor_kwargs, io: io_kwargs } = kwargs;
        for (name, kwargs) in
            [("mm_processor_kwargs", processor_kwargs), ("media_io_kwargs", io_kwargs)]
        {
            if !kwargs.is_empty() && !self.options.trust_request_kwargs {
                let message =
                    format!("'{name}' is not allowed for these items (--trust-request-mm-kwargs)");
                return Err(RequestError::invalid(name, message));
            }
        }
        if processor_kwargs.get("use_audio_in_video").is_some_and(|value| !value.is_boolean()) {
            return Err(RequestError::invalid(
                "mm_processor_kwargs.use_audio_in_video",
                "'use_audio_in_video' must be true or false",
            ));
        }
        if let Some((modality, _)) = io_kwargs.iter().find(|(_, kwargs)| !kwargs.is_object()) {
            let field = format!("media_io_kwargs.{modality}");
            let message = format!("'{field}' must be an object");
            return Err(RequestError::invalid(field, message));
        }
        let processor = self.start.processor().await.map_err(RequestError::from)?;
        Ok(Arc::new(ProcessorSettings {
            processor,
            processor_kwargs: processor_kwargs.clone(),
            io_kwargs: io_kwargs.clone(),
        }))
    }

    /// Opens an item: gets its metadata from the cache, predicts them if it `may_predict`, or lets
    /// the processor make the item. Concurrent calls for one item make it once.
    ///
    /// # Errors
    /// Returns an error if the model does not support the modality, or if the processor fails.
    pub(crate) async fn open(
        &self,
        encoded: &EncodedMedia,
        settings: &Arc<ProcessorSettings>,
        field: &str,
        may_predict: bool,
    ) -> Result<ProcessorItem, RequestError> {
        let modality = &encoded.modality;
        if !settings.greeting().limits.contains_key(modality.name()) {
            return Err(RequestError::invalid(
                field,
                format!("the model does not support {modality}"),
            ));
        }
        let fingerprint = self.fingerprint(settings, modality);
        let key = chiasm_media::mm_hash(&encoded.content, modality, &fingerprint);
        let (metadata, tensors) = self.metadata(encoded, settings, key, may_predict).await?;
        Ok(ProcessorItem {
            settings: settings.clone(),
            encoded: encoded.clone(),
            field: field.to_owned(),
            fingerprint,
            key,
            metadata,
            tensors,
        })
    }

    /// Returns an item's metadata, and its tensors if they are in memory.
    async fn metadata(
        &self,
        encoded: &EncodedMedia,
        settings: &ProcessorSettings,
        key: MmHash,
        may_predict: bool,
    ) -> Result<(Arc<ItemMetadata>, Option<Arc<ItemTensors>>), RequestError> {
        if let Some(cached) = self.cached_metadata(&key, may_predict) {
            return Ok(cached);
        }
        let _permit = self.single_flight.acquire(key).await;
        if let Some(cached) = self.cached_metadata(&key, may_predict) {
            return Ok(cached);
        }
        self.check_failure(key)?;
        if let Some(predicted) = self.predict(encoded, settings, may_predict).await? {
            let metadata = Arc::new(predicted);
            self.metadata.insert(key, metadata.clone());
            return Ok((metadata, None));
        }
        let tensors = self.make(encoded, settings, key).await?;
        let metadata = Arc::new(ItemMetadata::from_tensors(&tensors));
        self.metadata.insert(key, metadata.clone());
        Ok((metadata, Some(tensors)))
    }

    /// Returns cached metadata, and the tensors if they are in memory. Predicted metadata that no
    /// tensors have confirmed are returned only if `may_predict`.
    fn cached_metadata(
        &self,
        key: &MmHash,
        may_predict: bool,
    ) -> Option<(Arc<ItemMetadata>, Option<Arc<ItemTensors>>)> {
        let metadata = self.metadata.get(key)?;
        let tensors = metadata.tensors();
        let is_known = !metadata.is_predicted || tensors.is_some();
        (may_predict || is_known).then_some((metadata, tensors))
    }

    /// Lets the processor make an item. The caller holds the item's single-flight permit.
    async fn make(
        &self,
        encoded: &EncodedMedia,
        settings: &ProcessorSettings,
        key: MmHash,
    ) -> Result<Arc<ItemTensors>, RequestError> {
        self.check_failure(key)?;
        let video_permit = match encoded.modality {
            Modality::Video => self.videos.acquire(self.decode_cost(&encoded.bytes).await?).await,
            _ => None,
        };
        let started = Instant::now();
        let call = ItemCall {
            modality: encoded.modality.name(),
            file: encoded.bytes.clone(),
            processor_kwargs: &settings.processor_kwargs,
            io_kwargs: &settings.io_kwargs,
        };
        let output = settings.processor.item(call).await.map_err(RequestError::from);
        drop(video_permit);
        self.metrics.observe_stage(Stage::Process, started.elapsed());
        let output = output.inspect_err(|error| {
            if error.is_permanent() {
                self.failures.insert(key, (error.clone(), Instant::now() + FAILURE_TTL));
            }
        })?;
        self.metrics.media_decoded.inc();
        let charge = self.budget.charge(output.used_bytes())?;
        Ok(Arc::new(ItemTensors { output, _charge: charge }))
    }

    /// Returns the error of the item's last processing if that was a moment ago.
    fn check_failure(&self, key: MmHash) -> Result<(), RequestError> {
        let Some((error, until)) = self.failures.get(&key) else { return Ok(()) };
        if Instant::now() < until {
            return Err(error);
        }
        self.failures.remove(&key);
        Ok(())
    }

    /// Returns the cost of decoding a whole video, or `None` if the file has no readable index.
    async fn decode_cost(&self, file: &Bytes) -> Result<Option<u64>, RequestError> {
        let ticket = CpuBudget::shared().ticket(price::video_index(file.len()))?;
        let file = file.clone();
        let read = move || VideoIndex::read(&file).ok().map(|index| index.decode_cost());
        Ok(self.cpu.run(&ticket, read).await?)
    }

    /// Returns the running processor, started if necessary.
    ///
    /// # Errors
    /// Returns the error of the last start.
    pub(crate) async fn processor(&self) -> Result<Processor, RequestError> {
        Ok(self.start.processor().await?)
    }

    /// Returns everything that changes an item's tensors, apart from its file: the processor and
    /// its settings.
    fn fingerprint(&self, settings: &ProcessorSettings, modality: &Modality) -> Vec<u8> {
        let io_kwargs = match modality {
            // A video's frames may be processed as images, and its soundtrack as audio.
            Modality::Video => Some(&settings.io_kwargs),
            modality => settings.io_kwargs.get(modality.name()).and_then(Value::as_object),
        };
        let parts = [
            "vLLM's processor",
            &settings.greeting().vllm,
            &self.model.to_string(),
            &Value::from(self.options.processor.vllm_flags.clone()).to_string(),
            &sorted(&settings.processor_kwargs).to_string(),
            &io_kwargs.map_or(Value::Null, sorted).to_string(),
        ];
        parts
            .iter()
            .fold(Vec::new(), |identity, part| PlanClass::item_identity(&identity, part.as_bytes()))
    }
}

impl ProcessorSettings {
    pub(crate) fn greeting(&self) -> &Greeting {
        self.processor.greeting()
    }

    /// Returns the maximum number of items of a modality in a prompt. Returns no limit for an
    /// unsupported modality, which is refused later.
    pub(crate) fn limit(&self, modality: &Modality) -> usize {
        let limit = self.greeting().limits.get(modality.name()).copied().flatten();
        let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        match self.marker_texts(modality).len() {
            0 | 1 => limit,
            numbered => limit.min(numbered),
        }
    }

    /// Returns `true` if a video's soundtrack is an item, too, within the video's placeholder
    /// (`use_audio_in_video` of Qwen2.5-Omni and others).
    pub(crate) fn uses_audio_in_video(&self) -> bool {
        self.processor_kwargs
            .get("use_audio_in_video")
            .is_some_and(|value| *value == Value::Bool(true))
    }

    /// Returns the texts that mark items in a conversation whose content is one string: one text
    /// for all items, one text per item, or none.
    pub(crate) fn marker_texts(&self, modality: &Modality) -> &[String] {
        self.greeting().placeholders.get(modality.name()).map_or(&[], Vec::as_slice)
    }

    /// Returns the maximum number of embeddings that every engine can encode at once.
    fn max_embeds(&self) -> usize {
        max_embeds(self.greeting())
    }
}

/// Returns the maximum number of embeddings of one item that every engine can encode at once.
fn max_embeds(greeting: &Greeting) -> usize {
    let max = greeting.max_tokens.values().max();
    max.map_or(0, |&tokens| usize::try_from(tokens).unwrap_or(usize::MAX))
}

impl ItemMetadata {
    fn from_tensors(tensors: &Arc<ItemTensors>) -> Self {
        fn elements(value: &ItemValue) -> u64 {
            match value {
                ItemValue::Tensor(tensor) => {
                    tensor.shape.iter().map(|&extent| extent as u64).product()
                }
                ItemValue::Int(_) | ItemValue::Float(_) => 1,
                ItemValue::List(list) => list.iter().map(elements).sum(),
            }
        }
        let output = &tensors.output;
        let elements = output.fields.iter().map(|field| elements(&field.value)).max().unwrap_or(0);
        Self {
            updates: output.updates.clone(),
            elements,
            is_predicted: false,
            tensors: Mutex::new(Arc::downgrade(tensors)),
        }
    }

    /// Returns canonical bytes of the item's tokens in a prompt.
    fn digest(&self) -> Vec<u8> {
        let runs = self.updates.iter().flat_map(|update| &update.full);
        runs.flat_map(|&(token, count)| [u64::from(token), count as u64])
            .flat_map(u64::to_le_bytes)
            .collect()
    }

    /// Returns the tensors if they are still in memory.
    fn tensors(&self) -> Option<Arc<ItemTensors>> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Remembers tensors that were made again.
    fn set_tensors(&self, tensors: &Arc<ItemTensors>) {
        *self.tensors.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(tensors);
    }
}

impl ProcessorItem {
    /// Plans the item for workers of a class. `embeds` is the number of embeddings in its
    /// placeholder.
    ///
    /// # Errors
    /// Returns an error if no worker of the class can encode that many embeddings at once.
    pub(crate) fn plan(
        &self,
        processor: &Arc<ReleaseProcessor>,
        embeds: usize,
        class: &PresentClass,
        cpu: &CpuBudget,
    ) -> Result<ItemPlan, RequestError> {
        let max_embeds = self.settings.max_embeds();
        let encoder_tokens = if embeds <= class.min_batched_tokens.max(max_embeds) {
            0
        } else if embeds <= class.max_batched_tokens {
            embeds
        } else {
            let limit = class.max_batched_tokens.max(max_embeds);
            let message = format!(
                "the item would take {embeds} tokens, \
                 more than engines can encode at once ({limit})"
            );
            return Err(RequestError::invalid(&self.field, message));
        };
        let modality = self.encoded.modality.clone();
        let mut identity = PlanClass::item_identity(&class.class.processor, &self.fingerprint);
        if modality == Modality::Audio {
            // Another prediction is another item, so an engine never pairs cached tensors with
            // wrong tokens.
            identity = PlanClass::item_identity(&identity, &self.metadata.digest());
        }
        let hash = chiasm_media::mm_hash(&self.encoded.content, &modality, &identity);
        Ok(ItemPlan {
            modality,
            hash,
            // The prompt has been expanded already.
            runs: Vec::new(),
            embeds,
            elements: self.metadata.elements,
            encoder_tokens,
            source: self.source(processor, cpu),
        })
    }

    /// Returns the source of the item's tensors.
    pub(crate) fn source(
        &self,
        processor: &Arc<ReleaseProcessor>,
        cpu: &CpuBudget,
    ) -> Arc<dyn MediaSource> {
        Arc::new(ProcessorItemSource {
            processor: processor.clone(),
            settings: self.settings.clone(),
            encoded: self.encoded.clone(),
            field: self.field.clone(),
            key: self.key,
            metadata: self.metadata.clone(),
            tensors: Mutex::new(self.tensors.clone()),
            mismatched: OnceLock::new(),
            cpu: cpu.clone(),
        })
    }

    /// Returns the marker and its replacement, if replacing the marker is the only way to expand
    /// the item.
    pub(crate) fn replacement(&self) -> Option<(Vec<TokenId>, Vec<TokenRun>)> {
        expansion::replacement(&self.metadata.updates)
    }

    pub(crate) fn modality(&self) -> &Modality {
        &self.encoded.modality
    }

    fn updates(&self) -> &[PromptUpdate] {
        &self.metadata.updates
    }
}
