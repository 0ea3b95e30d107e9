//! JPEG pixels by libjpeg-turbo-rs, with Pillow's idea of what is an error.

use libjpeg_turbo_rs::{DecodeLimits, DecodeWarning, Decoder, JpegError, PixelFormat};

use crate::container::jpeg::JpegHeader;
use crate::decode::pixel::cmyk_to_rgb;
use crate::{ImageFormat, MediaError};

/// More than any encoder writes. Every scan may touch all of a large image's coefficients for a few bytes of file.
const MAX_SCANS: usize = 500;

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Jpeg, reason }
}

/// Decodes to RGB rows.
pub(super) fn decode(bytes: &[u8], header: &JpegHeader) -> Result<Vec<u8>, MediaError> {
    let (width, height) = header.size;
    let max_pixels = u64::from(width) * u64::from(height);
    let limits = DecodeLimits { max_pixels, max_scans: MAX_SCANS, ..DecodeLimits::default() };
    let format = match header.components {
        1 => PixelFormat::Grayscale,
        4 => PixelFormat::Cmyk,
        _ => PixelFormat::Rgb,
    };
    let mut decoder = Decoder::new_with_limits(bytes, limits).map_err(error)?;
    decoder.set_output_format(format);
    // Keeps what precedes a marker that comes too early, as libjpeg does.
    decoder.set_lenient(true);
    // libjpeg's default; it shows in progressive files whose last scans are missing.
    decoder.set_block_smoothing(true);
    let image = decoder.decode_image().map_err(error)?;
    let expected = (width as usize, height as usize, format);
    if (image.width, image.height, image.pixel_format) != expected {
        return Err(corrupt("its frames differ"));
    }
    let ended = bytes[header.scan_start..].windows(2).any(|pair| pair == [0xff, 0xd9]);
    if !ended && !header.single_scan {
        return Err(corrupt("the image data ends too early"));
    }
    for warning in &image.warnings {
        match warning {
            // libjpeg fills up what is missing before the end marker; without that marker Pillow gives up.
            DecodeWarning::TruncatedData { .. } if ended && header.single_scan && !header.restarts => {}
            DecodeWarning::TruncatedData { .. } => return Err(corrupt("the image data ends too early")),
            DecodeWarning::ExtraneousData { .. } if header.single_scan => {}
            // libjpeg goes on here as well, but to other pixels.
            _ => return Err(corrupt("the image data is broken")),
        }
    }
    Ok(match format {
        PixelFormat::Grayscale => image.data.iter().flat_map(|&value| [value; 3]).collect(),
        // Pillow takes every four-component file for one with inverted values.
        PixelFormat::Cmyk => image
            .data
            .chunks_exact(4)
            .flat_map(|pixel| cmyk_to_rgb([!pixel[0], !pixel[1], !pixel[2], !pixel[3]]))
            .collect(),
        _ => image.data,
    })
}

fn error(error: JpegError) -> MediaError {
    match error {
        JpegError::Unsupported(_) => {
            MediaError::UnsupportedVariant { format: ImageFormat::Jpeg, reason: "its kind of compression" }
        }
        JpegError::LimitExceeded { .. } | JpegError::AllocationFailed { .. } => MediaError::UnsupportedVariant {
            format: ImageFormat::Jpeg,
            reason: "it needs more memory or scans than allowed",
        },
        JpegError::UnexpectedEof => corrupt("the image data ends too early"),
        _ => corrupt("the image data is broken"),
    }
}
