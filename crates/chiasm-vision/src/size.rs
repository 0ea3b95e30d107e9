//! The size of an image in pixels.

use std::fmt;

/// Width and height in pixels, after the image's EXIF orientation was applied. Written `280x224`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageSize {
    /// Pixels per row.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl ImageSize {
    /// A size as wide as high.
    pub const fn square(side: u32) -> Self {
        Self { width: side, height: side }
    }

    /// `width * height`.
    pub const fn area(self) -> u64 {
        self.width as u64 * self.height as u64
    }
}

impl fmt::Display for ImageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}
