//! Media items of jobs that a frontend on another machine has planned.
//!
//! An agent checks the plans. It makes the tensors from the same files or from the cuts of videos,
//! or receives the tensors that the frontend has made.

mod error;
mod files;
mod received;
mod request;
mod tensors;
mod videos;
mod waiting;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{
    EncodedItem, ForeignJob, ForeignMediaItem, ItemField, JobItem, MediaForm, MediaLoad,
    MediaSource, SourceError, TensorBytes, TensorRequest, VideoDescription, VideoPart,
};
use chiasm_fleet::{Fleet, PresentClass, Worker, keys_for, spans};
use chiasm_kv::{BlockKey, PromptBlocks};
use chiasm_media::{ChargedBuffer, ContentHash, EncodedMedia, MediaLoader};
use chiasm_metrics::PipelineMetrics;
use chiasm_types::{MmHash, Modality, Placeholder, TokenId, TokenRun};
use chiasm_vision::{ImagePlan, ImageSize, PixelFormat};
use futures_util::future::{BoxFuture, FutureExt, try_join_all};
use serde_json::{Map, Value};

use super::error::{Cause, RequestError};
use super::image::{ImageSettings, Images, TensorsError, find_pixels};
use super::limits::PipelineLimits;
use super::prepare::check_tokens;
use super::processed::{ProcessedMedia, TensorKey};
use super::processor_items::{VllmProcessorOptions, VllmProcessors};
use super::video::VideoPlanner;
use crate::model::ServedModel;
use chiasm_cpu::{CpuBudget, CpuPool};

pub use error::{CutError, ItemError, PlanError, PutError};
use request::RequestData;
pub use request::{CutFailure, FetchFailure, RequestItem, RequestReason};
use tensors::ReceivedTensors;
use videos::{MachineVideos, VideoItem};
use waiting::{ExpectedTensors, PendingItems, ReceivedItem};

/// The media items of jobs that frontends on other machines have planned.
pub struct MachineMedia {
    model: Arc<ServedModel>,
    images: Arc<Images>,
    loader: MediaLoader,
    cpu: CpuPool,
    fleet: Arc<Fleet>,
    /// The files and tensors that jobs wait for.
    pending: PendingItems,
    /// The tensors that frontends have made; `None` if tensors are not accepted.
    tensors: Option<Arc<ReceivedTensors>>,
    /// The videos whose cuts are accepted; `None` if none are.
    videos: Option<Arc<MachineVideos>>,
    fetches_urls: bool,
}

/// A media item as a frontend on another machine has planned it.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedItem {
    /// The item's modality.
    pub modality: Modality,
    /// The item's identity, as the frontend computed it.
    pub hash: MmHash,
    /// The data that the frontend has of the item.
    pub origin: ItemOrigin,
    /// The item's placeholder in the prompt, as the frontend computed it.
    pub placeholder: Placeholder,
}

/// The data that a frontend on another machine has of a media item.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemOrigin {
    /// The file, from which this process makes tensors.
    File {
        /// The file's hash.
        content: ContentHash,
        /// The request's settings for the processor.
        processor_kwargs: Map<String, Value>,
        /// The `http:` or `https:` URL from which the frontend fetched the file.
        url: Option<String>,
        /// Width and height in pixels, if the frontend may send the tensors of an image of that
        /// size instead of the file.
        size: Option<(u32, u32)>,
    },
    /// The tensors.
    Tensors {
        /// The number of elements of the largest tensor.
        elements: u64,
    },
    /// The file of a video, from whose cut this process makes tensors.
    Cut(VideoDescription),
}

/// A checked job, whose tokens and media items are safe for an engine.
pub struct CheckedJob {
    /// The media items, in the order of the prompt.
    pub items: Arc<[JobItem]>,
    /// Builds the job for other frontends. That hashes the whole prompt, so it should only be
    /// called if there are other frontends.
    pub foreign_job: Box<dyn FnOnce() -> ForeignJob + Send>,
}

impl MachineMedia {
    /// Creates the state for an agent's media items. Files are kept in the loader's cache.
    ///
    /// With `max_tensor_bytes`, accepts tensors that frontends have made, of at most that size per
    /// item. Frontends are trusted then to send valid tensors. With `fetches_urls`, the loader
    /// fetches files from the frontends' URLs within its policy. Files are then requested from a
    /// frontend only if the fetch fails or brings another file.
    ///
    /// With a `processor`, and if tensors are accepted, decodes the cuts of planned videos. Cuts
    /// need the same trust as tensors: a cut can't be compared with its file.
    pub fn new(
        model: Arc<ServedModel>,
        loader: MediaLoader,
        fleet: Arc<Fleet>,
        limits: &PipelineLimits,
        max_tensor_bytes: Option<u64>,
        processor: Option<VllmProcessorOptions>,
        fetches_urls: bool,
    ) -> Arc<Self> {
        let metrics = Arc::new(PipelineMetrics::default());
        let cpu = CpuPool::new(limits.cpu_threads, &metrics.cpu);
        let processed = Arc::new(ProcessedMedia::new(limits.processed_bytes));
        let budget = loader.budget();
        let images = Images::new(
            model.clone(),
            cpu.clone(),
            budget.clone(),
            metrics.clone(),
            processed.clone(),
        );
        let tensors = max_tensor_bytes.map(|max_bytes| {
            Arc::new(ReceivedTensors::new(max_bytes, limits.processed_bytes, cpu.clone()))
        });
        let processor = processor.filter(|_| model.videos.is_ok());
        let videos = processor.zip(tensors.clone()).map(|(options, tensors)| {
            let planner = VideoPlanner::new(
                model.clone(),
                Arc::new(VllmProcessors::new(options, &cpu, budget, &metrics)),
                processed,
                // Frontends limit the cost of requests.
                Duration::MAX,
                cpu.clone(),
                budget.clone(),
                metrics,
            );
            Arc::new(MachineVideos::new(planner, limits.processed_bytes, tensors))
        });
        let loader = loader.with_executor(Arc::new(cpu.clone()));
        let images = Arc::new(images);
        Arc::new(Self {
            model,
            images,
            loader,
            cpu,
            fleet,
            pending: PendingItems::default(),
            tensors,
            videos,
            fetches_urls,
        })
    }

    /// Returns `true` if files are fetched from the frontends' URLs.
    pub fn fetches_urls(&self) -> bool {
        self.fetches_urls
    }

    /// Returns the waiting and running work.
    pub fn load(&self) -> MediaLoad {
        self.cpu.load()
    }

    /// Accepts the tensors of an item, for all jobs that wait for them now or need them soon.
    ///
    /// # Errors
    /// Returns an error if the tensors do not match the plan of the image whose file they replace.
    pub fn put_tensors(&self, hash: MmHash, fields: Vec<ItemField>) -> Result<(), TensorsError> {
        let mut refusal = None;
        for expected in self.pending.expected(&hash) {
            match self.keep_pixels(&expected, &fields) {
                Ok(pixels) => {
                    self.pending.complete_with_pixels(&expected, &pixels);
                    return Ok(());
                }
                Err(error) => refusal = Some(error),
            }
        }
        if let Some(error) = refusal {
            return Err(error);
        }
        if let Some(tensors) = &self.tensors {
            tensors.put(hash, fields);
        }
        Ok(())
    }

    /// Checks an image's tensors against the expected ones, and keeps the pixels.
    fn keep_pixels(
        &self,
        expected: &ExpectedTensors,
        fields: &[ItemField],
    ) -> Result<Bytes, TensorsError> {
        let ExpectedTensors { key, plan } = expected;
        let pixels = find_pixels(plan, key.format, fields)?;
        self.images.keep(*key, plan, &pixels)?;
        Ok(pixels)
    }

    /// Accepts the cut of a video, for all jobs that wait for it now or need it soon.
    ///
    /// # Errors
    /// Returns an error if cuts are not accepted, or if the cut has other frames than a waiting job
    /// needs.
    pub fn put_cut(&self, hash: MmHash, parts: Vec<VideoPart>) -> Result<(), CutError> {
        self.videos.as_ref().ok_or(CutError::NotAccepted)?.put(hash, parts)
    }

    /// Returns the maximum size of a video's cut; `None` if cuts are not accepted.
    pub fn max_cut_bytes(&self) -> Option<u64> {
        self.videos.as_ref()?;
        self.max_tensor_bytes()
    }

    /// Returns the slots in which videos for a worker are decoded, of which a usual video takes
    /// one; `None` if their cuts are not accepted.
    pub fn video_slots(&self, worker: &Worker) -> Option<u32> {
        let classes = self.fleet.classes();
        let class = classes.iter().find(|class| class.id == worker.class)?;
        self.videos.as_ref()?.slots_for(class)
    }

    /// Returns the maximum size of an item's tensors; `None` if tensors are not accepted.
    pub fn max_tensor_bytes(&self) -> Option<u64> {
        self.tensors.as_ref().map(|tensors| tensors.max_bytes())
    }

    /// Returns a buffer for an incoming file or tensors, charged to the memory budget.
    pub fn buffer(&self) -> ChargedBuffer {
        self.loader.budget().buffer()
    }

    /// Returns the maximum size of a file of this modality.
    pub fn max_bytes(&self, modality: &Modality) -> u64 {
        self.loader.limits().max_bytes(modality)
    }

    /// Checks a job that a frontend has planned for a worker, so that no invalid job reaches an
    /// engine. `request_item` is called for missing items, during the check or when the engine
    /// requests the tensors.
    ///
    /// # Errors
    /// Returns an error if tokens or items differ from the plans that this process computes, or if
    /// the engine is gone.
    pub async fn check(
        self: &Arc<Self>,
        worker: &Worker,
        tokens: &Arc<Vec<TokenId>>,
        planned: Vec<PlannedItem>,
        lora: Option<&str>,
        salt: Option<&str>,
        request_item: RequestItem,
    ) -> Result<CheckedJob, PlanError> {
        check_tokens(tokens, self.model.last_token()).map_err(PlanError::Tokens)?;
        let max_model_len = worker.backend.capabilities().max_model_len;
        if tokens.len() >= max_model_len {
            return Err(PlanError::Tokens(
                Cause::ContextFull { tokens: tokens.len(), max_model_len }.into(),
            ));
        }
        let classes = self.fleet.classes();
        let class =
            classes.iter().find(|class| class.id == worker.class).ok_or(PlanError::EngineGone)?;
        let mut end = 0;
        for (number, PlannedItem { placeholder, .. }) in planned.iter().enumerate() {
            if placeholder.offset < end {
                return Err(PlanError::Item { number, error: ItemError::Order });
            }
            end = placeholder.offset.saturating_add(placeholder.length);
        }
        // Concurrently, because each item may wait for its file.
        let items = planned.into_iter().enumerate().map(async |(number, planned)| {
            let request_item = request_item.clone();
            let request = Arc::new(move |reason| request_item(number, reason));
            let item = self.check_item(worker, tokens, planned, class, request).await;
            item.map_err(|error| PlanError::Item { number, error })
        });
        let items = try_join_all(items).await?;
        let mut foreign_items = Vec::with_capacity(items.len());
        let mut media = Vec::with_capacity(items.len());
        for item in &items {
            let Placeholder { offset, length, .. } = item.placeholder;
            let embeds = item.placeholder.embed_count();
            media.extend(spans(&class.class, item.hash, &item.placeholder));
            foreign_items.push(ForeignMediaItem {
                hash: item.hash,
                end: offset + length,
                embeds,
                elements: item.elements,
            });
        }
        let class = class.class.clone();
        let tokens = tokens.clone();
        let lora = lora.map(str::to_owned);
        let salt = salt.map(str::to_owned);
        let foreign_job = Box::new(move || {
            let lora = lora.as_deref();
            let salt = salt.as_deref();
            let blocks = PromptBlocks { tokens: &tokens, media: &media, lora, salt };
            let keys = keys_for(&class, &blocks).into_iter().map(BlockKey::get).collect();
            ForeignJob { keys, prompt_tokens: tokens.len(), media: foreign_items }
        });
        Ok(CheckedJob { items: items.into(), foreign_job })
    }

    async fn check_item(
        self: &Arc<Self>,
        worker: &Worker,
        tokens: &[TokenId],
        planned: PlannedItem,
        class: &PresentClass,
        request: RequestData,
    ) -> Result<JobItem, ItemError> {
        let PlannedItem { modality, hash, origin, placeholder } = planned;
        let (content, processor_kwargs, url, size) = match origin {
            ItemOrigin::File { content, processor_kwargs, url, size } => {
                (content, processor_kwargs, url, size)
            }
            ItemOrigin::Tensors { elements } => {
                let tensors = self.tensors.as_ref().ok_or(ItemError::NoTensors)?;
                check_in_prompt(&placeholder, tokens)?;
                let request = Arc::new(move || request(RequestReason::Lacking));
                let source = tensors.source(hash, request);
                return Ok(JobItem { modality, hash, placeholder, elements, source });
            }
            ItemOrigin::Cut(description) => {
                let videos = self.videos.as_ref().ok_or(ItemError::NoCuts)?;
                if modality != Modality::Video {
                    return Err(ItemError::Modality(modality));
                }
                let item = VideoItem { hash, placeholder, description };
                return videos.check(worker, tokens, item, class, request).await;
            }
        };
        if modality != Modality::Image || self.model.vision.is_none() {
            return Err(ItemError::Modality(modality));
        }
        let settings = Arc::new(self.images.settings(&processor_kwargs, class)?);
        if settings.identify(&content) != hash {
            return Err(ItemError::OtherIdentity);
        }
        let expected = match (size, worker.backend.capabilities().media) {
            (Some(size), MediaForm::Tensors(format)) if self.tensors.is_some() => {
                let plan = self.plan_size(size, &settings)?;
                Some(ExpectedTensors { key: TensorKey { hash, format }, plan })
            }
            _ => None,
        };
        let mut source = FileSource {
            media: self.clone(),
            hash,
            content,
            url,
            settings,
            class: class.clone(),
            request,
            expected,
            plan: OnceLock::new(),
            early_pixels: Mutex::default(),
        };
        let plan = source.image_plan().await?;
        // Tensors must fit the checked placeholder.
        source.expected.take_if(|expected| expected.plan.original != plan.original);
        // An engine waits for ever with an item that it can't encode.
        let encoder_tokens = self.images.encoder_tokens(&plan, class)?;
        if encoder_tokens > worker.backend.capabilities().max_batched_tokens {
            return Err(ItemError::TooLarge(encoder_tokens));
        }
        if !matches_placeholder(&plan.placeholder, &placeholder, tokens) {
            return Err(ItemError::OtherPlaceholder);
        }
        // A raw value is one byte.
        let elements = plan.pixel_bytes(PixelFormat::RawU8) as u64;
        Ok(JobItem { modality, hash, placeholder, elements, source: Arc::new(source) })
    }

    /// Plans an image of the size that the frontend reports, which is not verified.
    fn plan_size(
        &self,
        (width, height): (u32, u32),
        settings: &ImageSettings,
    ) -> Result<Arc<ImagePlan>, RequestError> {
        self.loader.limits().image.check(width, height)?;
        self.images.plan_size(ImageSize { width, height }, settings)
    }
}

/// Checks the placeholder of an item whose own tokens are not known.
fn check_in_prompt(placeholder: &Placeholder, tokens: &[TokenId]) -> Result<(), ItemError> {
    let end = placeholder.offset.saturating_add(placeholder.length);
    let is_in_prompt = placeholder.embed_count() > 0 && end <= tokens.len();
    is_in_prompt.then_some(()).ok_or(ItemError::NoPlaceholder)
}

/// Returns `true` if the prompt has an item of these runs at the placeholder. Tokens that do not
/// embed may have been joined with their neighbours.
fn matches_placeholder(runs: &[TokenRun], placeholder: &Placeholder, tokens: &[TokenId]) -> bool {
    let Placeholder { offset, length, is_embed } = placeholder;
    let has_valid_mask = is_embed.as_ref().is_none_or(|mask| mask.len() == *length);
    let range = offset.checked_add(*length).and_then(|end| tokens.get(*offset..end));
    let Some(tokens) = range.filter(|_| has_valid_mask) else { return false };
    let embeds = |index: usize| is_embed.as_ref().is_none_or(|mask| mask[index]);
    let mut expected =
        runs.iter().flat_map(|run| std::iter::repeat_n((run.token, run.embeds), run.count));
    let matches = |(index, token): (usize, &TokenId)| {
        expected.next().is_some_and(|(expected_token, embed)| {
            embed == embeds(index) && (!embed || expected_token == *token)
        })
    };
    tokens.iter().enumerate().all(matches) && expected.next().is_none()
}

/// The tensors of an item whose file a frontend has.
struct FileSource {
    media: Arc<MachineMedia>,
    hash: MmHash,
    content: ContentHash,
    url: Option<String>,
    settings: Arc<ImageSettings>,
    class: PresentClass,
    request: RequestData,
    /// The tensors that are accepted instead of the file.
    expected: Option<ExpectedTensors>,
    /// The item's plan, once it is known.
    plan: OnceLock<Arc<ImagePlan>>,
    /// Pixels that arrived before an engine requested them.
    early_pixels: Mutex<Option<Bytes>>,
}

impl FileSource {
    /// Waits for the file, or for the tensors that are accepted instead.
    async fn receive(&self) -> Result<ReceivedItem, RequestError> {
        let url = self.url.as_deref();
        let expected = self.expected.clone();
        self.media.receive(&self.content, url, expected, &self.request).await
    }

    fn plan_file(&self, file: &EncodedMedia) -> Result<super::item::ItemPlan, RequestError> {
        self.media.images.plan(file, &self.settings, &self.class, "media", &CpuBudget::shared())
    }

    /// Returns the image's plan, from the cache or from the received data.
    async fn image_plan(&self) -> Result<Arc<ImagePlan>, RequestError> {
        let known = || self.media.images.known_plan(&self.hash);
        let plan = match (known(), &self.expected) {
            (Some(plan), _) => plan,
            (None, expected) => match (self.receive().await?, expected) {
                (ReceivedItem::Pixels(pixels), Some(ExpectedTensors { plan, .. })) => {
                    *self.early_pixels.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(pixels);
                    plan.clone()
                }
                (ReceivedItem::File(file), _) => {
                    self.plan_file(&file)?;
                    known().ok_or_else(|| RequestError::internal("a cached plan is missing"))?
                }
                (ReceivedItem::Pixels(_), None) => {
                    return Err(RequestError::internal("unexpected tensors were received"));
                }
            },
        };
        Ok(self.plan.get_or_init(|| plan).clone())
    }

    /// Returns pixels that are in memory, and their plan: those that arrived early, or those of
    /// another engine.
    fn cached_pixels(
        &self,
        key: &TensorKey,
    ) -> Result<Option<(TensorBytes, &Arc<ImagePlan>)>, RequestError> {
        let Some(plan) = self.plan.get() else { return Ok(None) };
        let is_expected = self.expected.as_ref().is_some_and(|expected| expected.key == *key);
        let early = self.early_pixels.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pixels = match early.filter(|_| is_expected) {
            Some(pixels) => Some(TensorBytes::Here(pixels)),
            None => self.media.images.cached_pixels(key, plan)?,
        };
        Ok(pixels.map(|pixels| (pixels, plan)))
    }

    async fn make(&self, order: TensorRequest) -> Result<Option<Vec<ItemField>>, SourceError> {
        let key = TensorKey { hash: self.hash, format: order.format };
        let images = &self.media.images;
        if let Some((pixels, plan)) = self.cached_pixels(&key).map_err(SourceError::new)? {
            return images.place(self.hash, plan, pixels, order).await.map_err(SourceError::new);
        }
        match (self.receive().await.map_err(SourceError::new)?, &self.expected) {
            (ReceivedItem::File(file), _) => {
                self.plan_file(&file).map_err(SourceError::new)?.source.tensors(order).await
            }
            (ReceivedItem::Pixels(pixels), Some(expected)) if expected.key == key => {
                let pixels = TensorBytes::Here(pixels);
                let fields = images.place(self.hash, &expected.plan, pixels, order).await;
                fields.map_err(SourceError::new)
            }
            // Impossible: the expected format is the one that the engine announced.
            (ReceivedItem::Pixels(_), _) => {
                let error = RequestError::internal("tensors were received in another format");
                Err(SourceError::new(error))
            }
        }
    }
}

impl MediaSource for FileSource {
    fn tensors(
        &self,
        order: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        self.make(order).boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(token: u32, count: usize, embeds: bool) -> TokenRun {
        TokenRun { token: TokenId(token), count, embeds }
    }

    #[test]
    fn item_matches_placeholder_with_its_tokens() {
        let runs = [run(1, 1, false), run(2, 2, true), run(3, 1, false)];
        let tokens = [9, 1, 2, 2, 3, 9].map(TokenId);
        let at = |offset, length, mask: Option<&[bool]>| {
            matches_placeholder(
                &runs,
                &Placeholder { offset, length, is_embed: mask.map(<[_]>::to_vec) },
                &tokens,
            )
        };
        let mask: &[bool] = &[false, true, true, false];
        assert!(at(1, 4, Some(mask)));
        for (offset, length) in
            [(0, 4), (1, 3), (1, 5), (2, 4), (3, 4), (usize::MAX, 4), (1, usize::MAX)]
        {
            assert!(!at(offset, length, Some(mask)), "{offset} {length}");
        }
        let joined = [9, 1, 2, 2, 4].map(TokenId);
        assert!(matches_placeholder(
            &runs,
            &Placeholder { offset: 1, length: 4, is_embed: Some(mask.to_vec()) },
            &joined
        ));
        assert!(!at(1, 4, None));
        assert!(!at(1, 4, Some(&[true, true, true, false])));
        assert!(!at(1, 4, Some(&mask[..3])));
        assert!(matches_placeholder(
            &[run(2, 2, true)],
            &Placeholder { offset: 2, length: 2, is_embed: None },
            &tokens
        ));
    }
}
