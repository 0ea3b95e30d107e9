//! The items of a request that Chiasm plans itself: images and planned videos.

use std::sync::Arc;

use chiasm_fleet::PresentClass;
use chiasm_media::EncodedMedia;
use chiasm_request::{MediaKwargs, MediaRef};

use crate::error::{Cause, RequestError};
use crate::image::Images;
use crate::item::ItemPlan;
use crate::video::{PlannedVideos, VideoPlanner};
use chiasm_cpu::CpuBudget;

/// The planners of items that Chiasm plans, and a request's planned videos.
pub(super) struct NativeItems {
    pub(super) images: Arc<Images>,
    pub(super) videos: Option<Arc<VideoPlanner>>,
    pub(super) planned: PlannedVideos,
}

impl NativeItems {
    /// Returns the planner of videos, if any video of the request is planned.
    pub(super) fn video_planner(&self) -> Option<&Arc<VideoPlanner>> {
        self.videos.as_ref().filter(|_| !self.planned.is_empty())
    }

    /// Plans the items of a request for workers of a class. `longest_context` is the maximum number
    /// of tokens of a prompt over all classes.
    pub(super) fn plan(
        &self,
        media: &[EncodedMedia],
        sources: &[MediaRef],
        kwargs: &Arc<MediaKwargs>,
        class: &PresentClass,
        longest_context: usize,
        cpu: &CpuBudget,
    ) -> Result<Vec<ItemPlan>, RequestError> {
        let image_settings = || self.images.settings(&kwargs.processor, class);
        // Settings of images are checked even without images. Planned videos have settings of their
        // own, which were checked when they were planned.
        let mut settings = self.video_planner().is_none().then(image_settings).transpose()?;
        let mut items = Vec::with_capacity(media.len());
        let mut item_tokens = 0;
        for (index, (encoded, source)) in media.iter().zip(sources).enumerate() {
            let field = &source.field;
            let item = match (&self.videos, self.planned.get(index)) {
                (Some(videos), Some(video)) => {
                    videos.plan_item(encoded, video, kwargs, class, field, cpu)?
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
            // anything of that size is built. A class with a smaller context is left out later.
            item_tokens += item.embeds;
            if item_tokens > longest_context {
                let full =
                    Cause::ContextFull { tokens: item_tokens, max_model_len: longest_context };
                return Err(RequestError::from(full).at(field));
            }
            items.push(item);
        }
        Ok(items)
    }
}
