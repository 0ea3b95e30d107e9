//! JPEG pixels by libjpeg-turbo-rs, with Pillow's idea of what is an error.

use libjpeg_turbo_rs::{DecodeLimits, DecodeWarning, Decoder, JpegError, PixelFormat};

use crate::image::container::jpeg::JpegHeader;
use crate::image::decode::memory::{Reused, Scratch, accustom_allocator, bytes_of, rgb_bytes};
use crate::image::decode::pixel::{RGB, cmyk_to_rgb};
use crate::{ImageFormat, MediaError};

/// Bytes of a pixel with four components.
const CMYK: usize = 4;

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Jpeg, reason }
}

/// Decodes to RGB rows.
pub(super) fn decode(
    bytes: &[u8],
    header: &JpegHeader,
    scratch: &mut Scratch,
    rgb: &mut Reused,
) -> Result<(), MediaError> {
    let (width, height) = header.size;
    let max_pixels = u64::from(width) * u64::from(height);
    // Every scan may touch all of a large image's coefficients for a few bytes of file.
    let limits =
        DecodeLimits { max_pixels, max_scans: header.scans as usize, ..DecodeLimits::default() };
    // The decoder's planes and coefficients are its own.
    accustom_allocator();
    let mut decoder = Decoder::new_with_limits(bytes, limits).map_err(error)?;
    let frame = decoder.header();
    if (frame.width.into(), frame.height.into(), frame.components.len())
        != (width, height, header.components.into())
    {
        return Err(corrupt("its frames differ"));
    }
    let sampling: Vec<_> = frame
        .components
        .iter()
        .map(|part| (part.horizontal_sampling, part.vertical_sampling))
        .collect();
    if !can_be_decoded(&sampling) {
        return Err(MediaError::UnsupportedVariant {
            format: ImageFormat::Jpeg,
            reason: "its kind of subsampling",
        });
    }
    // libjpeg's default; it shows in progressive files whose last scans are missing.
    decoder.set_block_smoothing(true);
    let rgb = rgb.take(ImageFormat::Jpeg, rgb_bytes(ImageFormat::Jpeg, header.size)?)?;
    if usize::from(header.components) != CMYK {
        return decode_as(&mut decoder, PixelFormat::Rgb, bytes, header, rgb);
    }
    let stored =
        scratch.samples.take(ImageFormat::Jpeg, bytes_of(ImageFormat::Jpeg, header.size, CMYK)?)?;
    decode_as(&mut decoder, PixelFormat::Cmyk, bytes, header, stored)?;
    for (pixel, stored) in rgb.chunks_exact_mut(RGB).zip(stored.chunks_exact(CMYK)) {
        // Pillow takes every four-component file for one with inverted values.
        pixel.copy_from_slice(&cmyk_to_rgb([!stored[0], !stored[1], !stored[2], !stored[3]]));
    }
    Ok(())
}

/// Whether the decoder knows what to do with components that have so many pixels in either
/// direction.
fn can_be_decoded(sampling: &[(u8, u8)]) -> bool {
    match *sampling {
        // It takes it for granted that of four components the first and the last have all pixels
        // and the two in the middle an equal, whole fraction of them, and panics where that is not
        // so.
        [first, second, third, fourth] => {
            let divides = |whole: u8, part: u8| part != 0 && whole.is_multiple_of(part);
            first == fourth
                && second == third
                && divides(first.0, second.0)
                && divides(first.1, second.1)
        }
        // The first one of three has to have all pixels. The decoder's error for others would call
        // the file broken.
        [first, ..] => sampling.iter().all(|part| part.0 <= first.0 && part.1 <= first.1),
        [] => false,
    }
}

/// Fills `pixels`, all of them.
fn decode_as(
    decoder: &mut Decoder<'_>,
    format: PixelFormat,
    bytes: &[u8],
    header: &JpegHeader,
    pixels: &mut [u8],
) -> Result<(), MediaError> {
    const END: [u8; 2] = [0xff, 0xd9];
    let scans = &bytes[header.scan_start..];
    // Files without anything behind the end marker, which are most, need no search.
    let ended = scans.ends_with(&END) || scans.windows(END.len()).any(|pair| pair == END);
    if !ended && !header.single_scan {
        return Err(corrupt("the image data ends too early"));
    }
    // libjpeg fills up what is missing before the end marker; without that marker Pillow gives up.
    let filled_up = ended && header.single_scan && !header.restarts;
    decoder.set_output_format(format);
    // Files without a fault take a shorter way. Some others are read again, now keeping what
    // precedes a marker that comes too early, as libjpeg does.
    decoder.set_lenient(false);
    let image = match decoder.decode_image_into(pixels) {
        Err(_) if filled_up => {
            decoder.set_lenient(true);
            decoder.decode_image_into(pixels)
        }
        image => image,
    };
    let image = image.map_err(error)?;
    let got = (image.width, image.height, image.pixel_format, image.bytes_written);
    if got != (header.size.0 as usize, header.size.1 as usize, format, pixels.len()) {
        return Err(corrupt("its frames differ"));
    }
    for warning in &image.warnings {
        match warning {
            DecodeWarning::TruncatedData { .. } if filled_up => {}
            DecodeWarning::TruncatedData { .. } => {
                return Err(corrupt("the image data ends too early"));
            }
            DecodeWarning::ExtraneousData { .. } if header.single_scan => {}
            // libjpeg goes on here as well, but to other pixels.
            _ => return Err(corrupt("the image data is broken")),
        }
    }
    Ok(())
}

fn error(error: JpegError) -> MediaError {
    match error {
        JpegError::Unsupported(_) => MediaError::UnsupportedVariant {
            format: ImageFormat::Jpeg,
            reason: "its kind of compression",
        },
        JpegError::LimitExceeded { .. } | JpegError::AllocationFailed { .. } => {
            MediaError::UnsupportedVariant {
                format: ImageFormat::Jpeg,
                reason: "it needs more memory or scans than allowed",
            }
        }
        JpegError::UnexpectedEof => corrupt("the image data ends too early"),
        _ => corrupt("the image data is broken"),
    }
}
