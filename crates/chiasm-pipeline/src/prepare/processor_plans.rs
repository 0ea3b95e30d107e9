//! Plans of conversations that need vLLM's own processor.

use std::iter::repeat_n;
use std::sync::Arc;

use chiasm_fleet::PresentClass;
use chiasm_media::EncodedMedia;
use chiasm_prompt::{Expanded, MarkerText};
use chiasm_request::{Chat, MediaKwargs, MediaRef};
use chiasm_types::{Modality, TokenId};
use futures_util::future::{join_all, try_join_all};

use super::{
    ClassPlan, Preparation, check_tokens, either_plans, in_prompt_order, render, retain_fitting,
};
use crate::error::{Cause, RequestError};
use crate::item::ItemPlan;
use crate::opening::check_counts;
use crate::processor_items::{
    ProcessorItem, ProcessorSettings, PromptItem, ReleaseProcessor, VllmProcessors, conversation,
};
use crate::prompt_price::{SMALL_TOKENS, is_small_chat, price_of_chat};
use crate::video::PlannedVideos;
use chiasm_cpu::price;

/// The media items of a conversation, in the conversation's order.
struct Items {
    media: Vec<EncodedMedia>,
    sources: Vec<MediaRef>,
    /// The items that vLLM's processor made; `None` for items that Chiasm processes.
    processor_items: Vec<Option<ProcessorItem>>,
    /// The planned videos, which take the place of processor items.
    videos: PlannedVideos,
    /// The settings of the items that Chiasm processes.
    kwargs: Arc<MediaKwargs>,
}

impl Preparation<'_> {
    /// Plans a conversation once per vLLM release, with that release's processor, for the workers
    /// of the release.
    pub(crate) async fn plan_with_processors(
        &self,
        processors: &VllmProcessors,
        chat: Chat,
        media: Vec<EncodedMedia>,
    ) -> Result<Vec<ClassPlan>, RequestError> {
        let field = self.field_at_fault(&chat, &media);
        let by_release = processors.by_release(&self.classes).await;
        let by_release = by_release.map_err(|error| error.at(field))?;
        let requests = repeat_n((chat, media), by_release.len());
        let plans = by_release.into_iter().zip(requests).map(
            |((processor, classes), (chat, media))| async move {
                Self { classes, ..self.clone() }.plan_with(processor, chat, media).await
            },
        );
        let plans = join_all(plans).await.into_iter().reduce(either_plans);
        plans.unwrap_or_else(|| Err(RequestError::not_ready()))
    }

    /// Returns the field of the first item that needs vLLM's processor, or else `messages`.
    fn field_at_fault<'b>(&self, chat: &'b Chat, media: &[EncodedMedia]) -> &'b str {
        let mut items = media.iter().zip(&chat.media).enumerate();
        let item = items.find(|(index, (encoded, _))| {
            self.videos.get(*index).is_none() && self.pipeline.needs_vllm_processor(encoded)
        });
        item.map_or("messages", |(_, (_, source))| &source.field)
    }

    /// Plans a conversation for the workers of one vLLM release.
    async fn plan_with(
        &self,
        processor: &Arc<ReleaseProcessor>,
        mut chat: Chat,
        mut media: Vec<EncodedMedia>,
    ) -> Result<Vec<ClassPlan>, RequestError> {
        let settings = processor.settings(&chat.media_kwargs).await;
        let settings = settings.map_err(|error| error.at(self.field_at_fault(&chat, &media)))?;
        if settings.uses_audio_in_video() {
            if settings.greeting().writes_conversations {
                let message =
                    "'use_audio_in_video' is not supported in conversations with this model";
                return Err(RequestError::invalid(
                    "mm_processor_kwargs.use_audio_in_video",
                    message,
                ));
            }
            (media, chat.media) = add_soundtracks(media, std::mem::take(&mut chat.media));
        }
        let videos = self.videos_for_release();
        let server_limits = &self.pipeline.limits.items_per_prompt;
        check_counts(&chat.media, |modality| {
            settings.limit(modality).min(server_limits.get(modality))
        })?;
        let open = async |(index, (encoded, source)): (usize, (&EncodedMedia, &MediaRef))| {
            if videos.get(index).is_some() || !self.pipeline.needs_vllm_processor(encoded) {
                return Ok(None);
            }
            let item =
                processor.open(encoded, &settings, &source.field, self.predicts_recordings).await;
            item.map(Some).map_err(|error| error.at(&source.field))
        };
        let to_open = media.iter().zip(&chat.media).enumerate();
        let processor_items = try_join_all(to_open.map(open)).await?;
        let is_small = is_small_chat(&chat, &self.pipeline.model);
        let cost = price_of_chat(&chat, &self.pipeline.model, self.cpu);
        let sources = std::mem::take(&mut chat.media);
        let kwargs = Arc::new(*std::mem::take(&mut chat.media_kwargs));
        let items = Items { media, sources, processor_items, videos, kwargs };
        let native_plans = self.native_plans_of_first_class(&items)?;
        let prompt_items = self.prompt_items(&native_plans, &items, &settings)?;
        let expanded = if settings.greeting().writes_conversations {
            let model = self.pipeline.model.clone();
            let (messages, chat_settings) =
                self.run(is_small, cost, move || conversation(chat, &model.chats)).await?;
            settings.render(&messages, &chat_settings, &prompt_items).await?
        } else {
            let tokens = self.render_markers(chat, &items, &settings, is_small, cost).await?;
            settings.expand(&tokens, &prompt_items).await?
        };
        check_tokens(&expanded.tokens, self.pipeline.model.last_token())?;
        self.class_plans(processor, &items, expanded).await
    }

    /// Returns the planned videos if all workers of the release take them. No video of a request
    /// with soundtracks is planned.
    fn videos_for_release(&self) -> PlannedVideos {
        let videos = self.pipeline.videos.as_ref().filter(|_| !self.videos.is_empty());
        match videos {
            Some(videos) if videos.check_and_count(&self.classes, &self.videos) => {
                self.videos.clone()
            }
            _ => PlannedVideos::default(),
        }
    }

    /// Renders and tokenizes the conversation, with a marker for each item.
    async fn render_markers(
        &self,
        chat: Chat,
        items: &Items,
        settings: &ProcessorSettings,
        is_small: bool,
        cost: std::time::Duration,
    ) -> Result<Vec<TokenId>, RequestError> {
        let mut texts: Vec<(Modality, Vec<String>)> = Vec::new();
        for modality in items.media.iter().map(|item| &item.modality) {
            if texts.iter().all(|(known, _)| known != modality) {
                texts.push((modality.clone(), settings.marker_texts(modality).to_vec()));
            }
        }
        let model = self.pipeline.model.clone();
        let namespace = self.namespace.clone();
        self.run(is_small, cost, move || {
            let texts: Vec<(&Modality, Vec<&str>)> = texts
                .iter()
                .map(|(modality, texts)| (modality, texts.iter().map(String::as_str).collect()))
                .collect();
            let texts: Vec<_> =
                texts.iter().map(|(modality, texts)| MarkerText { modality, texts }).collect();
            render(&model, chat, &texts, &namespace)
        })
        .await
    }

    /// Plans the items that Chiasm processes, for workers of the first plan class.
    fn native_plans_of_first_class(
        &self,
        items: &Items,
    ) -> Result<Vec<Option<ItemPlan>>, RequestError> {
        self.native_plans(items, self.classes.first().ok_or_else(RequestError::not_ready)?)
    }

    /// Returns the items' expansions in the prompt. All plan classes have the same expansions, but
    /// not the same identities of items.
    ///
    /// # Errors
    /// Returns [`Cause::ContextFull`] if the items alone exceed every worker's context.
    fn prompt_items<'b>(
        &'b self,
        native_plans: &'b [Option<ItemPlan>],
        items: &'b Items,
        settings: &ProcessorSettings,
    ) -> Result<Vec<PromptItem<'b>>, RequestError> {
        let image_marker =
            self.pipeline.model.vision.as_ref().map_or(&[][..], |vision| &vision.prompt().marker);
        let video_marker = self.pipeline.videos.as_ref().map_or(&[][..], |videos| videos.marker());
        let prompt_items: Vec<PromptItem<'_>> = native_plans
            .iter()
            .zip(&items.processor_items)
            .filter_map(|(native, processor_item)| match native {
                Some(native) => Some(PromptItem::Native {
                    modality: &native.modality,
                    marker: match native.modality {
                        Modality::Video => video_marker,
                        _ => image_marker,
                    },
                    runs: &native.runs,
                }),
                None => processor_item.as_ref().map(PromptItem::Processor),
            })
            .collect();
        // A soundtrack's tokens are within its video's placeholder.
        let is_counted = |item: &&PromptItem<'_>| {
            !(settings.uses_audio_in_video() && *item.modality() == Modality::Audio)
        };
        let counts = prompt_items.iter().filter(is_counted).map(PromptItem::tokens);
        let tokens = counts.fold(0, usize::saturating_add);
        // Checked before a prompt of that size is built.
        let max_model_len = self.classes.iter().map(|class| class.max_model_len).max().unwrap_or(0);
        if tokens > max_model_len {
            return Err(Cause::ContextFull { tokens, max_model_len }.into());
        }
        Ok(prompt_items)
    }

    /// Plans the items that Chiasm processes, for workers of a plan class.
    fn native_plans(
        &self,
        items: &Items,
        class: &PresentClass,
    ) -> Result<Vec<Option<ItemPlan>>, RequestError> {
        let images = &self.pipeline.images;
        let zipped = items.media.iter().zip(&items.sources).zip(&items.processor_items);
        let plans = zipped.enumerate().map(|(index, ((encoded, source), processor_item))| {
            if processor_item.is_some() {
                return Ok(None);
            }
            if let (Some(videos), Some(video)) = (&self.pipeline.videos, items.videos.get(index)) {
                let field = &source.field;
                let item = videos.plan_item(encoded, video, &items.kwargs, class, field, self.cpu);
                return item.map(Some);
            }
            let settings = images.settings(&items.kwargs.processor, class)?;
            images.plan(encoded, &settings, class, &source.field, self.cpu).map(Some)
        });
        plans.collect()
    }

    /// Plans the expanded prompt for each plan class.
    async fn class_plans(
        &self,
        processor: &Arc<ReleaseProcessor>,
        items: &Items,
        expanded: Expanded,
    ) -> Result<Vec<ClassPlan>, RequestError> {
        let Expanded { tokens, placeholders } = expanded;
        let mut item_plans = Vec::with_capacity(self.classes.len());
        for class in self.classes.iter() {
            let mut plans = Vec::with_capacity(placeholders.len());
            let native_plans = self.native_plans(items, class)?.into_iter();
            for ((native, item), placeholder) in
                native_plans.zip(&items.processor_items).zip(&placeholders)
            {
                let embeds = placeholder.embed_count();
                plans.push(match item {
                    Some(item) => item.plan(processor, embeds, class, self.cpu)?,
                    None => native.ok_or_else(|| RequestError::internal("an item has no plan"))?,
                });
            }
            item_plans.push((class.clone(), plans));
        }
        let tokens = Arc::new(tokens);
        let namespace = self.namespace.clone();
        let classes = self.classes.clone();
        self.run(tokens.len() <= SMALL_TOKENS, price::keys(tokens.len()), move || {
            let plans = item_plans.into_iter().map(|(class, items)| {
                let placed = in_prompt_order(items, placeholders.clone());
                ClassPlan::new(&class, tokens.clone(), placed, &namespace)
            });
            retain_fitting(plans.collect(), &classes)
        })
        .await
    }
}

/// Adds the soundtrack of each video as an audio item after the video.
fn add_soundtracks(
    media: Vec<EncodedMedia>,
    sources: Vec<MediaRef>,
) -> (Vec<EncodedMedia>, Vec<MediaRef>) {
    let soundtrack = |(encoded, source): &(EncodedMedia, MediaRef)| {
        (encoded.modality == Modality::Video).then(|| {
            let mut audio = encoded.clone();
            audio.modality = Modality::Audio;
            (audio, MediaRef { modality: Modality::Audio, ..source.clone() })
        })
    };
    let items = media.into_iter().zip(sources);
    items.flat_map(|item| [soundtrack(&item), Some(item)].into_iter().rev()).flatten().unzip()
}
