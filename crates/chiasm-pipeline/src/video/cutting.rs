//! The cut of a planned video, for processes of this machine and for other machines.

use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{CuttableVideo, PartFrame, SourceError, VideoDescription, VideoPart};
use chiasm_request::MediaKwargs;
use chiasm_video::{CutPart, Piece, VideoIndex};
use futures_util::future::{BoxFuture, FutureExt};
use serde_json::{Map, Value};

use super::OTHER_FRAMES;
use super::planned::LARGEST_FORMAT;
use super::source::VideoSource;
use crate::error::RequestError;
use crate::processor_items::VideoSlots;
use chiasm_cpu::price;

impl VideoSource {
    /// Cuts the planned frames out of the file, into about `parts` parts. Returns `None` if that is
    /// impossible.
    pub(super) async fn cut_into(
        &self,
        parts: usize,
    ) -> Result<Option<Vec<VideoPart>>, RequestError> {
        let file = self.encoded.bytes.clone();
        let video = self.video.clone();
        let ticket = self.budget.ticket(price::video_index(file.len()))?;
        let cut = move || {
            let index = VideoIndex::read(&file).ok()?;
            let cut = index.cut_into(&file, &video.plan.frames, parts).ok()?;
            Some(cut.parts.into_iter().map(|part| to_video_part(part, &file)).collect())
        };
        Ok(self.videos.cpu.run(&ticket, cut).await?)
    }
}

impl CuttableVideo for VideoSource {
    fn description(&self) -> VideoDescription {
        let MediaKwargs { processor, io } = &*self.kwargs;
        let video = self.video.plan.video;
        VideoDescription {
            content: *self.encoded.content.as_bytes(),
            frames: video.frames,
            fps: video.fps,
            width: video.width,
            height: video.height,
            processor_kwargs: to_json(processor),
            io_kwargs: to_json(io),
        }
    }

    // A cut is smaller than its file, but for some headers.
    fn item_bytes(&self) -> u64 {
        (self.video.plan.pixel_bytes(LARGEST_FORMAT) + self.encoded.bytes.len()) as u64
    }

    fn cut(&self, slots: u32) -> BoxFuture<'_, Result<Vec<VideoPart>, SourceError>> {
        let cut = async move {
            let parts = VideoSlots::for_cost(Some(self.video.decode_cost), slots) as usize;
            let parts = self.cut_into(parts).await.map_err(|error| error.at(&self.field));
            parts.map_err(SourceError::new)?.ok_or_else(|| {
                self.reject_cut();
                let error = RequestError::stale_plan("the video can't be cut as planned");
                SourceError::new(error.at(&self.field))
            })
        };
        cut.boxed()
    }

    fn reject_cut(&self) {
        self.videos.plans.insert(self.video.key, Err(OTHER_FRAMES));
    }
}

/// Returns an object as JSON.
fn to_json(object: &Map<String, Value>) -> Arc<str> {
    if object.is_empty() { "{}".into() } else { Value::Object(object.clone()).to_string().into() }
}

/// Returns a part with the bytes of the file that it was cut out of.
fn to_video_part(part: CutPart, file: &Bytes) -> VideoPart {
    let CutPart { pieces, frames, samples, decode_cost: _ } = part;
    let pieces = pieces.into_iter().map(|piece| match piece {
        Piece::Bytes(bytes) => Bytes::from(bytes),
        Piece::File(range) => file.slice(range),
    });
    let frames =
        frames.into_iter().map(|frame| PartFrame { frame: frame.frame, position: frame.position });
    VideoPart { pieces: pieces.collect(), samples, frames: frames.collect() }
}
