//! WebP pixels of the first frame by image-webp, laid on the canvas.

use std::io::Cursor;

use image_webp::{DecodingError, UpsamplingMethod, WebPDecodeOptions, WebPDecoder};

use crate::container::webp::{Frame, Image, WebPHeader};
use crate::decode::buffer;
use crate::decode::pixel::{Rgb, rgb_on_white};
use crate::{ImageFormat, MediaError};

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::WebP, reason }
}

/// Decodes to RGB rows.
pub(super) fn decode(header: &WebPHeader<'_>) -> Result<Vec<u8>, MediaError> {
    let frame = &header.frame;
    let (pixels, with_alpha) = decode_frame(frame)?;
    let colour = |stored: &[u8]| -> Rgb {
        let rgb = [stored[0], stored[1], stored[2]];
        if with_alpha && header.has_alpha { rgb_on_white(rgb, stored[3]) } else { rgb }
    };
    let stored_size = if with_alpha { 4 } else { 3 };
    let (width, frame_width) = (header.size.0 as usize, frame.width as usize);
    let mut rgb = buffer(ImageFormat::WebP, header.size, 3)?;
    // Around the frame the canvas is transparent black, or black in an image without transparency.
    if header.has_alpha {
        rgb.fill(255);
    }
    for (row, stored) in pixels.chunks_exact(stored_size * frame_width).enumerate() {
        let start = 3 * ((frame.y as usize + row) * width + frame.x as usize);
        let line = &mut rgb[start..start + 3 * frame_width];
        for (pixel, stored) in line.chunks_exact_mut(3).zip(stored.chunks_exact(stored_size)) {
            pixel.copy_from_slice(&colour(stored));
        }
    }
    Ok(rgb)
}

/// The frame's pixels, and whether they are RGBA rather than RGB.
fn decode_frame(frame: &Frame<'_>) -> Result<(Vec<u8>, bool), MediaError> {
    let file = still_file(frame);
    let mut options = WebPDecodeOptions::default();
    // What libwebp calls fancy upsampling, its default.
    options.lossy_upsampling = UpsamplingMethod::Bilinear;
    let mut decoder = WebPDecoder::new_with_options(Cursor::new(file), options).map_err(error)?;
    if decoder.dimensions() != (frame.width, frame.height) {
        return Err(corrupt("a frame does not agree with its image"));
    }
    let with_alpha = decoder.has_alpha();
    let mut pixels = buffer(ImageFormat::WebP, (frame.width, frame.height), if with_alpha { 4 } else { 3 })?;
    decoder.read_image(&mut pixels).map_err(error)?;
    Ok((pixels, with_alpha))
}

/// A WebP file with this frame as its only image.
fn still_file(frame: &Frame<'_>) -> Vec<u8> {
    let mut chunks = Vec::new();
    let mut chunk = |kind: &[u8; 4], content: &[u8]| {
        chunks.extend_from_slice(kind);
        chunks.extend_from_slice(&(content.len() as u32).to_le_bytes());
        chunks.extend_from_slice(content);
        if content.len() % 2 == 1 {
            chunks.push(0);
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
    let mut file = b"RIFF".to_vec();
    file.extend_from_slice(&(chunks.len() as u32 + 4).to_le_bytes());
    file.extend_from_slice(b"WEBP");
    file.append(&mut chunks);
    file
}

fn error(error: DecodingError) -> MediaError {
    match error {
        DecodingError::MemoryLimitExceeded | DecodingError::ImageTooLarge => {
            MediaError::UnsupportedVariant { format: ImageFormat::WebP, reason: "it needs more memory than allowed" }
        }
        DecodingError::UnsupportedFeature(_) => {
            MediaError::UnsupportedVariant { format: ImageFormat::WebP, reason: "an unknown feature" }
        }
        _ => corrupt("the image data is broken"),
    }
}
