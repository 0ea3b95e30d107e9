//! WebP decoding by libwebp, as in Pillow: the first frame, placed on the canvas.

use webpx::{BitstreamFormat, Decoder, DecoderConfig, Limits};

use crate::image::container::webp::{Frame, WebPHeader};
use crate::image::decode::memory::{ReusableBuffer, Scratch, image_bytes, rgb_bytes};
use crate::image::decode::pixel::{RGB, RGBA, row_on_white};
use crate::{ImageFormat, MediaError};

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::WebP, reason }
}

/// Decodes the first frame to RGB rows.
pub(super) fn decode(
    header: &WebPHeader<'_>,
    scratch: &mut Scratch,
    rgb: &mut ReusableBuffer,
) -> Result<(), MediaError> {
    let frame = &header.frame;
    // libwebp also reads an image's chunks without a file around them, as in the frames of an
    // animation.
    let decoder = Decoder::new(frame.chunks).map_err(|_| corrupt("the image data is broken"))?;
    let info = decoder.info();
    if (info.width, info.height) != (frame.width, frame.height) {
        return Err(corrupt("a frame does not agree with its image"));
    }
    // A lossless image may have alpha even if its header denies it. In an animation, that alpha is
    // visible.
    let with_alpha =
        header.has_alpha && (info.has_alpha || info.format == BitstreamFormat::Lossless);
    let rgb = rgb.prepare(ImageFormat::WebP, rgb_bytes(ImageFormat::WebP, header.size)?)?;
    if (frame.width, frame.height) == header.size && !with_alpha {
        return decode_frame(decoder, frame, RGB, rgb);
    }
    // The canvas around the frame is transparent black, or black in an image without transparency.
    rgb.fill(if header.has_alpha { 255 } else { 0 });
    let step = if with_alpha { RGBA } else { RGB };
    let stored_bytes = image_bytes(ImageFormat::WebP, (frame.width, frame.height), step)?;
    let stored = scratch.samples.prepare(ImageFormat::WebP, stored_bytes)?;
    decode_frame(decoder, frame, step, stored)?;
    let width = header.size.0 as usize;
    let frame_width = frame.width as usize;
    for (row, stored) in stored.chunks_exact(step * frame_width).enumerate() {
        let start = (frame.y as usize + row) * width + frame.x as usize;
        let line = &mut rgb[RGB * start..RGB * (start + frame_width)];
        if with_alpha {
            row_on_white(stored, line);
        } else {
            line.copy_from_slice(stored);
        }
    }
    Ok(())
}

/// Fills `out` with the frame's pixels of `step` bytes each, 3 or 4.
fn decode_frame(
    decoder: Decoder<'_>,
    frame: &Frame<'_>,
    step: usize,
    out: &mut [u8],
) -> Result<(), MediaError> {
    // This crate has already checked its own limits.
    let decoder = decoder.config(DecoderConfig::new().limits(Limits::none()));
    let stride = step as u32 * frame.width;
    let decoded = if step == RGBA {
        decoder.decode_rgba_into(out, stride)
    } else {
        decoder.decode_rgb_into(out, stride)
    };
    match decoded {
        Ok(size) if size == (frame.width, frame.height) => Ok(()),
        _ => Err(corrupt("the image data is broken")),
    }
}
