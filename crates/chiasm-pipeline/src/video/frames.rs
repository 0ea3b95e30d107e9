//! The frames of a planned video: decoded by processes from parts of a cut, and processed here.

use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{TensorBytes, TensorRequest, VideoPart};
use chiasm_processor::{FramesCall, Processor, ProcessorError};
use chiasm_vision::{ImageSize, PixelFormat, RgbView};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use tokio::sync::Mutex;

use super::planned::{PlannedVideo, frame_price};
use super::tensors::VideoTensors;
use crate::error::RequestError;
use crate::model::ServedModel;
use crate::processed::{TensorWriter, pixel_format};
use chiasm_cpu::Ticket;

/// The tensor of pixels, to which the frames of all parts are written.
type SharedTensor = Arc<Mutex<TensorWriter>>;

impl VideoTensors<'_> {
    /// Decodes and processes the planned frames from the parts of the cut, `processes` parts at a
    /// time.
    ///
    /// Returns `None` if the cut decodes to unexpected frames, so that the whole file must be
    /// decoded.
    ///
    /// # Errors
    /// Returns an error if a processor is unavailable or takes too long, or if memory is exhausted.
    pub(crate) async fn decode(
        &self,
        processor: &Processor,
        parts: Vec<VideoPart>,
        processes: usize,
        order: &TensorRequest,
    ) -> Result<Option<TensorBytes>, RequestError> {
        let Self { videos, video, .. } = self;
        let format = pixel_format(order.format);
        let bytes = video.plan.pixel_bytes(format);
        let ticket = self.frame_ticket(format)?;
        let memory = order.memory.clone();
        let budget = videos.budget.clone();
        // Clears the memory if it is not the engine's.
        let reserve = move || TensorWriter::reserve(&*memory, &budget, bytes);
        let tensor: SharedTensor = Arc::new(Mutex::new(videos.cpu.run(&ticket, reserve).await??));
        let decode = |part| self.decode_part(processor, part, format, &ticket, &tensor);
        let decoded: Result<(), RequestError> =
            stream::iter(parts).map(decode).buffer_unordered(processes).try_collect().await;
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

    /// Decodes a part of the video, and writes its frames to the tensor.
    async fn decode_part(
        &self,
        processor: &Processor,
        part: VideoPart,
        format: PixelFormat,
        ticket: &Ticket,
        tensor: &SharedTensor,
    ) -> Result<(), RequestError> {
        let VideoPart { pieces, samples, frames } = part;
        let size = self.video.plan.video;
        let call = FramesCall {
            pieces,
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
        if let Some(ticket) = self.ticket.get() {
            return Ok(ticket.clone());
        }
        let plan = &self.video.plan;
        let price = frame_price(plan, format);
        let others = u32::try_from(plan.frames.len()).unwrap_or(u32::MAX).saturating_sub(1);
        drop(self.budget.ticket(price.saturating_mul(others))?);
        let new = self.budget.ticket(price)?;
        Ok(self.ticket.get_or_init(|| new).clone())
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
