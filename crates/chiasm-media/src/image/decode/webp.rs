//! WebP pixels of the first frame by libwebp, as in Pillow, laid on the canvas.

use webpx::{BitstreamFormat, Decoder, DecoderConfig, Limits};

use crate::image::container::webp::{Frame, WebPHeader};
use crate::image::decode::memory::{Reused, Scratch, bytes_of, rgb_bytes};
use crate::image::decode::pixel::{RGB, RGBA, row_on_white};
use crate::{ImageFormat, MediaError};

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::WebP, reason }
}

/// Decodes to RGB rows.
pub(super) fn decode(
    header: &WebPHeader<'_>,
    scratch: &mut Scratch,
    rgb: &mut Reused,
) -> Result<(), MediaError> {
    let frame = &header.frame;
    // libwebp reads an image's chunks without a file around them, too, as it does with the frames
    // of an animation.
    let decoder = Decoder::new(frame.chunks).map_err(|_| corrupt("the image data is broken"))?;
    let info = decoder.info();
    if (info.width, info.height) != (frame.width, frame.height) {
        return Err(corrupt("a frame does not agree with its image"));
    }
    // A lossless image may have alpha also where it says that it has none, and in an animation that
    // shows.
    let with_alpha =
        header.has_alpha && (info.has_alpha || info.format == BitstreamFormat::Lossless);
    let rgb = rgb.take(ImageFormat::WebP, rgb_bytes(ImageFormat::WebP, header.size)?)?;
    if (frame.width, frame.height) == header.size && !with_alpha {
        return pixels(decoder, frame, RGB, rgb);
    }
    // Around the frame the canvas is transparent black, or black in an image without transparency.
    rgb.fill(if header.has_alpha { 255 } else { 0 });
    let step = if with_alpha { RGBA } else { RGB };
    let stored = scratch
        .samples
        .take(ImageFormat::WebP, bytes_of(ImageFormat::WebP, (frame.width, frame.height), step)?)?;
    pixels(decoder, frame, step, stored)?;
    let (width, frame_width) = (header.size.0 as usize, frame.width as usize);
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

/// Fills `out` with the frame's pixels, of three or four bytes.
fn pixels(
    decoder: Decoder<'_>,
    frame: &Frame<'_>,
    step: usize,
    out: &mut [u8],
) -> Result<(), MediaError> {
    // Ours have been applied.
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
