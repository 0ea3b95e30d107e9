//! The items of a request that Chiasm plans itself: images and planned videos.

use std::sync::Arc;

use chiasm_fleet::PresentClass;
use chiasm_media::EncodedMedia;
use chiasm_request::{MediaKwargs, MediaRef};

use crate::cpu::CpuBudget;
use crate::error::{Cause, RequestError};
use crate::image::Images;
use crate::item::ItemPlan;
use crate::video::{PlannedVideos, Videos};

/// The planners of items that Chiasm plans, and a request's planned videos.
pub(super) struct NativeItems {
    pub(super) images: Arc<Images>,
    pub(super) videos: Option<Arc<Videos>>,
    pub(super) planned: PlannedVideos,
}

impl NativeItems {
    /// Returns the planner of videos, if any video of the request is planned.
    pub(super) fn videos(&self) -> Option<&Arc<Videos>> {
        self.videos.as_ref().filter(|_| !self.planned.is_empty())
    }

    /// Plans the items of a request for workers of a class.
    pub(super) fn plan(
        &self,
        media: &[EncodedMedia],
        sources: &[MediaRef],
        kwargs: &Arc<MediaKwargs>,
        class: &PresentClass,
        cpu: &CpuBudget,
    ) -> Result<Vec<ItemPlan>, RequestError> {
        let image_settings = || self.images.settings(&kwargs.processor, class);
        // A request without media must not have invalid settings either. Those of planned videos
        // are valid, but need not be settings of images.
        let mut settings = self.videos().is_none().then(image_settings).transpose()?;
        let mut items = Vec::with_capacity(media.len());
        let mut item_tokens = 0;
        for (index, (encoded, source)) in media.iter().zip(sources).enumerate() {
            let field = &source.field;
            let item = match (&self.videos, self.planned.get(index)) {
                (Some(videos), Some(video)) => {
                    videos.item(encoded, video, kwargs, class, field, cpu)?
                }
                _ => {
                    let settings = match &mut settings {
                        Some(settings) => settings,
                        none => none.insert(image_settings()?),
                    };
                    self.images.plan(encoded, settings, class, field, cpu)?
                }
            };
            // A request's settings can make items arbitrarily large, so this is checked before
            // anything of that size is built.
            item_tokens += item.embeds;
            if item_tokens > class.max_model_len {
                let max_model_len = class.max_model_len;
                return Err(RequestError::from(Cause::ContextFull {
                    tokens: item_tokens,
                    max_model_len,
                })
                .at(field));
            }
            items.push(item);
        }
        Ok(items)
    }
}
