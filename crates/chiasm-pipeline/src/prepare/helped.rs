//! Plans of conversations with items that vLLM's own processor makes.

use std::iter::repeat_n;
use std::sync::Arc;

use chiasm_fleet::PresentClass;
use chiasm_media::EncodedMedia;
use chiasm_prompt::{Expanded, MarkerText};
use chiasm_request::{Chat, MediaRef};
use chiasm_types::{Modality, TokenId};
use futures_util::future::{join_all, try_join_all};
use serde_json::{Map, Value};

use super::{Planned, Preparation, check_tokens, in_prompt_order, planned, render, that_fit};
use crate::cpu::price;
use crate::error::{Cause, RequestError};
use crate::helped::conversation;
use crate::helped::{Helped, HelpedItem, HelpedSettings, Helpers, Written};
use crate::item::ItemPlan;
use crate::opening::check_counts;
use crate::prompt_price::{SMALL_TOKENS, is_small_chat, price_of_chat};

/// A conversation's items, as it has them.
struct Items {
    media: Vec<EncodedMedia>,
    sources: Vec<MediaRef>,
    /// Those that were made by vLLM's processor.
    helped: Vec<Option<HelpedItem>>,
    /// Settings of the others.
    kwargs: Map<String, Value>,
}

impl Preparation<'_> {
    /// Plans a conversation with items that vLLM's own processors make: for workers of each release
    /// by that release's.
    pub(crate) async fn plan_with_help(
        &self,
        helpers: &Helpers,
        chat: Chat,
        media: Vec<EncodedMedia>,
    ) -> Result<Vec<Planned>, RequestError> {
        let needy =
            media.iter().zip(&chat.media).find(|(encoded, _)| self.pipeline.needs_help(encoded));
        let field = needy.map_or("messages", |(_, source)| &source.field);
        let of_classes =
            helpers.of_classes(&self.classes).await.map_err(|error| error.at(field))?;
        let requests = repeat_n((chat, media), of_classes.len());
        let plans = of_classes.into_iter().zip(requests).map(
            |((helped, classes), (chat, media))| async move {
                Self { classes, ..self.clone() }.plan_by(helped, chat, media).await
            },
        );
        let plans = join_all(plans).await.into_iter().reduce(|one, other| match (one, other) {
            (Ok(one), Ok(other)) => Ok([one, other].concat()),
            // What fails for one release may do for another.
            (Ok(plans), Err(_)) | (Err(_), Ok(plans)) => Ok(plans),
            (Err(error), Err(_)) => Err(error),
        });
        plans.unwrap_or_else(|| Err(RequestError::not_ready()))
    }

    /// Plans it for workers of one release.
    async fn plan_by(
        &self,
        helped: &Arc<Helped>,
        mut chat: Chat,
        mut media: Vec<EncodedMedia>,
    ) -> Result<Vec<Planned>, RequestError> {
        let needy =
            media.iter().zip(&chat.media).find(|(encoded, _)| self.pipeline.needs_help(encoded));
        let field = needy.map_or("messages", |(_, source)| &source.field);
        let settings =
            helped.settings(&chat.media_kwargs).await.map_err(|error| error.at(field))?;
        if settings.hears_videos() {
            if settings.greeting().writes_conversations {
                let message = "the sound of videos is not taken in this model's conversations";
                return Err(RequestError::invalid(
                    "mm_processor_kwargs.use_audio_in_video",
                    message,
                ));
            }
            (media, chat.media) = with_sounds(media, std::mem::take(&mut chat.media));
        }
        let of_server = &self.pipeline.limits.items_per_prompt;
        check_counts(&chat.media, |modality| {
            settings.limit(modality).min(of_server.get(modality))
        })?;
        let open = async |(encoded, source): (&EncodedMedia, &MediaRef)| match self
            .pipeline
            .needs_help(encoded)
        {
            true => helped
                .open(encoded, &settings, &source.field)
                .await
                .map(Some)
                .map_err(|e| e.at(&source.field)),
            false => Ok(None),
        };
        let opened = try_join_all(media.iter().zip(&chat.media).map(open)).await?;
        let (small, cost) = (
            is_small_chat(&chat, &self.pipeline.model),
            price_of_chat(&chat, &self.pipeline.model, self.cpu),
        );
        let sources = std::mem::take(&mut chat.media);
        let kwargs = std::mem::take(&mut chat.media_kwargs).processor;
        let items = Items { media, sources, helped: opened, kwargs };
        let natives = self.natives_of_first(&items)?;
        let written = self.written(&natives, &items, &settings)?;
        let expanded = if settings.greeting().writes_conversations {
            let model = self.pipeline.model.clone();
            let (messages, settings_of_chat) =
                self.run(small, cost, move || conversation(chat, &model.chats)).await?;
            settings.write(&messages, &settings_of_chat, &written).await?
        } else {
            let tokens = self.render_with_help(chat, &items, &settings, small, cost).await?;
            settings.expand(&tokens, &written).await?
        };
        check_tokens(&expanded.tokens, self.pipeline.model.last_token())?;
        self.plans_with_help(helped, &items, expanded).await
    }

    /// The prompt with a place for each item.
    async fn render_with_help(
        &self,
        chat: Chat,
        items: &Items,
        settings: &HelpedSettings,
        small: bool,
        cost: std::time::Duration,
    ) -> Result<Vec<TokenId>, RequestError> {
        let mut texts: Vec<(Modality, Vec<String>)> = Vec::new();
        for modality in items.media.iter().map(|item| &item.modality) {
            if texts.iter().all(|(known, _)| known != modality) {
                texts.push((modality.clone(), settings.marker_texts(modality).to_vec()));
            }
        }
        let (model, apart) = (self.pipeline.model.clone(), self.apart.clone());
        self.run(small, cost, move || {
            let texts: Vec<(&Modality, Vec<&str>)> = texts
                .iter()
                .map(|(modality, texts)| (modality, texts.iter().map(String::as_str).collect()))
                .collect();
            let texts: Vec<_> =
                texts.iter().map(|(modality, texts)| MarkerText { modality, texts }).collect();
            render(&model, chat, &texts, &apart)
        })
        .await
    }

    /// The plans of the items that Chiasm makes itself, for workers of some class.
    fn natives_of_first(&self, items: &Items) -> Result<Vec<Option<ItemPlan>>, RequestError> {
        self.natives(items, self.classes.first().ok_or_else(RequestError::not_ready)?)
    }

    /// How all items are written. That does not differ between classes of workers; what they are
    /// called does.
    fn written<'b>(
        &'b self,
        natives: &'b [Option<ItemPlan>],
        items: &'b Items,
        settings: &HelpedSettings,
    ) -> Result<Vec<Written<'b>>, RequestError> {
        let marker =
            self.pipeline.model.vision.as_ref().map_or(&[][..], |vision| &vision.prompt().marker);
        let written: Vec<Written<'_>> = natives
            .iter()
            .zip(&items.helped)
            .filter_map(|(native, helped)| match (native, helped) {
                (Some(native), _) => {
                    Some(Written::Here { modality: &native.modality, marker, runs: &native.runs })
                }
                (None, helped) => helped.as_ref().map(Written::Helped),
            })
            .collect();
        // Before anything of that size is made.
        let stands_alone =
            |item: &&Written<'_>| !(settings.hears_videos() && *item.modality() == Modality::Audio);
        let tokens_of_items =
            written.iter().filter(stands_alone).map(Written::tokens).fold(0, usize::saturating_add);
        let max_model_len = self.classes.iter().map(|class| class.max_model_len).max().unwrap_or(0);
        if tokens_of_items > max_model_len {
            return Err(Cause::ContextFull { tokens: tokens_of_items, max_model_len }.into());
        }
        Ok(written)
    }

    /// The plans of the items that Chiasm makes itself, for workers of a class.
    fn natives(
        &self,
        items: &Items,
        class: &PresentClass,
    ) -> Result<Vec<Option<ItemPlan>>, RequestError> {
        let images = &self.pipeline.images;
        let plan =
            |((encoded, source), helped): ((&EncodedMedia, &MediaRef), &Option<HelpedItem>)| {
                match helped {
                    Some(_) => Ok(None),
                    None => {
                        let settings = images.settings(&items.kwargs, class)?;
                        images.plan(encoded, &settings, class, &source.field, self.cpu).map(Some)
                    }
                }
            };
        items.media.iter().zip(&items.sources).zip(&items.helped).map(plan).collect()
    }

    /// What the prompt is for workers of each class.
    async fn plans_with_help(
        &self,
        helped: &Arc<Helped>,
        items: &Items,
        expanded: Expanded,
    ) -> Result<Vec<Planned>, RequestError> {
        let Expanded { tokens, placeholders } = expanded;
        let mut of_classes = Vec::with_capacity(self.classes.len());
        for class in self.classes.iter() {
            let mut plans = Vec::with_capacity(placeholders.len());
            for ((native, item), at) in
                self.natives(items, class)?.into_iter().zip(&items.helped).zip(&placeholders)
            {
                plans.push(match item {
                    Some(item) => item.plan(helped, at.embeds(), class, self.cpu)?,
                    None => native.ok_or_else(|| RequestError::internal("an item has no plan"))?,
                });
            }
            of_classes.push((class.clone(), plans));
        }
        let (tokens, apart, classes) = (Arc::new(tokens), self.apart.clone(), self.classes.clone());
        self.run(tokens.len() <= SMALL_TOKENS, price::keys(tokens.len()), move || {
            let plans = of_classes.into_iter().map(|(class, items)| {
                planned(
                    &class,
                    tokens.clone(),
                    in_prompt_order(items, placeholders.clone()),
                    &apart,
                )
            });
            that_fit(plans.collect(), &classes)
        })
        .await
    }
}

/// The items, with the sound of each video behind it.
fn with_sounds(
    media: Vec<EncodedMedia>,
    sources: Vec<MediaRef>,
) -> (Vec<EncodedMedia>, Vec<MediaRef>) {
    let sound_of = |(encoded, source): &(EncodedMedia, MediaRef)| {
        (encoded.modality == Modality::Video).then(|| {
            let mut sound = encoded.clone();
            sound.modality = Modality::Audio;
            (sound, MediaRef { modality: Modality::Audio, ..source.clone() })
        })
    };
    let items = media.into_iter().zip(sources);
    items.flat_map(|item| [sound_of(&item), Some(item)].into_iter().rev()).flatten().unzip()
}
