//! Media items that vLLM's own processor makes: what each means is remembered, its tensors are kept
//! for the engine that is chosen.

mod conversation;
mod expansion;
mod helpers;
mod identity;
mod source;
mod start;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use chiasm_backend::PlanClass;
use chiasm_fleet::PresentClass;
use chiasm_limit::KeyedLimiter;
use chiasm_media::{ByteBudget, Charge, ContentHash, EncodedMedia};
use chiasm_processor::{
    Greeting, ItemCall, ItemValue, MadeItem, Processor, ProcessorOptions, PromptUpdate,
};
use chiasm_request::MediaKwargs;
use chiasm_types::{MmHash, Modality, TokenId, TokenRun};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::error::RequestError;
use super::item::ItemPlan;
use crate::cpu::{CpuBudget, CpuPool};
use crate::metrics::{PipelineMetrics, Stage};

pub(crate) use conversation::conversation;
pub(crate) use expansion::Written;
pub use helpers::Helpers;
use identity::{digest, sorted};
use source::HelpedSource;
use start::Start;

/// Bytes of meanings that are remembered, and some number of them: most take a kilobyte, that of a
/// long video a hundred.
const KNOWN_BYTES: u64 = 64 << 20;
const KNOWN: usize = 1 << 14;
/// How long an item that could not be made is not tried again, and how many of them are remembered.
const FAILURES_LAST: Duration = Duration::from_secs(1);
const KNOWN_FAILURES: usize = 1024;

/// What vLLM's own processor is asked for in this server.
#[derive(Clone, Debug)]
pub struct HelperOptions {
    /// How it is started.
    pub processor: ProcessorOptions,
    /// Pythons with other releases of vLLM, whose processors make items for workers of those.
    pub other_pythons: Vec<PathBuf>,
    /// Without it the server is of no use.
    pub required: bool,
    /// It is started with the server, and not by the first item.
    pub at_start: bool,
    /// vLLM may have code that writes the model's conversations: there is no chat template.
    pub may_write_conversations: bool,
    /// Requests may change its settings.
    pub trust_request_kwargs: bool,
    /// Videos that are decoded at once, by all processors together.
    pub concurrent_videos: usize,
}

/// The media items of one served model that one release of vLLM's own processor makes.
pub(crate) struct Helped {
    options: HelperOptions,
    start: Start,
    /// Digest of the model's files that are no weights.
    model: ContentHash,
    known: Cache<MmHash, Arc<Meaning>, MeaningBytes>,
    failures: Cache<MmHash, (RequestError, Instant)>,
    one_at_a_time: KeyedLimiter<MmHash>,
    videos: Arc<Semaphore>,
    cpu: CpuPool,
    budget: ByteBudget,
    metrics: Arc<PipelineMetrics>,
}

/// What an item means for prompts, whatever engine they go to.
struct Meaning {
    updates: Vec<PromptUpdate>,
    /// Elements of its largest tensor.
    elements: u64,
    /// Its tensors, if somebody still has them.
    held: Mutex<Weak<Held>>,
}

#[derive(Clone)]
struct MeaningBytes;

impl Weighter<MmHash, Arc<Meaning>> for MeaningBytes {
    fn weight(&self, _: &MmHash, meaning: &Arc<Meaning>) -> u64 {
        let runs = meaning
            .updates
            .iter()
            .map(|update| update.full.len() + update.is_embed.as_ref().map_or(0, Vec::len));
        512 + 16 * runs.sum::<usize>() as u64
    }
}

/// An item's tensors, which are counted for as long as somebody may want them.
struct Held {
    made: MadeItem,
    _charge: Charge,
}

/// A request's settings for its items, and who they are for.
pub(crate) struct HelpedSettings {
    processor: Processor,
    processor_kwargs: Map<String, Value>,
    /// Settings of how files are read, by modality.
    io_kwargs: Map<String, Value>,
}

/// An item of a request whose meaning is known.
pub(crate) struct HelpedItem {
    settings: Arc<HelpedSettings>,
    encoded: EncodedMedia,
    field: String,
    /// Everything but the file that changes its tensors.
    fingerprint: Vec<u8>,
    /// Its identity apart from any class of workers.
    key: MmHash,
    meaning: Arc<Meaning>,
    /// Its tensors if they are still there.
    held: Option<Arc<Held>>,
}

impl Helped {
    fn new(
        options: HelperOptions,
        videos: Arc<Semaphore>,
        cpu: CpuPool,
        budget: ByteBudget,
        metrics: Arc<PipelineMetrics>,
    ) -> Self {
        let known = Cache::with_weighter(KNOWN, KNOWN_BYTES, MeaningBytes);
        Self {
            metrics,
            start: Start::new(options.processor.clone()),
            model: digest(&options.processor.model),
            known,
            failures: Cache::new(KNOWN_FAILURES),
            one_at_a_time: KeyedLimiter::new(1),
            videos,
            options,
            cpu,
            budget,
        }
    }

    /// Whether the model takes no media without it, and it is not there yet.
    fn is_missed(&self) -> bool {
        self.options.required && !self.start.is_there()
    }

    /// Whether the model's conversations are written by vLLM's code. Waits for the processor if
    /// only that can tell.
    ///
    /// # Errors
    /// The processor has to be there, and is not.
    async fn writes_conversations(&self) -> Result<bool, RequestError> {
        if !self.options.required && !self.options.may_write_conversations {
            return Ok(false);
        }
        match self.start.processor().await {
            Ok(processor) => Ok(processor.greeting().writes_conversations),
            Err(_) if !self.options.required => Ok(false),
            Err(error) => Err(RequestError::from(error).at("messages")),
        }
    }

    /// Reads a request's settings.
    pub(crate) async fn settings(
        &self,
        kwargs: &MediaKwargs,
    ) -> Result<Arc<HelpedSettings>, RequestError> {
        let MediaKwargs { processor: processor_kwargs, io: io_kwargs } = kwargs;
        for (name, kwargs) in
            [("mm_processor_kwargs", processor_kwargs), ("media_io_kwargs", io_kwargs)]
        {
            if !kwargs.is_empty() && !self.options.trust_request_kwargs {
                let message =
                    format!("'{name}' is not taken for these items (--trust-request-mm-kwargs)");
                return Err(RequestError::invalid(name, message));
            }
        }
        if processor_kwargs.get("use_audio_in_video").is_some_and(|value| !value.is_boolean()) {
            return Err(RequestError::invalid(
                "mm_processor_kwargs.use_audio_in_video",
                "it must be true or false",
            ));
        }
        if let Some((modality, _)) = io_kwargs.iter().find(|(_, kwargs)| !kwargs.is_object()) {
            return Err(RequestError::invalid(
                format!("media_io_kwargs.{modality}"),
                "it must be an object",
            ));
        }
        let processor = self.start.processor().await.map_err(RequestError::from)?;
        let (processor_kwargs, io_kwargs) = (processor_kwargs.clone(), io_kwargs.clone());
        Ok(Arc::new(HelpedSettings { processor, processor_kwargs, io_kwargs }))
    }

    /// What an item means. The processor makes it if that is not known; once for all who want to
    /// know it at the same time.
    pub(crate) async fn open(
        &self,
        encoded: &EncodedMedia,
        settings: &Arc<HelpedSettings>,
        field: &str,
    ) -> Result<HelpedItem, RequestError> {
        let modality = &encoded.modality;
        if !settings.greeting().limits.contains_key(modality.name()) {
            return Err(RequestError::invalid(field, format!("the model takes no {modality}")));
        }
        let fingerprint = self.fingerprint(settings, modality);
        let key = chiasm_media::mm_hash(&encoded.content, modality, &fingerprint);
        let (meaning, held) = match self.known(&key) {
            Some(known) => known,
            None => {
                let _permit = self.one_at_a_time.acquire(key).await;
                match self.known(&key) {
                    Some(known) => known,
                    None => {
                        let held = self.make(encoded, settings, key).await?;
                        let meaning = Arc::new(Meaning::of(&held));
                        self.known.insert(key, meaning.clone());
                        (meaning, Some(held))
                    }
                }
            }
        };
        let (settings, encoded, field) = (settings.clone(), encoded.clone(), field.to_owned());
        Ok(HelpedItem { settings, encoded, field, fingerprint, key, meaning, held })
    }

    fn known(&self, key: &MmHash) -> Option<(Arc<Meaning>, Option<Arc<Held>>)> {
        self.known.get(key).map(|meaning| {
            let held = meaning.held();
            (meaning, held)
        })
    }

    /// Has an item made. The caller has the item's turn.
    async fn make(
        &self,
        encoded: &EncodedMedia,
        settings: &HelpedSettings,
        key: MmHash,
    ) -> Result<Arc<Held>, RequestError> {
        if let Some((error, until)) = self.failures.get(&key) {
            if Instant::now() < until {
                return Err(error);
            }
            self.failures.remove(&key);
        }
        let video = match encoded.modality {
            Modality::Video => self.videos.acquire().await.ok(),
            _ => None,
        };
        let begun = Instant::now();
        let call = ItemCall {
            modality: encoded.modality.name(),
            file: encoded.bytes.clone(),
            processor_kwargs: &settings.processor_kwargs,
            io_kwargs: &settings.io_kwargs,
        };
        let made = settings.processor.item(call).await.map_err(RequestError::from);
        drop(video);
        self.metrics.stage(Stage::Process, begun.elapsed());
        let made = made.inspect_err(|error| {
            if error.is_permanent() {
                self.failures.insert(key, (error.clone(), Instant::now() + FAILURES_LAST));
            }
        })?;
        self.metrics.media_decoded.inc();
        let charge = self.budget.charge(made.used())?;
        Ok(Arc::new(Held { made, _charge: charge }))
    }

    /// Everything but an item's file that changes its tensors: the processor and its settings.
    fn fingerprint(&self, settings: &HelpedSettings, modality: &Modality) -> Vec<u8> {
        let io_kwargs = match modality {
            // Its frames may be images, and its sound may be heard.
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
            .fold(Vec::new(), |identity, part| PlanClass::identify(&identity, part.as_bytes()))
    }
}

impl HelpedSettings {
    pub(crate) fn greeting(&self) -> &Greeting {
        self.processor.greeting()
    }

    /// The most items of a modality in a prompt; any number of one that is not taken at all, which
    /// is found out later.
    pub(crate) fn limit(&self, modality: &Modality) -> usize {
        let limit = self.greeting().limits.get(modality.name()).copied().flatten();
        let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        match self.marker_texts(modality).len() {
            0 | 1 => limit,
            numbered => limit.min(numbered),
        }
    }

    /// Whether a video's sound is an item, too, which stands where the video does
    /// (`use_audio_in_video` of Qwen2.5-Omni and others).
    pub(crate) fn hears_videos(&self) -> bool {
        self.processor_kwargs
            .get("use_audio_in_video")
            .is_some_and(|value| *value == Value::Bool(true))
    }

    /// What stands for items in a conversation whose content is one string: one text for all, one
    /// for each, or nothing.
    pub(crate) fn marker_texts(&self, modality: &Modality) -> &[String] {
        self.greeting().placeholders.get(modality.name()).map_or(&[], Vec::as_slice)
    }

    /// The most embeddings for which every engine has room at once.
    fn most_embeds(&self) -> usize {
        self.greeting()
            .max_tokens
            .values()
            .max()
            .map_or(0, |&most| usize::try_from(most).unwrap_or(usize::MAX))
    }
}

impl Meaning {
    fn of(held: &Arc<Held>) -> Self {
        fn elements(value: &ItemValue) -> u64 {
            match value {
                ItemValue::Tensor(tensor) => {
                    tensor.shape.iter().map(|&extent| extent as u64).product()
                }
                ItemValue::Int(_) | ItemValue::Float(_) => 1,
                ItemValue::List(list) => list.iter().map(elements).sum(),
            }
        }
        let made = &held.made;
        let elements = made.fields.iter().map(|field| elements(&field.value)).max().unwrap_or(0);
        Self { updates: made.updates.clone(), elements, held: Mutex::new(Arc::downgrade(held)) }
    }

    /// The tensors, if somebody still has them.
    fn held(&self) -> Option<Arc<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// The tensors were made again.
    fn remember(&self, held: &Arc<Held>) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(held);
    }
}

impl HelpedItem {
    /// What the item becomes for workers of a class, when it is written with so many embeddings.
    pub(crate) fn plan(
        &self,
        helped: &Arc<Helped>,
        embeds: usize,
        class: &PresentClass,
        cpu: &CpuBudget,
    ) -> Result<ItemPlan, RequestError> {
        let encoder_tokens = match embeds {
            few if few <= class.min_batched_tokens.max(self.settings.most_embeds()) => 0,
            many if many <= class.max_batched_tokens => many,
            many => {
                let most = class.max_batched_tokens.max(self.settings.most_embeds());
                let message = format!(
                    "the item would take {many} tokens, more than engines can encode at once ({most})"
                );
                return Err(RequestError::invalid(&self.field, message));
            }
        };
        let modality = self.encoded.modality.clone();
        let identity = PlanClass::identify(&class.class.processor, &self.fingerprint);
        let hash = chiasm_media::mm_hash(&self.encoded.content, &modality, &identity);
        let source = HelpedSource {
            helped: helped.clone(),
            settings: self.settings.clone(),
            encoded: self.encoded.clone(),
            field: self.field.clone(),
            key: self.key,
            meaning: self.meaning.clone(),
            held: Mutex::new(self.held.clone()),
            cpu: cpu.clone(),
        };
        Ok(ItemPlan {
            modality,
            hash,
            // It has been written already.
            runs: Vec::new(),
            embeds,
            elements: self.meaning.elements,
            encoder_tokens,
            source: Arc::new(source),
        })
    }

    /// The only way to write the item: tokens in place of tokens. `None` if there are others.
    fn replacement(&self) -> Option<(Vec<TokenId>, Vec<TokenRun>)> {
        expansion::replacement(&self.meaning.updates)
    }

    pub(crate) fn modality(&self) -> &Modality {
        &self.encoded.modality
    }

    fn updates(&self) -> &[PromptUpdate] {
        &self.meaning.updates
    }
}
