//! WebP pixels of the first frame by libwebp, as in Pillow, laid on the canvas.

use webpx::{Decoder, DecoderConfig, Limits};

use crate::image::container::webp::{Frame, Image, WebPHeader};
use crate::image::decode::memory::{Reused, Scratch, bytes_of, rgb_bytes};
use crate::image::decode::pixel::{RGB, RGBA, row_on_white};
use crate::{ImageFormat, MediaError};

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::WebP, reason }
}

/// Decodes to RGB rows.
pub(super) fn decode(header: &WebPHeader<'_>, scratch: &mut Scratch, rgb: &mut Reused) -> Result<(), MediaError> {
    let frame = &header.frame;
    let file = scratch.file.cleared();
    write_still_file(frame, file);
    let decoder = Decoder::new(file).map_err(|_| corrupt("the image data is broken"))?;
    let info = decoder.info();
    if (info.width, info.height) != (frame.width, frame.height) {
        return Err(corrupt("a frame does not agree with its image"));
    }
    let with_alpha = header.has_alpha && info.has_alpha;
    let rgb = rgb.take(ImageFormat::WebP, rgb_bytes(ImageFormat::WebP, header.size)?)?;
    if (frame.width, frame.height) == header.size && !with_alpha {
        return pixels(decoder, frame, RGB, rgb);
    }
    // Around the frame the canvas is transparent black, or black in an image without transparency.
    rgb.fill(if header.has_alpha { 255 } else { 0 });
    let step = if with_alpha { RGBA } else { RGB };
    let stored =
        scratch.samples.take(ImageFormat::WebP, bytes_of(ImageFormat::WebP, (frame.width, frame.height), step)?)?;
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
fn pixels(decoder: Decoder<'_>, frame: &Frame<'_>, step: usize, out: &mut [u8]) -> Result<(), MediaError> {
    // Ours have been applied.
    let decoder = decoder.config(DecoderConfig::new().limits(Limits::none()));
    let stride = step as u32 * frame.width;
    let decoded =
        if step == RGBA { decoder.decode_rgba_into(out, stride) } else { decoder.decode_rgb_into(out, stride) };
    match decoded {
        Ok(size) if size == (frame.width, frame.height) => Ok(()),
        _ => Err(corrupt("the image data is broken")),
    }
}

/// Appends a WebP file with this frame as its only image.
fn write_still_file(frame: &Frame<'_>, file: &mut Vec<u8>) {
    // The size is filled in at the end.
    file.extend_from_slice(b"RIFF\0\0\0\0WEBP");
    let mut chunk = |kind: &[u8; 4], content: &[u8]| {
        file.extend_from_slice(kind);
        file.extend_from_slice(&(content.len() as u32).to_le_bytes());
        file.extend_from_slice(content);
        if content.len() % 2 == 1 {
            file.push(0);
        }
    };
    match (frame.image, frame.alpha) {
        (Image::Lossless(content), _) => chunk(b"VP8L", content),
        (Image::Lossy(content), None) => chunk(b"VP8 ", content),
        (Image::Lossy(content), Some(alpha)) => {
            let [width, height] = [frame.width - 1, frame.height - 1].map(u32::to_le_bytes);
            let mut header = vec![0x10, 0, 0, 0];
            header.extend_from_slice(&width[..3]);
            header.extend_from_slice(&height[..3]);
            chunk(b"VP8X", &header);
            chunk(b"ALPH", alpha);
            chunk(b"VP8 ", content);
        }
    }
    let length = file.len() as u32 - 8;
    file[4..8].copy_from_slice(&length.to_le_bytes());
}
