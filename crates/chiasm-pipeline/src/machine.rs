//! Media items of jobs that a frontend on another machine has planned: checked, and made here from
//! the same files; or taken as the tensors that the frontend has made.

mod error;
mod files;
mod tensors;
mod waiting;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use chiasm_backend::{
    EncodedItem, ItemField, JobItem, MediaForm, MediaLoad, MediaSource, OthersItem, OthersJob,
    SourceError, TensorBytes, TensorOrder,
};
use chiasm_fleet::{Fleet, PresentClass, Worker, keys_for, spans};
use chiasm_kv::{BlockKey, PromptBlocks};
use chiasm_media::{ChargedBuffer, ContentHash, EncodedMedia, MediaDoor};
use chiasm_types::{MmHash, Modality, Placeholder, TokenId, TokenRun};
use chiasm_vision::{ImagePlan, ImageSize, PixelFormat};
use futures_util::future::{BoxFuture, FutureExt, try_join_all};
use serde_json::{Map, Value};

use super::error::{Cause, RequestError};
use super::image::{ImageSettings, Images, TensorsError, pixels_of};
use super::limits::PipelineLimits;
use super::metrics::PipelineMetrics;
use super::prepare::check_tokens;
use super::processed::Form;
use crate::cpu::{CpuBudget, CpuPool};
use crate::model::ServedModel;

pub use error::{ItemError, PlanError, PutError};
use files::AskForItem;
pub use files::NotFetched;
use tensors::Tensors;
use waiting::{Came, Expected, Waiting};

/// Makes the media items of jobs that frontends on other machines have planned.
pub struct MachineMedia {
    model: Arc<ServedModel>,
    images: Arc<Images>,
    door: MediaDoor,
    cpu: CpuPool,
    fleet: Arc<Fleet>,
    /// Who waits for files, or for what frontends make of them.
    waiting: Waiting,
    /// Items whose tensors frontends have made; `None` if none are taken.
    tensors: Option<Arc<Tensors>>,
    fetches: bool,
}

/// A media item as a frontend on another machine has planned it.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedItem {
    /// What kind of thing it is.
    pub modality: Modality,
    /// Its identity, by the frontend's reckoning.
    pub hash: MmHash,
    /// What is to be had of it.
    pub origin: ItemOrigin,
    /// Where it stands in the prompt, by the frontend's reckoning.
    pub placeholder: Placeholder,
}

/// What a frontend on another machine has of a media item.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemOrigin {
    /// The file, of which tensors are made here.
    File {
        /// Its hash.
        content: ContentHash,
        /// The request's settings for its processor.
        processor_kwargs: Map<String, Value>,
        /// Where the frontend has got it, if at an `http:` or `https:` URL.
        url: Option<String>,
        /// Width and height in pixels, if the frontend may send the tensors of an image of that
        /// size in place of the file.
        size: Option<(u32, u32)>,
    },
    /// Its tensors.
    Tensors {
        /// Elements of the largest.
        elements: u64,
    },
}

/// A job whose tokens and media items an engine can be given.
pub struct CheckedJob {
    /// The media items, in the order of the prompt.
    pub items: Arc<[JobItem]>,
    /// Makes what other frontends have to know of the job. It hashes the whole prompt: it is for
    /// when there are others.
    pub told: Box<dyn FnOnce() -> OthersJob + Send>,
}

/// Asks a job's frontend for the file of its item of this number, and says why it was not fetched
/// if it was to be.
pub type AskForFile = Arc<dyn Fn(usize, Option<NotFetched>) + Send + Sync>;

impl MachineMedia {
    /// Keeps files in the door's cache. Takes tensors that frontends have made if an item's may
    /// have some number of bytes: whoever may speak to this agent is believed that they are what
    /// the engines want then. With `fetches` a file that a frontend has got at a URL is fetched
    /// from there by the door, within its policy, and asked for only if that does not bring what
    /// the frontend has.
    pub fn new(
        model: Arc<ServedModel>,
        door: MediaDoor,
        fleet: Arc<Fleet>,
        limits: &PipelineLimits,
        tensor_bytes: Option<u64>,
        fetches: bool,
    ) -> Arc<Self> {
        let metrics = Arc::new(PipelineMetrics::default());
        let cpu = CpuPool::new(limits.cpu_threads, &metrics.cpu);
        let images = Images::new(
            model.clone(),
            cpu.clone(),
            door.budget().clone(),
            metrics,
            limits.processed_bytes,
        );
        let tensors = tensor_bytes
            .map(|most| Arc::new(Tensors::new(most, limits.processed_bytes, cpu.clone())));
        let door = door.with_workers(Arc::new(cpu.clone()));
        let images = Arc::new(images);
        Arc::new(Self {
            model,
            images,
            door,
            cpu,
            fleet,
            waiting: Waiting::default(),
            tensors,
            fetches,
        })
    }

    /// Whether files are fetched from where frontends have got them.
    pub fn fetches(&self) -> bool {
        self.fetches
    }

    /// What there is to do.
    pub fn load(&self) -> MediaLoad {
        self.cpu.load()
    }

    /// Takes in the tensors of an item, for all who wait for them now or ask for them soon.
    ///
    /// # Errors
    /// They are not what the image becomes whose file they come in place of.
    pub fn put_tensors(&self, hash: MmHash, fields: Vec<ItemField>) -> Result<(), TensorsError> {
        let mut refused = None;
        for expected in self.waiting.expected(&hash) {
            let Expected { form, plan } = &expected;
            let pixels = pixels_of(plan, form.format, &fields);
            match pixels.and_then(|pixels| self.images.keep(*form, plan, &pixels).map(|()| pixels))
            {
                Ok(pixels) => {
                    self.waiting.pixels_came(&expected, &pixels);
                    return Ok(());
                }
                Err(why) => refused = Some(why),
            }
        }
        if let Some(why) = refused {
            return Err(why);
        }
        if let Some(tensors) = &self.tensors {
            tensors.put(hash, fields);
        }
        Ok(())
    }

    /// The most bytes that an item's tensors may have; `None` if none are taken.
    pub fn max_tensor_bytes(&self) -> Option<u64> {
        self.tensors.as_ref().map(|tensors| tensors.max_bytes())
    }

    /// Memory for a file or for tensors that come, out of what there is for all of them.
    pub fn buffer(&self) -> ChargedBuffer {
        self.door.budget().buffer()
    }

    /// The most bytes that a file of this modality may have.
    pub fn max_bytes(&self, modality: &Modality) -> u64 {
        self.door.limits().max_bytes(modality)
    }

    /// Checks what a frontend has planned for a worker: no engine may be given what would break it,
    /// whoever asks. `ask` is called for files that are needed and not here, now or when the engine
    /// wants the tensors.
    ///
    /// # Errors
    /// The tokens or items are not what they would be here, or the engine is gone.
    pub async fn check(
        self: &Arc<Self>,
        worker: &Worker,
        tokens: &Arc<Vec<TokenId>>,
        planned: Vec<PlannedItem>,
        lora: Option<&str>,
        salt: Option<&str>,
        ask: AskForFile,
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
        // At once, as each may wait for its file.
        let items = planned.into_iter().enumerate().map(async |(number, planned)| {
            let ask = ask.clone();
            let item = self
                .item(worker, tokens, planned, class, Arc::new(move |why| ask(number, why)))
                .await;
            item.map_err(|error| PlanError::Item { number, error })
        });
        let items = try_join_all(items).await?;
        let mut told = Vec::with_capacity(items.len());
        let mut media = Vec::with_capacity(items.len());
        for item in &items {
            let Placeholder { offset, length, .. } = item.placeholder;
            let embeds = item.placeholder.embeds();
            media.extend(spans(&class.class, item.hash, &item.placeholder));
            told.push(OthersItem {
                hash: item.hash,
                end: offset + length,
                embeds,
                elements: item.elements,
            });
        }
        let (class, tokens) = (class.class.clone(), tokens.clone());
        let [lora, salt] = [lora, salt].map(|word| word.map(str::to_owned));
        let told = Box::new(move || {
            let (lora, salt) = (lora.as_deref(), salt.as_deref());
            let blocks = PromptBlocks { tokens: &tokens, media: &media, lora, salt };
            let keys = keys_for(&class, &blocks).into_iter().map(BlockKey::get).collect();
            OthersJob { keys, prompt_tokens: tokens.len(), media: told }
        });
        Ok(CheckedJob { items: items.into(), told })
    }

    async fn item(
        self: &Arc<Self>,
        worker: &Worker,
        tokens: &[TokenId],
        planned: PlannedItem,
        class: &PresentClass,
        ask: AskForItem,
    ) -> Result<JobItem, ItemError> {
        let PlannedItem { modality, hash, origin, placeholder } = planned;
        let (content, processor_kwargs, url, size) = match origin {
            ItemOrigin::File { content, processor_kwargs, url, size } => {
                (content, processor_kwargs, url, size)
            }
            ItemOrigin::Tensors { elements } => {
                let tensors = self.tensors.as_ref().ok_or(ItemError::NoTensors)?;
                if placeholder.embeds() == 0
                    || placeholder.offset + placeholder.length > tokens.len()
                {
                    return Err(ItemError::NoPlaceholder);
                }
                let source = tensors.source(hash, Arc::new(move || ask(None)));
                return Ok(JobItem { modality, hash, placeholder, elements, source });
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
                let plan = self.plan_of(size, &settings)?;
                Some(Expected { form: Form { hash, format }, plan })
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
            ask,
            expected,
            plan: OnceLock::new(),
            came: Mutex::default(),
        };
        let plan = source.image_plan().await?;
        // Tensors have to fit the place that is checked.
        source.expected.take_if(|expected| expected.plan.original != plan.original);
        // An engine waits for ever with an item that it can't encode.
        let at_once = self.images.encoder_tokens(&plan, class)?;
        if at_once > worker.backend.capabilities().max_batched_tokens {
            return Err(ItemError::TooLarge(at_once));
        }
        if !stands_at(&plan.placeholder, &placeholder, tokens) {
            return Err(ItemError::OtherPlaceholder);
        }
        // Raw values are a byte each.
        let elements = plan.pixel_bytes(PixelFormat::RawU8) as u64;
        Ok(JobItem { modality, hash, placeholder, elements, source: Arc::new(source) })
    }

    /// What an image of this size becomes. Whether it has it is not known.
    fn plan_of(
        &self,
        (width, height): (u32, u32),
        settings: &ImageSettings,
    ) -> Result<Arc<ImagePlan>, RequestError> {
        self.door.limits().image.check(width, height)?;
        self.images.plan_of(ImageSize { width, height }, settings)
    }
}

/// Whether an item of these runs stands there in a prompt. Tokens of it that don't embed may have
/// been joined with their neighbours.
fn stands_at(runs: &[TokenRun], placeholder: &Placeholder, tokens: &[TokenId]) -> bool {
    let Placeholder { offset, length, is_embed } = placeholder;
    let here = offset.checked_add(*length).and_then(|end| tokens.get(*offset..end));
    let Some(here) = here.filter(|_| is_embed.as_ref().is_none_or(|mask| mask.len() == *length))
    else {
        return false;
    };
    let embeds = |at: usize| is_embed.as_ref().is_none_or(|mask| mask[at]);
    let mut expected =
        runs.iter().flat_map(|run| std::iter::repeat_n((run.token, run.embeds), run.count));
    let fits = |(at, token): (usize, &TokenId)| {
        expected.next().is_some_and(|(run, embed)| embed == embeds(at) && (!embed || run == *token))
    };
    here.iter().enumerate().all(fits) && expected.next().is_none()
}

/// An item whose file a frontend has.
struct FileSource {
    media: Arc<MachineMedia>,
    hash: MmHash,
    content: ContentHash,
    url: Option<String>,
    settings: Arc<ImageSettings>,
    class: PresentClass,
    ask: AskForItem,
    /// Tensors that are taken in place of the file.
    expected: Option<Expected>,
    /// What it becomes, once that is known.
    plan: OnceLock<Arc<ImagePlan>>,
    /// Pixels that came before an engine wanted them.
    came: Mutex<Option<Bytes>>,
}

impl FileSource {
    async fn come(&self) -> Result<Came, RequestError> {
        self.media.come(&self.content, self.url.as_deref(), self.expected.clone(), &self.ask).await
    }

    fn planned(&self, file: &EncodedMedia) -> Result<super::item::ItemPlan, RequestError> {
        self.media.images.plan(file, &self.settings, &self.class, "media", &CpuBudget::shared())
    }

    async fn image_plan(&self) -> Result<Arc<ImagePlan>, RequestError> {
        let known = || self.media.images.known_plan(&self.hash);
        let plan = match (known(), &self.expected) {
            (Some(plan), _) => plan,
            (None, expected) => match (self.come().await?, expected) {
                (Came::Pixels(pixels), Some(Expected { plan, .. })) => {
                    *self.came.lock().unwrap_or_else(PoisonError::into_inner) = Some(pixels);
                    plan.clone()
                }
                (Came::File(file), _) => {
                    self.planned(&file)?;
                    known().ok_or_else(|| RequestError::internal("a plan was lost at once"))?
                }
                (Came::Pixels(_), None) => {
                    return Err(RequestError::internal("tensors came that nobody expected"));
                }
            },
        };
        Ok(self.plan.get_or_init(|| plan).clone())
    }

    /// Pixels that were made elsewhere, and what they are pixels of: those that came before, or
    /// what another engine was given.
    fn made(&self, form: &Form) -> Result<Option<(TensorBytes, &Arc<ImagePlan>)>, RequestError> {
        let Some(plan) = self.plan.get() else { return Ok(None) };
        let is_expected = self.expected.as_ref().is_some_and(|expected| expected.form == *form);
        let came =
            self.came.lock().unwrap_or_else(PoisonError::into_inner).take().filter(|_| is_expected);
        let pixels = match came {
            Some(pixels) => Some(TensorBytes::Here(pixels)),
            None => self.media.images.kept(form, plan)?,
        };
        Ok(pixels.map(|pixels| (pixels, plan)))
    }

    async fn make(&self, order: TensorOrder) -> Result<Option<Vec<ItemField>>, SourceError> {
        let form = Form { hash: self.hash, format: order.format };
        let images = &self.media.images;
        if let Some((pixels, plan)) = self.made(&form).map_err(SourceError::new)? {
            return images.place(self.hash, plan, pixels, order).await.map_err(SourceError::new);
        }
        match (self.come().await.map_err(SourceError::new)?, &self.expected) {
            (Came::File(file), _) => {
                self.planned(&file).map_err(SourceError::new)?.source.tensors(order).await
            }
            (Came::Pixels(pixels), Some(Expected { form: came, plan })) if *came == form => images
                .place(self.hash, plan, TensorBytes::Here(pixels), order)
                .await
                .map_err(SourceError::new),
            // An engine wants what it has said that it wants.
            (Came::Pixels(_), _) => {
                Err(SourceError::new(RequestError::internal("tensors came in another form")))
            }
        }
    }
}

impl MediaSource for FileSource {
    fn tensors(
        &self,
        order: TensorOrder,
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
    fn an_item_stands_where_all_its_tokens_do() {
        let runs = [run(1, 1, false), run(2, 2, true), run(3, 1, false)];
        let tokens = [9, 1, 2, 2, 3, 9].map(TokenId);
        let at = |offset, length, mask: Option<&[bool]>| {
            stands_at(
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
        assert!(stands_at(
            &runs,
            &Placeholder { offset: 1, length: 4, is_embed: Some(mask.to_vec()) },
            &joined
        ));
        assert!(!at(1, 4, None));
        assert!(!at(1, 4, Some(&[true, true, true, false])));
        assert!(!at(1, 4, Some(&mask[..3])));
        assert!(stands_at(
            &[run(2, 2, true)],
            &Placeholder { offset: 2, length: 2, is_embed: None },
            &tokens
        ));
    }
}
