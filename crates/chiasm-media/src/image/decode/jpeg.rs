//! JPEG decoding by libjpeg-turbo-rs, with errors where Pillow raises them.

use libjpeg_turbo_rs::{DecodeLimits, DecodeWarning, Decoder, JpegError, PixelFormat};

use crate::image::container::jpeg::JpegHeader;
use crate::image::decode::memory::{
    ReusableBuffer, Scratch, image_bytes, raise_trim_threshold, rgb_bytes,
};
use crate::image::decode::pixel::{RGB, cmyk_to_rgb};
use crate::{ImageFormat, MediaError};

/// The bytes of a pixel with four components.
const CMYK: usize = 4;

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Jpeg, reason }
}

/// Decodes an image to RGB rows.
pub(super) fn decode(
    bytes: &[u8],
    header: &JpegHeader,
    scratch: &mut Scratch,
    rgb: &mut ReusableBuffer,
) -> Result<(), MediaError> {
    let (width, height) = header.size;
    let max_pixels = u64::from(width) * u64::from(height);
    // A scan of a few bytes may touch all coefficients of a large image.
    let limits =
        DecodeLimits { max_pixels, max_scans: header.scans as usize, ..DecodeLimits::default() };
    // The decoder allocates its planes and coefficients itself.
    raise_trim_threshold();
    let mut decoder = Decoder::new_with_limits(bytes, limits).map_err(to_media_error)?;
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
    if !is_supported_sampling(&sampling) {
        return Err(MediaError::UnsupportedVariant {
            format: ImageFormat::Jpeg,
            reason: "its chroma subsampling",
        });
    }
    // libjpeg's default. It changes the pixels of progressive files without their last scans.
    decoder.set_block_smoothing(true);
    let rgb = rgb.prepare(ImageFormat::Jpeg, rgb_bytes(ImageFormat::Jpeg, header.size)?)?;
    if usize::from(header.components) != CMYK {
        return decode_as(&mut decoder, PixelFormat::Rgb, bytes, header, rgb);
    }
    let stored_bytes = image_bytes(ImageFormat::Jpeg, header.size, CMYK)?;
    let stored = scratch.samples.prepare(ImageFormat::Jpeg, stored_bytes)?;
    decode_as(&mut decoder, PixelFormat::Cmyk, bytes, header, stored)?;
    for (pixel, stored) in rgb.chunks_exact_mut(RGB).zip(stored.chunks_exact(CMYK)) {
        // Pillow treats the values of every four-component file as inverted.
        pixel.copy_from_slice(&cmyk_to_rgb([!stored[0], !stored[1], !stored[2], !stored[3]]));
    }
    Ok(())
}

/// Returns `true` if the decoder supports components with these sampling factors, horizontal and
/// vertical.
fn is_supported_sampling(sampling: &[(u8, u8)]) -> bool {
    match *sampling {
        // With four components, the decoder expects full resolution for the first and the last, and
        // the same integer subsampling for the two in the middle. It panics otherwise.
        [first, second, third, fourth] => {
            let divides = |whole: u8, part: u8| part != 0 && whole.is_multiple_of(part);
            first == fourth
                && second == third
                && divides(first.0, second.0)
                && divides(first.1, second.1)
        }
        // With three components, the first must have full resolution. The decoder reports other
        // files as corrupt, which they are not.
        [first, ..] => sampling.iter().all(|part| part.0 <= first.0 && part.1 <= first.1),
        [] => false,
    }
}

/// Decodes to `format` and fills all of `pixels`.
fn decode_as(
    decoder: &mut Decoder<'_>,
    format: PixelFormat,
    bytes: &[u8],
    header: &JpegHeader,
    pixels: &mut [u8],
) -> Result<(), MediaError> {
    const END: [u8; 2] = [0xff, 0xd9];
    let scans = &bytes[header.scan_start..];
    // Most files end with the end marker, and need no search.
    let has_end = scans.ends_with(&END) || scans.windows(END.len()).any(|pair| pair == END);
    if !has_end && !header.single_scan {
        return Err(corrupt("the image data ends too early"));
    }
    // libjpeg fills in data that is missing before the end marker. Without the marker, Pillow
    // raises an error.
    let may_fill_in = has_end && header.single_scan && !header.restarts;
    decoder.set_output_format(format);
    // The strict mode is faster for intact files. Some damaged files are decoded again in the
    // lenient mode, which keeps the data before a premature marker, as libjpeg does.
    decoder.set_lenient(false);
    let image = match decoder.decode_image_into(pixels) {
        Err(_) if may_fill_in => {
            decoder.set_lenient(true);
            decoder.decode_image_into(pixels)
        }
        image => image,
    };
    let image = image.map_err(to_media_error)?;
    let decoded = (image.width, image.height, image.pixel_format, image.bytes_written);
    if decoded != (header.size.0 as usize, header.size.1 as usize, format, pixels.len()) {
        return Err(corrupt("its frames differ"));
    }
    for warning in &image.warnings {
        match warning {
            DecodeWarning::TruncatedData { .. } if may_fill_in => {}
            DecodeWarning::TruncatedData { .. } => {
                return Err(corrupt("the image data ends too early"));
            }
            DecodeWarning::ExtraneousData { .. } if header.single_scan => {}
            // libjpeg continues here as well, but yields other pixels.
            _ => return Err(corrupt("the image data is broken")),
        }
    }
    Ok(())
}

fn to_media_error(error: JpegError) -> MediaError {
    match error {
        JpegError::Unsupported(_) => {
            MediaError::UnsupportedVariant { format: ImageFormat::Jpeg, reason: "its compression" }
        }
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
