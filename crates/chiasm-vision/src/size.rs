//! The size of an image in pixels.

use std::fmt;

/// A width and height in pixels, after the EXIF orientation was applied. Displayed as `280x224`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageSize {
    /// The number of pixels per row.
    pub width: u32,
    /// The number of rows.
    pub height: u32,
}

impl ImageSize {
    /// Creates the size of a square.
    pub const fn square(side: u32) -> Self {
        Self { width: side, height: side }
    }

    /// Returns `width * height`.
    pub const fn area(self) -> u64 {
        self.width as u64 * self.height as u64
    }
}

impl fmt::Display for ImageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}
