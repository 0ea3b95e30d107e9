//! Images: planned from their sizes, and decoded and processed once for all requests and engines
//! that want the same tensors at the same time.

mod received;

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{
    EncodedItem, FieldValue, ItemField, Making, MediaSource, PlanClass, SourceError, Tensor,
    TensorBytes, TensorFormat, TensorMemory, TensorOrder,
};
use chiasm_fleet::PresentClass;
use chiasm_media::{ByteBudget, ContentHash, EncodedMedia, ImageHeader, MediaHeader};
use chiasm_types::{MmHash, Modality};
use chiasm_vision::{
    Contents, ImageKwargs, ImagePlan, ImageSize, Parallelism, PixelFormat, RgbView, TensorSpec,
    VisionModel,
};
use futures_util::future::{BoxFuture, FutureExt};
use serde_json::{Map, Value};
use tokio::time::Instant;
use tracing::Instrument;

use super::error::RequestError;
use super::item::ItemPlan;
use super::plans::Plans;
use super::processed::{Form, ProcessedMedia};
use crate::cpu::{CpuBudget, CpuPool, Ticket, price, work_size};
use crate::metrics::{PipelineMetrics, Stage};
use crate::model::ServedModel;

pub use received::TensorsError;
pub(super) use received::pixels_of;

/// The images of one served model.
pub struct Images {
    model: Arc<ServedModel>,
    plans: Plans<ImagePlan>,
    processed: ProcessedMedia,
    cpu: CpuPool,
    budget: ByteBudget,
    metrics: Arc<PipelineMetrics>,
}

/// A request's settings for its images, once parsed, for workers of one class.
pub(super) struct ImageSettings {
    kwargs: ImageKwargs,
    /// As the request has them.
    asked: Arc<str>,
    /// Everything but an image's bytes that changes its tensors.
    fingerprint: Vec<u8>,
}

impl ImageSettings {
    /// The identity of the image of this file.
    pub(super) fn identify(&self, content: &ContentHash) -> MmHash {
        chiasm_media::mm_hash(content, &Modality::Image, &self.fingerprint)
    }
}

impl Images {
    /// Keeps at most `processed_bytes` of pixels in this process for other engines, where they
    /// travel in messages.
    pub fn new(
        model: Arc<ServedModel>,
        cpu: CpuPool,
        budget: ByteBudget,
        metrics: Arc<PipelineMetrics>,
        processed_bytes: u64,
    ) -> Self {
        let processed = ProcessedMedia::new(processed_bytes);
        Self { model, plans: Plans::default(), processed, cpu, budget, metrics }
    }

    /// Bytes of pixels that are kept in this process.
    pub fn kept_bytes(&self) -> u64 {
        self.processed.bytes()
    }

    fn vision(&self) -> Result<&VisionModel, RequestError> {
        self.model
            .vision
            .as_ref()
            .ok_or_else(|| RequestError::internal("the model takes no images"))
    }

    /// Reads `mm_processor_kwargs`, for workers of a class.
    pub(super) fn settings(
        &self,
        kwargs: &Map<String, Value>,
        class: &PresentClass,
    ) -> Result<ImageSettings, RequestError> {
        let vision = self.vision()?;
        let at_kwargs = |error| RequestError::from(error).at("mm_processor_kwargs");
        let asked = if kwargs.is_empty() {
            "{}".into()
        } else {
            Value::Object(kwargs.clone()).to_string().into()
        };
        let kwargs = vision.parse_kwargs(kwargs).map_err(at_kwargs)?;
        let fingerprint = PlanClass::identify(&class.class.processor, &vision.fingerprint(&kwargs));
        Ok(ImageSettings { kwargs, asked, fingerprint })
    }

    /// What an image becomes that was seen before, by its identity.
    pub(super) fn known_plan(&self, hash: &MmHash) -> Option<Arc<ImagePlan>> {
        self.plans.get(hash)
    }

    /// Embeddings that a worker must be able to encode at once for an image; 0 if any worker of the
    /// class can.
    pub(super) fn encoder_tokens(
        &self,
        plan: &ImagePlan,
        class: &PresentClass,
    ) -> Result<usize, RequestError> {
        encoder_tokens(self.vision()?, plan.original, plan, class)
    }

    /// What an image becomes for workers of a class: arithmetic on its size.
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
                format!("the model takes no {}", image.modality),
            ));
        };
        let size = ImageSize { width: header.width, height: header.height };
        let hash = settings.identify(&image.content);
        let plan = self
            .plans
            .get_or_make(hash, || Ok(vision.plan(size, &settings.kwargs)?))
            .map_err(|e| e.at(field))?;
        let encoder_tokens =
            encoder_tokens(vision, size, &plan, class).map_err(|error| error.at(field))?;
        Ok(ItemPlan {
            modality: Modality::Image,
            hash,
            runs: plan.placeholder.clone(),
            embeds: plan.tokens,
            // Raw values are a byte each.
            elements: plan.pixel_bytes(PixelFormat::RawU8) as u64,
            encoder_tokens,
            source: Arc::new(ImageSource {
                images: self.clone(),
                hash,
                plan,
                header,
                encoded: image.clone(),
                asked: settings.asked.clone(),
                field: field.to_owned(),
                budget: cpu.clone(),
                ticket: OnceLock::new(),
            }),
        })
    }
}

/// Embeddings that a worker must be able to encode at once for an image; 0 if any worker of the
/// class can.
///
/// An engine waits for ever with an image that its encoder cache can't hold. The cache holds what
/// the model's own settings can ask for, and at least the tokens of one step
/// (`compute_mm_encoder_budget` in vLLM); a request's settings may ask for more.
fn encoder_tokens(
    vision: &VisionModel,
    size: ImageSize,
    plan: &ImagePlan,
    class: &PresentClass,
) -> Result<usize, RequestError> {
    if plan.tokens <= class.min_batched_tokens {
        return Ok(0);
    }
    let usual = vision.plan(size, &ImageKwargs::default())?;
    if plan.tokens <= usual.tokens {
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

/// One image of a request.
struct ImageSource {
    images: Arc<Images>,
    hash: MmHash,
    plan: Arc<ImagePlan>,
    header: ImageHeader,
    encoded: EncodedMedia,
    /// The request's settings.
    asked: Arc<str>,
    field: String,
    /// The request's.
    budget: CpuBudget,
    /// For decoding and processing the image. It is kept: another try, with another engine, is no
    /// fault of the client's.
    ticket: OnceLock<Ticket>,
}

impl MediaSource for ImageSource {
    fn tensors(
        &self,
        order: TensorOrder,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        let span = tracing::debug_span!("process", hash = %self.hash);
        let made = async {
            self.make(order).await.map_err(|error| SourceError::new(error.at(&self.field)))
        };
        made.instrument(span).boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        Some(EncodedItem {
            url: self.encoded.url.clone(),
            bytes: self.encoded.bytes.clone(),
            content: *self.encoded.content.as_bytes(),
            media_type: self.header.format.media_type(),
            processor_kwargs: self.asked.clone(),
        })
    }

    fn making(&self, format: TensorFormat) -> Option<Making> {
        let price = self.price(pixel_format(format));
        Some(Making {
            size: (self.plan.original.width, self.plan.original.height),
            bytes: self.plan.pixel_bytes(pixel_format(format)) as u64,
            price,
            work: work_size(price),
            at_once: self.images.cpu.is_free(price),
        })
    }
}

impl ImageSource {
    /// Time for decoding and processing the image.
    fn price(&self, format: PixelFormat) -> Duration {
        let tensor = price::tensor(self.plan.original.area(), self.plan.pixel_bytes(format));
        self.header.decode_time.saturating_add(tensor)
    }

    /// Leave for decoding and processing the image, paid for once.
    fn ticket_to_make(&self, price: Duration) -> Result<Ticket, RequestError> {
        match self.ticket.get() {
            Some(ticket) => Ok(ticket.clone()),
            None => {
                let ticket = self.budget.ticket(price)?;
                Ok(self.ticket.get_or_init(|| ticket).clone())
            }
        }
    }

    async fn make(&self, order: TensorOrder) -> Result<Option<Vec<ItemField>>, RequestError> {
        let Images { model, processed, cpu, budget, metrics, .. } = &*self.images;
        let form = Form { hash: self.hash, format: order.format };
        let _turn = processed.turn(form).await;
        // The one before may have sent it to the same engine.
        if !(order.still_wanted)() {
            return Ok(None);
        }
        let found = self.images.kept(&form, &self.plan)?;
        let job = PixelJob {
            model: model.clone(),
            budget: budget.clone(),
            memory: order.memory,
            format: pixel_format(form.format),
            plan: self.plan.clone(),
        };
        let is_new = found.is_none();
        let pixels = match found {
            Some(pixels) if job.memory.takes(&pixels) => Ok(pixels),
            Some(pixels) => {
                let ticket = self.budget.ticket(price::copy(pixels.as_ref().len()))?;
                cpu.run(&ticket, move || job.copy(&pixels)).await?
            }
            None => {
                let (image, pool) = (self.encoded.clone(), cpu.clone());
                let ticket = self.ticket_to_make(self.price(job.format))?;
                let begun = Instant::now();
                let made = cpu.run(&ticket, move || job.make(&image, &pool)).await?;
                metrics.stage(Stage::Process, begun.elapsed());
                made
            }
        };
        let pixels = pixels.inspect_err(|error| processed.failed(form, error))?;
        processed.made(form, &pixels);
        if is_new { &metrics.media_decoded } else { &metrics.media_reused }.inc();
        Ok(Some(named(&self.plan, pixel_format(form.format), &pixels)))
    }
}

fn pixel_format(format: TensorFormat) -> PixelFormat {
    match format {
        TensorFormat::Raw => PixelFormat::RawU8,
        TensorFormat::Normalized(dtype) => PixelFormat::Normalized(dtype),
    }
}

/// What is needed to process one image, on any thread.
struct PixelJob {
    model: Arc<ServedModel>,
    budget: ByteBudget,
    memory: Arc<dyn TensorMemory>,
    format: PixelFormat,
    plan: Arc<ImagePlan>,
}

impl PixelJob {
    /// Decodes and processes.
    fn make(&self, image: &EncodedMedia, pool: &CpuPool) -> Result<TensorBytes, RequestError> {
        let vision = self
            .model
            .vision
            .as_ref()
            .ok_or_else(|| RequestError::internal("the model takes no images"))?;
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

    /// Brings pixels from another engine's memory, or from this process, to where they are needed.
    fn copy(&self, pixels: &TensorBytes) -> Result<TensorBytes, RequestError> {
        let bytes = pixels.as_ref();
        self.fill(bytes.len(), |out| {
            out.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Memory of the right kind, filled.
    fn fill(
        &self,
        bytes: usize,
        write: impl FnOnce(&mut [u8]) -> Result<(), RequestError>,
    ) -> Result<TensorBytes, RequestError> {
        if let Some(mut slot) = self.memory.reserve(bytes) {
            write(&mut slot)?;
            return Ok(TensorBytes::Slot(slot.publish()));
        }
        let mut buffer = self.budget.buffer();
        write(buffer.extend_zeroed(bytes)?)?;
        Ok(TensorBytes::Here(buffer.freeze()))
    }
}

/// The item's tensors, in the order of the model's own processor.
fn named(plan: &ImagePlan, format: PixelFormat, pixels: &TensorBytes) -> Vec<ItemField> {
    let tensor = |spec| {
        let TensorSpec { name, dtype, shape, contents, field } = spec;
        let bytes = match contents {
            Contents::Small(bytes) => TensorBytes::Here(Bytes::from(bytes)),
            Contents::Pixels => pixels.clone(),
        };
        ItemField {
            name: Cow::Borrowed(name),
            field,
            value: FieldValue::Tensor(Tensor { dtype, shape, bytes }),
        }
    };
    plan.tensors(format).into_iter().map(tensor).collect()
}
