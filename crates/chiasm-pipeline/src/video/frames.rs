//! The frames of a planned video: cut out of the file, decoded by processes, and processed here.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use chiasm_backend::{TensorBytes, TensorRequest};
use chiasm_processor::{FramesCall, Processor, ProcessorError};
use chiasm_video::{CutPart, Piece, VideoIndex};
use chiasm_vision::{ImageSize, PixelFormat, RgbView};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use tokio::sync::Mutex;

use super::planned::{PlannedVideo, frame_price};
use super::source::VideoSource;
use crate::error::RequestError;
use crate::model::ServedModel;
use crate::processed::{TensorWriter, pixel_format};
use chiasm_cpu::{Ticket, price};

/// The tensor of pixels, to which the frames of all parts are written.
type SharedTensor = Arc<Mutex<TensorWriter>>;

impl VideoSource {
    /// Decodes and processes the planned frames, a few at a time.
    ///
    /// Returns `None` if the cut decodes to unexpected frames, so that the whole file must be
    /// decoded.
    ///
    /// # Errors
    /// Returns an error if a processor is unavailable or takes too long, or if memory is exhausted.
    pub(super) async fn decode(
        &self,
        order: &TensorRequest,
    ) -> Result<Option<TensorBytes>, RequestError> {
        let Self { videos, video, .. } = self;
        let processor = videos.processors.for_class(&self.class).await?.processor().await?;
        let slots = videos.processors.video_slots().acquire(Some(video.decode_cost)).await;
        // A video that takes several slots is decoded by as many processes.
        let processes = slots.as_ref().map_or(1, |slots| slots.num_permits());
        let Some(parts) = self.cut(processes).await? else { return Ok(None) };
        let format = pixel_format(order.format);
        let bytes = video.plan.pixel_bytes(format);
        let ticket = self.frame_ticket(format)?;
        let memory = order.memory.clone();
        let budget = videos.budget.clone();
        // Clears the memory if it is not the engine's.
        let reserve = move || TensorWriter::reserve(&*memory, &budget, bytes);
        let tensor: SharedTensor = Arc::new(Mutex::new(videos.cpu.run(&ticket, reserve).await??));
        let decode = |part| self.decode_part(&processor, part, format, &ticket, &tensor);
        let decoded: Result<(), RequestError> =
            stream::iter(parts).map(decode).buffer_unordered(processes).try_collect().await;
        drop(slots);
        match decoded {
            Ok(()) => {
                let tensor = Arc::into_inner(tensor)
                    .ok_or_else(|| RequestError::internal("a frame is still being written"))?;
                Ok(Some(tensor.into_inner().publish()))
            }
            Err(error) if is_fault_of_cut(&error) => {
                tracing::warn!(%error, "a video is processed as a whole file");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Cuts the planned frames out of the file, into about `parts` parts. Returns `None` if that is
    /// impossible.
    async fn cut(&self, parts: usize) -> Result<Option<Vec<CutPart>>, RequestError> {
        let file = self.encoded.bytes.clone();
        let video = self.video.clone();
        let ticket = self.budget.ticket(price::video_index(file.len()))?;
        let cut = move || {
            let index = VideoIndex::read(&file).ok()?;
            Some(index.cut_into(&file, &video.plan.frames, parts).ok()?.parts)
        };
        Ok(self.videos.cpu.run(&ticket, cut).await?)
    }

    /// Decodes a part of the video, and writes its frames to the tensor.
    async fn decode_part(
        &self,
        processor: &Processor,
        part: CutPart,
        format: PixelFormat,
        ticket: &Ticket,
        tensor: &SharedTensor,
    ) -> Result<(), RequestError> {
        let file = &self.encoded.bytes;
        let CutPart { pieces, frames, samples, .. } = part;
        let pieces = pieces.into_iter().map(|piece| match piece {
            Piece::Bytes(bytes) => Bytes::from(bytes),
            Piece::File(range) => file.slice(range),
        });
        let size = self.video.plan.video;
        let call = FramesCall {
            pieces: pieces.collect(),
            samples: samples.into(),
            positions: frames.iter().map(|frame| frame.position.into()).collect(),
            width: size.width,
            height: size.height,
        };
        let mut reader = processor.frames(call).await?;
        for frame in frames {
            let unplanned = || RequestError::internal("a frame is missing or was not planned");
            let pixels = reader.next().await?.ok_or_else(unplanned)?;
            let index = self.video.plan.frames.binary_search(&frame.frame);
            let job = FrameJob {
                model: self.videos.model.clone(),
                video: self.video.clone(),
                index: index.map_err(|_| unplanned())?,
                pixels,
                format,
            };
            let mut tensor = tensor.clone().lock_owned().await;
            self.videos.cpu.run(ticket, move || job.write(tensor.bytes())).await??;
        }
        // The frames are confirmed only at the end.
        match reader.next().await? {
            None => Ok(()),
            Some(_) => Err(RequestError::internal("more frames than were wanted")),
        }
    }

    /// Charges all frames at the first call. Returns a ticket for processing one frame.
    fn frame_ticket(&self, format: PixelFormat) -> Result<Ticket, RequestError> {
        let ticket: &OnceLock<Ticket> = &self.ticket;
        if let Some(ticket) = ticket.get() {
            return Ok(ticket.clone());
        }
        let plan = &self.video.plan;
        let price = frame_price(plan, format);
        let others = u32::try_from(plan.frames.len()).unwrap_or(u32::MAX).saturating_sub(1);
        drop(self.budget.ticket(price.saturating_mul(others))?);
        let new = self.budget.ticket(price)?;
        Ok(ticket.get_or_init(|| new).clone())
    }
}

/// Returns `true` if decoding the whole file may succeed where decoding its parts failed.
fn is_fault_of_cut(error: &RequestError) -> bool {
    matches!(
        &error.cause,
        crate::error::Cause::Processor(ProcessorError::OtherFrames(_) | ProcessorError::Refused(_))
    )
}

/// The inputs of processing one frame, on any thread.
struct FrameJob {
    model: Arc<ServedModel>,
    video: Arc<PlannedVideo>,
    /// The frame's index in [`VideoPlan::frames`](chiasm_vision::VideoPlan::frames).
    index: usize,
    /// Rows of RGB.
    pixels: Bytes,
    format: PixelFormat,
}

impl FrameJob {
    /// Writes the frame's part of the tensor.
    fn write(&self, out: &mut [u8]) -> Result<(), RequestError> {
        let Self { model, video, index, pixels, format } = self;
        let PlannedVideo { plan, request, .. } = &**video;
        let model =
            model.videos.as_ref().map_err(|reason| RequestError::internal(reason.to_string()))?;
        let size = ImageSize { width: plan.video.width, height: plan.video.height };
        let frame = RgbView::new(size, pixels)?;
        Ok(model.process_frame(frame, *index, plan, request, *format, out)?)
    }
}
