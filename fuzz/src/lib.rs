//! What must hold for whatever bytes a fuzz target is given.

use bytes::Bytes;
use chiasm_media::{EncodedImage, ImageFormat, ImageLimits, caught_panics, with_pixels};

/// Small enough to decode thousands of images per second, large enough for every kind of header.
const LIMITS: ImageLimits = ImageLimits { max_pixels: 1 << 16, max_side: 1 << 12, max_aspect_ratio: 1 << 12 };

/// Reads the header: an error, or a size within the limits.
pub fn probe(data: &[u8]) -> Option<EncodedImage> {
    let image = EncodedImage::from_bytes(Bytes::copy_from_slice(data), LIMITS).ok()?;
    assert!(image.width >= 1 && image.height >= 1 && (1..=8).contains(&image.orientation));
    assert_eq!(LIMITS.check(image.width, image.height), Ok(()));
    Some(image)
}

/// Decodes an image of this format: an error, or pixels of the size that the header says.
pub fn decode(format: ImageFormat, data: &[u8]) {
    let Some(image) = probe(data).filter(|image| image.format == format) else {
        return;
    };
    let _ = with_pixels(&image, |pixels| {
        assert_eq!((pixels.width, pixels.height), (image.width, image.height));
        assert_eq!(pixels.pixels.len(), 3 * image.width as usize * image.height as usize);
    });
    assert_eq!(caught_panics(), 0, "a decoder panicked");
}
