//! Images: planned from their sizes, decoded and processed in single flight.
//!
//! Concurrent requests and engines that need the same tensors share one decoding.

mod received;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use chiasm_backend::{
    EncodedItem, ItemField, MediaSource, PlanClass, ProcessingCost, SourceError, TensorBytes,
    TensorFormat, TensorMemory, TensorRequest,
};
use chiasm_fleet::PresentClass;
use chiasm_media::{ByteBudget, ContentHash, EncodedMedia, ImageHeader, MediaHeader};
use chiasm_metrics::{PipelineMetrics, Stage};
use chiasm_types::{MmHash, Modality};
use chiasm_vision::{
    ImageKwargs, ImagePlan, ImageSize, Parallelism, PixelFormat, RgbView, VisionModel,
};
use futures_util::future::{BoxFuture, FutureExt};
use serde_json::{Map, Value};
use tokio::time::Instant;
use tracing::Instrument;

use super::error::RequestError;
use super::item::ItemPlan;
use super::plans::PlanCache;
use super::processed::{ProcessedMedia, TensorKey, TensorWriter, pixel_format, to_field};
use crate::model::ServedModel;
use chiasm_cpu::{AnnouncedWork, CpuBudget, CpuPool, Ticket, price, work_size};

pub use received::TensorsError;
pub(super) use received::find_pixels;

/// The images of one served model.
pub struct Images {
    model: Arc<ServedModel>,
    plans: PlanCache<ImagePlan>,
    processed: Arc<ProcessedMedia>,
    cpu: CpuPool,
    budget: ByteBudget,
    metrics: Arc<PipelineMetrics>,
}

/// A request's parsed settings for its images, for workers of one class.
pub(super) struct ImageSettings {
    kwargs: ImageKwargs,
    /// The settings as JSON.
    json: Arc<str>,
    /// Everything that changes an image's tensors, apart from its bytes.
    fingerprint: Vec<u8>,
}

impl ImageSettings {
    /// Returns the identity of an image with these settings.
    pub(super) fn identify(&self, content: &ContentHash) -> MmHash {
        chiasm_media::mm_hash(content, &Modality::Image, &self.fingerprint)
    }
}

impl Images {
    /// Creates the images of a model. `processed` keeps their pixels.
    pub(super) fn new(
        model: Arc<ServedModel>,
        cpu: CpuPool,
        budget: ByteBudget,
        metrics: Arc<PipelineMetrics>,
        processed: Arc<ProcessedMedia>,
    ) -> Self {
        Self { model, plans: PlanCache::default(), processed, cpu, budget, metrics }
    }

    /// Returns the bytes of pixels that are kept in this process.
    pub fn kept_bytes(&self) -> u64 {
        self.processed.bytes()
    }

    fn vision(&self) -> Result<&VisionModel, RequestError> {
        self.model
            .vision
            .as_ref()
            .ok_or_else(|| RequestError::internal("the model does not support images"))
    }

    /// Parses `mm_processor_kwargs` for workers of a class.
    pub(super) fn settings(
        &self,
        kwargs: &Map<String, Value>,
        class: &PresentClass,
    ) -> Result<ImageSettings, RequestError> {
        let vision = self.vision()?;
        let at_kwargs = |error| RequestError::from(error).at("mm_processor_kwargs");
        let json = if kwargs.is_empty() {
            "{}".into()
        } else {
            Value::Object(kwargs.clone()).to_string().into()
        };
        let kwargs = vision.parse_kwargs(kwargs).map_err(at_kwargs)?;
        let fingerprint =
            PlanClass::item_identity(&class.class.processor, &vision.fingerprint(&kwargs));
        Ok(ImageSettings { kwargs, json, fingerprint })
    }

    /// Returns the cached plan of an image, by its identity.
    pub(super) fn known_plan(&self, hash: &MmHash) -> Option<Arc<ImagePlan>> {
        self.plans.get(hash)
    }

    /// Returns the number of embeddings that a worker must be able to encode at once for an image;
    /// 0 if every worker of the class can.
    pub(super) fn encoder_tokens(
        &self,
        plan: &ImagePlan,
        class: &PresentClass,
    ) -> Result<usize, RequestError> {
        encoder_tokens(self.vision()?, plan.original, plan, class)
    }

    /// Plans an image for workers of a class, by arithmetic on its size.
    ///
    /// # Errors
    /// Returns an error if the item is no image, or if the image can't be processed or encoded.
    pub(super) fn plan(
        self: &Arc<Self>,
        image: &EncodedMedia,
        settings: &ImageSettings,
        class: &PresentClass,
        field: &str,
        cpu: &CpuBudget,
    ) -> Result<ItemPlan, RequestError> {
        let vision = self.vision()?;
        let MediaHeader::Image(header) = image.header else {
            return Err(RequestError::invalid(
                field,
                format!("the model does not support {}", image.modality),
            ));
        };
        let size = ImageSize { width: header.width, height: header.height };
        let hash = settings.identify(&image.content);
        let plan = self
            .plans
            .get_or_build(hash, || Ok(vision.plan(size, &settings.kwargs)?))
            .map_err(|e| e.at(field))?;
        let encoder_tokens =
            encoder_tokens(vision, size, &plan, class).map_err(|error| error.at(field))?;
        Ok(ItemPlan {
            modality: Modality::Image,
            hash,
            runs: plan.placeholder.clone(),
            embeds: plan.tokens,
            // A raw value is one byte.
            elements: plan.pixel_bytes(PixelFormat::RawU8) as u64,
            encoder_tokens,
            source: Arc::new(ImageSource {
                images: self.clone(),
                hash,
                plan,
                header,
                encoded: image.clone(),
                settings_json: settings.json.clone(),
                field: field.to_owned(),
                budget: cpu.clone(),
                ticket: OnceLock::new(),
            }),
        })
    }
}

/// Returns the number of embeddings that a worker must be able to encode at once for an image; 0 if
/// every worker of the class can.
///
/// An engine waits for ever with an image that its encoder cache can't hold. The cache holds every
/// image of the model's default settings, and at least the tokens of one step
/// (`compute_mm_encoder_budget` in vLLM). A request's settings may exceed that.
fn encoder_tokens(
    vision: &VisionModel,
    size: ImageSize,
    plan: &ImagePlan,
    class: &PresentClass,
) -> Result<usize, RequestError> {
    if plan.tokens <= class.min_batched_tokens {
        return Ok(0);
    }
    let default_plan = vision.plan(size, &ImageKwargs::default())?;
    if plan.tokens <= default_plan.tokens {
        return Ok(0);
    }
    if plan.tokens <= class.max_batched_tokens {
        return Ok(plan.tokens);
    }
    Err(RequestError::invalid(
        "mm_processor_kwargs",
        format!(
            "the image would take {} tokens, more than engines can encode at once ({})",
            plan.tokens, class.max_batched_tokens
        ),
    ))
}

/// The tensors of one image of a request.
struct ImageSource {
    images: Arc<Images>,
    hash: MmHash,
    plan: Arc<ImagePlan>,
    header: ImageHeader,
    encoded: EncodedMedia,
    /// The request's settings as JSON.
    settings_json: Arc<str>,
    field: String,
    /// The request's budget.
    budget: CpuBudget,
    /// The ticket for decoding and processing the image. It is reused if the request moves to
    /// another engine, which is not the client's fault.
    ticket: OnceLock<Ticket>,
}

impl MediaSource for ImageSource {
    fn tensors(
        &self,
        order: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        let span = tracing::debug_span!("process", hash = %self.hash);
        // Callers ask for all items of a request before they wait for one, so all of the request's
        // work is announced before the first piece is queued.
        let work = self.budget.announce(self.price(pixel_format(order.format)));
        let fields = async {
            self.make(order, work).await.map_err(|error| SourceError::new(error.at(&self.field)))
        };
        fields.instrument(span).boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        Some(EncodedItem {
            url: self.encoded.url.clone(),
            bytes: self.encoded.bytes.clone(),
            content: *self.encoded.content.as_bytes(),
            media_type: self.header.format.media_type(),
            processor_kwargs: self.settings_json.clone(),
        })
    }

    fn processing_cost(&self, format: TensorFormat) -> Option<ProcessingCost> {
        let price = self.price(pixel_format(format));
        Some(ProcessingCost {
            image_size: (self.plan.original.width, self.plan.original.height),
            tensor_bytes: self.plan.pixel_bytes(pixel_format(format)) as u64,
            cpu_time: price,
            work_size: work_size(price),
            starts_immediately: self.images.cpu.is_free(price),
        })
    }
}

impl ImageSource {
    /// Estimates the time to decode and process the image.
    fn price(&self, format: PixelFormat) -> Duration {
        let tensor = price::tensor(self.plan.original.area(), self.plan.pixel_bytes(format));
        self.header.decode_time.saturating_add(tensor)
    }

    /// Returns the ticket for decoding and processing the image, which is charged once.
    fn processing_ticket(&self, price: Duration) -> Result<Ticket, RequestError> {
        if let Some(ticket) = self.ticket.get() {
            return Ok(ticket.clone());
        }
        let ticket = self.budget.ticket(price)?;
        Ok(self.ticket.get_or_init(|| ticket).clone())
    }

    async fn make(
        &self,
        order: TensorRequest,
        work: AnnouncedWork,
    ) -> Result<Option<Vec<ItemField>>, RequestError> {
        let Images { model, processed, cpu, budget, metrics, .. } = &*self.images;
        let key = TensorKey { hash: self.hash, format: order.format };
        let _permit = processed.lock(key).await;
        // The previous holder of the permit may have sent the item to the same engine.
        if !(order.is_still_needed)() {
            return Ok(None);
        }
        let cached = self.images.cached_pixels(&key, &self.plan)?;
        let job = PixelJob {
            model: model.clone(),
            budget: budget.clone(),
            memory: order.memory,
            format: pixel_format(key.format),
            plan: self.plan.clone(),
        };
        let is_new = cached.is_none();
        let pixels = match cached {
            Some(pixels) if job.memory.takes(&pixels) => Ok(pixels),
            Some(pixels) => {
                let ticket = self.budget.ticket(price::copy(pixels.as_ref().len()))?;
                cpu.run_announced(&ticket, work, move || job.copy(&pixels)).await?
            }
            None => {
                let image = self.encoded.clone();
                let pool = cpu.clone();
                let ticket = self.processing_ticket(self.price(job.format))?;
                let started = Instant::now();
                let process = move || job.process(&image, &pool);
                let pixels = cpu.run_announced(&ticket, work, process).await?;
                metrics.observe_stage(Stage::Process, started.elapsed());
                pixels
            }
        };
        let pixels = pixels.inspect_err(|error| processed.record_failure(key, error))?;
        processed.insert(key, &pixels);
        if is_new { &metrics.media_decoded } else { &metrics.media_reused }.inc();
        Ok(Some(item_fields(&self.plan, pixel_format(key.format), &pixels)))
    }
}

/// The inputs of processing one image, on any thread.
struct PixelJob {
    model: Arc<ServedModel>,
    budget: ByteBudget,
    memory: Arc<dyn TensorMemory>,
    format: PixelFormat,
    plan: Arc<ImagePlan>,
}

impl PixelJob {
    /// Decodes and processes the image.
    fn process(&self, image: &EncodedMedia, pool: &CpuPool) -> Result<TensorBytes, RequestError> {
        let vision = self
            .model
            .vision
            .as_ref()
            .ok_or_else(|| RequestError::internal("the model does not support images"))?;
        chiasm_media::with_pixels(image, |decoded| {
            let original = self.plan.original;
            let parallelism =
                pool.shared(original.area()).map_or(Parallelism::Single, Parallelism::Pool);
            let view = RgbView::new(original, decoded.pixels)?;
            self.fill(self.plan.pixel_bytes(self.format), |out| {
                Ok(vision.process_with(view, &self.plan, self.format, parallelism, out)?)
            })
        })?
    }

    /// Copies pixels from another engine's memory, or from this process, to the engine's memory.
    fn copy(&self, pixels: &TensorBytes) -> Result<TensorBytes, RequestError> {
        let bytes = pixels.as_ref();
        self.fill(bytes.len(), |out| {
            out.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Allocates memory that the engine reads, or else memory of this process, and fills it.
    fn fill(
        &self,
        bytes: usize,
        write: impl FnOnce(&mut [u8]) -> Result<(), RequestError>,
    ) -> Result<TensorBytes, RequestError> {
        let mut tensor = TensorWriter::reserve(&*self.memory, &self.budget, bytes)?;
        write(tensor.bytes())?;
        Ok(tensor.publish())
    }
}

/// Returns the item's tensors, in the order of the model's own processor.
fn item_fields(plan: &ImagePlan, format: PixelFormat, pixels: &TensorBytes) -> Vec<ItemField> {
    plan.tensors(format).into_iter().map(|spec| to_field(spec, pixels)).collect()
}
