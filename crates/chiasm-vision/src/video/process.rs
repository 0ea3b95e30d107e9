//! Writing the pixel tensor of a video, one frame at a time.
//!
//! The video processors of `transformers` resize with torchvision, as the image processors of the
//! same families do, so the same kernels apply.

use chiasm_types::Dtype;
use half::{bf16, f16};

use super::{VideoModel, VideoPlan, VideoRequest};
use crate::image_plan::PixelTensor;
use crate::kernels::{Elements, Implementation, Job, Layout, Parallelism, PatchGrid};
use crate::{PixelFormat, RgbView, VisionError};

impl VideoModel {
    /// Writes the part of the pixel tensor that belongs to one frame.
    ///
    /// `index` counts the frames of [`VideoPlan::frames`], whose number is `plan.frames[index]` in
    /// the file. Frames may come in any order. When all are written, `out` is filled completely.
    /// `out` is the whole tensor of `plan.pixel_bytes(format)` bytes, and `request` the one that
    /// the plan was made for. CPU-bound.
    ///
    /// # Errors
    /// The errors of [`crate::Fault::Program`]: frame, plan, format and buffer do not match; and
    /// [`VisionError::UnknownKernels`].
    pub fn process_frame(
        &self,
        frame: RgbView<'_>,
        index: usize,
        plan: &VideoPlan,
        request: &VideoRequest,
        format: PixelFormat,
        out: &mut [u8],
    ) -> Result<(), VisionError> {
        let planned = plan.video.size();
        if frame.size() != planned {
            return Err(VisionError::SizeMismatch { planned, found: frame.size() });
        }
        let expected = plan.pixel_bytes(format);
        if out.len() != expected {
            return Err(VisionError::OutputLength { expected, found: out.len() });
        }
        if index >= plan.frames.len() {
            return Err(VisionError::FrameIndex { index, frames: plan.frames.len() });
        }
        let kernels = selected_kernels()?;
        let normalization = request.normalization();
        let mut write = |elements| write_frame(kernels, frame, index, plan, elements, format, out);
        match format {
            PixelFormat::RawU8 => write(Elements::Raw),
            PixelFormat::Normalized(Dtype::F16) => write(Elements::Two(
                &normalization.table(|value| f16::from_f32(value).to_le_bytes()),
            )),
            PixelFormat::Normalized(Dtype::BF16) => write(Elements::Two(
                &normalization.table(|value| bf16::from_f32(value).to_le_bytes()),
            )),
            PixelFormat::Normalized(Dtype::F32) => {
                write(Elements::Four(&normalization.table(f32::to_le_bytes)));
            }
            PixelFormat::Normalized(dtype) => return Err(VisionError::NotAFloat(dtype)),
        }
        Ok(())
    }
}

/// Returns the implementation of the pixel loops.
fn selected_kernels() -> Result<Implementation, VisionError> {
    Implementation::selected().map_err(|unknown| VisionError::UnknownKernels {
        name: unknown.0.clone(),
        available: Implementation::available().map(Implementation::name).collect(),
    })
}

/// Resizes a frame and writes its elements. All arguments match.
fn write_frame(
    kernels: Implementation,
    frame: RgbView<'_>,
    index: usize,
    plan: &VideoPlan,
    elements: Elements<'_>,
    format: PixelFormat,
    out: &mut [u8],
) {
    let PixelTensor { resampler, layers, .. } = &plan.pixels;
    let job = Job {
        kernels,
        image: frame,
        resampler: *resampler,
        elements,
        parallelism: Parallelism::Single,
    };
    let groups = plan.grid[0] as usize;
    let group_bytes = out.len() / groups;
    match layers.first().map(|layer| layer.layout) {
        Some(Layout::Patches(patches)) => {
            let element = format.dtype().size();
            let mut rows = vec![0; patches.rows() * patches.row_len() * element];
            job.write(layers, &mut rows);
            let temporal = group_bytes / rows.len();
            let slot = index % temporal;
            // The last frame is repeated until its group is full.
            let is_last = index + 1 == plan.frames.len();
            let slots = slot..if is_last { temporal } else { slot + 1 };
            let group = &mut out[group_bytes * (index / temporal)..][..group_bytes];
            for slot in slots {
                interleave(&rows, &patches, element, temporal, slot, group);
            }
        }
        Some(Layout::Tiles(_)) => {
            job.write(layers, &mut out[group_bytes * index..][..group_bytes]);
        }
        None => {}
    }
}

/// Copies the rows of patches of one frame to the rows of its group, which have `temporal` frames
/// per channel.
fn interleave(
    rows: &[u8],
    patches: &PatchGrid,
    element: usize,
    temporal: usize,
    slot: usize,
    group: &mut [u8],
) {
    let plane = patches.patch * patches.patch * element;
    let channels = group.chunks_exact_mut(plane * temporal);
    for (from, to) in rows.chunks_exact(plane).zip(channels) {
        to[plane * slot..][..plane].copy_from_slice(from);
    }
}
