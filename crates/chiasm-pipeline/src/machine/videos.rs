//! Videos of jobs that a frontend has planned and cut: decoded here, like those of a local
//! frontend.
//!
//! If the cut can't be decoded here, the frontend is asked for the tensors of the whole file.

use std::sync::{Arc, OnceLock};

use chiasm_backend::{
    EncodedItem, ItemField, JobItem, MediaSource, SourceError, TensorBytes, TensorRequest,
    VideoDescription, VideoPart,
};
use chiasm_fleet::{PresentClass, Worker};
use chiasm_types::{MmHash, Modality, Placeholder, TokenId};
use futures_util::future::{BoxFuture, FutureExt};

use super::super::error::RequestError;
use super::super::video::{MadeVideo, ReceivedVideo, VideoPlanner, VideoRefusal};
use super::error::{CutError, ItemError};
use super::received::{ItemData, ReceivedItems};
use super::request::{CutFailure, RequestData, RequestReason};
use super::tensors::ReceivedTensors;
use super::{check_in_prompt, matches_placeholder};

/// The videos that frontends have planned, and their cuts.
pub(super) struct MachineVideos {
    planner: Arc<VideoPlanner>,
    cuts: ReceivedItems<Cut>,
    /// The tensors that frontends make if the cuts can't be decoded.
    tensors: Arc<ReceivedTensors>,
}

/// The parts of a video's cut.
type Cut = Vec<VideoPart>;

impl ItemData for Cut {
    fn bytes(&self) -> u64 {
        let description = |part: &VideoPart| size_of_val(&part.frames[..]) + size_of_val(part);
        self.iter().map(|part| part.bytes() + description(part) as u64).sum()
    }
}

/// A video of a job, as a frontend has planned it.
pub(super) struct VideoItem {
    /// The video's identity.
    pub(super) hash: MmHash,
    /// The video's placeholder in the prompt.
    pub(super) placeholder: Placeholder,
    pub(super) description: VideoDescription,
}

impl MachineVideos {
    /// Caches `cached_bytes` of cuts. `tensors` takes the tensors of videos that are not decoded
    /// here.
    pub(super) fn new(
        planner: VideoPlanner,
        cached_bytes: u64,
        tensors: Arc<ReceivedTensors>,
    ) -> Self {
        Self { planner: Arc::new(planner), cuts: ReceivedItems::new(cached_bytes), tensors }
    }

    /// Returns the slots in which the videos of a class are decoded; `None` if they are not.
    pub(super) fn slots_for(&self, class: &PresentClass) -> Option<u32> {
        self.planner.slots_for(class)
    }

    /// Accepts the cut of a video.
    ///
    /// # Errors
    /// Returns an error if a job waits for the cut of other frames.
    pub(super) fn put(&self, hash: MmHash, parts: Cut) -> Result<(), CutError> {
        self.cuts.put(hash, parts).map_err(|_| CutError::OtherFrames)
    }

    /// Checks a video of a job. If this process plans the video differently, its settings are not
    /// the frontend's; the frontend then sends tensors.
    ///
    /// # Errors
    /// Returns an error if the prompt does not have the placeholder, or if the worker can't encode
    /// the video.
    pub(super) async fn check(
        self: &Arc<Self>,
        worker: &Worker,
        tokens: &[TokenId],
        item: VideoItem,
        class: &PresentClass,
        request: RequestData,
    ) -> Result<JobItem, ItemError> {
        let VideoItem { hash, placeholder, description } = item;
        let video = match self.planner.plan_received(&description, class).await? {
            Ok(video) if video.hash == hash => video,
            refused => {
                let failure = match refused {
                    Ok(_) => CutFailure::other_plan("another identity"),
                    Err(VideoRefusal::NotPlanned(cause)) => CutFailure::other_plan(cause),
                    Err(VideoRefusal::Limit) => CutFailure::limit(),
                };
                check_in_prompt(&placeholder, tokens)?;
                return Ok(self.whole(hash, placeholder, 0, failure, request));
            }
        };
        if !matches_placeholder(&video.plan.runs, &placeholder, tokens) {
            return Err(ItemError::OtherPlaceholder);
        }
        let elements = video.elements();
        let embeds = video.plan.embeds;
        // An engine waits for ever with an item that it can't encode.
        if embeds > worker.backend.capabilities().max_batched_tokens {
            match self.planner.max_embeds(class).await {
                Ok(max) if embeds <= max => {}
                Ok(_) => return Err(ItemError::TooLarge(embeds)),
                Err(error) => {
                    let failure = CutFailure::processor(error);
                    return Ok(self.whole(hash, placeholder, elements, failure, request));
                }
            }
        }
        let source = Arc::new(CutSource { videos: self.clone(), video, request });
        Ok(JobItem { modality: Modality::Video, hash, placeholder, elements, source })
    }

    /// Returns an item whose tensors the frontend makes from the whole file.
    fn whole(
        &self,
        hash: MmHash,
        placeholder: Placeholder,
        elements: u64,
        failure: CutFailure,
        request: RequestData,
    ) -> JobItem {
        let source = self
            .tensors
            .source(hash, Arc::new(move || request(RequestReason::NotDecoded(failure.clone()))));
        JobItem { modality: Modality::Video, hash, placeholder, elements, source }
    }
}

/// The tensors of a video whose file a frontend has.
struct CutSource {
    videos: Arc<MachineVideos>,
    video: ReceivedVideo,
    request: RequestData,
}

impl MediaSource for CutSource {
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

impl CutSource {
    async fn make(&self, order: TensorRequest) -> Result<Option<Vec<ItemField>>, SourceError> {
        let Some(model_dtype) = order.model_dtype else {
            let error = RequestError::internal("an engine does not tell the type of its model");
            return Err(SourceError::new(error));
        };
        let failure = OnceLock::new();
        let decode = self.decode(&order, &failure);
        let made = self.video.tensors().make(&order, model_dtype, decode).await;
        match made.map_err(SourceError::new)? {
            MadeVideo::Fields(fields) => Ok(Some(fields)),
            MadeVideo::NotNeeded => Ok(None),
            MadeVideo::NotDecoded => {
                let failure = failure.into_inner().unwrap_or_else(CutFailure::other_frames);
                tracing::debug!(cause = failure.cause, "a video's cut is not decoded");
                let request = self.request.clone();
                let request = Arc::new(move || request(RequestReason::NotDecoded(failure.clone())));
                let hash = self.video.hash;
                self.videos.tensors.source(hash, request).tensors(order).await
            }
        }
    }

    /// Decodes the cut from the frontend. Returns `None` if that is impossible, and sets `failure`
    /// unless the cut's frames are at fault.
    async fn decode(
        &self,
        order: &TensorRequest,
        failure: &OnceLock<CutFailure>,
    ) -> Result<Option<TensorBytes>, RequestError> {
        // Started first, because the cut is of no use without it.
        let processor = match self.video.tensors().processor().await {
            Ok(processor) => processor,
            Err(error) => {
                failure.get_or_init(|| CutFailure::processor(error));
                return Ok(None);
            }
        };
        let parts = self.receive().await?;
        let decoded = self.video.decode(&processor, parts.to_vec(), order).await?;
        if decoded.is_none() {
            self.videos.cuts.remove(&self.video.hash);
        }
        Ok(decoded)
    }

    /// Returns the cut from the cache, or from the frontend.
    async fn receive(&self) -> Result<Arc<Cut>, RequestError> {
        let cuts = &self.videos.cuts;
        let hash = self.video.hash;
        let _permit = cuts.lock(hash).await;
        let has_frames = self.video.cut_check();
        let check = Box::new(move |parts: &Cut| has_frames(parts));
        cuts.get(hash, check, || (self.request)(RequestReason::Lacking)).await
    }
}

#[cfg(test)]
mod tests;
