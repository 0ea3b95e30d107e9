//! A view of a decoded image.

use crate::{ImageSize, VisionError};

/// A borrowed decoded image: packed RGB, one byte per channel, rows from top to bottom without
/// padding.
#[derive(Clone, Copy, Debug)]
pub struct RgbView<'a> {
    size: ImageSize,
    pixels: &'a [u8],
}

impl<'a> RgbView<'a> {
    /// Creates a view of `3 * width * height` bytes.
    ///
    /// # Errors
    /// [`VisionError::PixelCount`] for any other number of bytes, [`VisionError::EmptyImage`] for
    /// an empty image.
    pub fn new(size: ImageSize, pixels: &'a [u8]) -> Result<Self, VisionError> {
        let expected = 3 * u128::from(size.area());
        if expected == 0 {
            return Err(VisionError::EmptyImage { size });
        }
        if pixels.len() as u128 != expected {
            return Err(VisionError::PixelCount { size, expected, found: pixels.len() });
        }
        Ok(Self { size, pixels })
    }

    /// Returns the size; neither side is 0.
    pub const fn size(&self) -> ImageSize {
        self.size
    }

    /// Returns the `3 * width * height` bytes.
    pub const fn pixels(&self) -> &'a [u8] {
        self.pixels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn view_refuses_other_byte_counts() {
        let size = ImageSize { width: 2, height: 1 };
        assert_eq!(RgbView::new(size, &[7; 6]).unwrap().pixels(), [7; 6]);
        for bytes in [0, 5, 7] {
            assert!(matches!(
                RgbView::new(size, &vec![0; bytes]),
                Err(VisionError::PixelCount { expected: 6, found, .. }) if found == bytes
            ));
        }
    }

    #[test]
    fn huge_size_is_refused_without_overflow() {
        let size = ImageSize { width: u32::MAX, height: u32::MAX };
        assert!(matches!(RgbView::new(size, &[]), Err(VisionError::PixelCount { .. })));
        let size = ImageSize { width: 0, height: u32::MAX };
        assert!(matches!(RgbView::new(size, &[]), Err(VisionError::EmptyImage { .. })));
    }
}
