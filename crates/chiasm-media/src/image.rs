//! Still images: what their headers say, and their pixels. All that is known of pixels and of their
//! formats lies below this module.

mod container;
mod cost;
mod decode;
mod exif;
mod format;
mod limits;
mod other_format;
mod probe;

use std::fmt;
use std::time::Duration;

use crate::MediaError;
use container::Header;

pub use decode::{DecodeMemory, caught_panics, decode, decode_into, with_pixels};
pub use format::ImageFormat;
pub use limits::ImageLimits;

/// What an image file says of itself in front of its pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageHeader {
    /// The format, found from the bytes.
    pub format: ImageFormat,
    /// Pixels per row, orientation applied; at least 1.
    pub width: u32,
    /// Rows, orientation applied; at least 1.
    pub height: u32,
    /// The EXIF orientation that has to be applied to the stored rows, 1 to 8; 1 is none.
    pub orientation: u8,
    /// About how long one core takes to decode the file, at most: by its size, and by what is known
    /// of the way it is coded.
    pub decode_time: Duration,
}

impl ImageHeader {
    /// Reads the header of a file and holds the limits against it.
    pub(crate) fn read(bytes: &[u8], limits: &ImageLimits) -> Result<Self, MediaError> {
        if bytes.len() as u64 > limits.max_bytes {
            return Err(MediaError::TooManyBytes { limit: limits.max_bytes });
        }
        let header = probe::probe(bytes)?;
        let (stored_width, stored_height) = header.stored_size();
        limits.check(stored_width, stored_height)?;
        limits.check_scans(header.scans())?;
        Ok(Self::of(&header, bytes.len()))
    }

    /// What is public of a format's own header, of a file of so many bytes.
    fn of(header: &Header<'_>, bytes: usize) -> Self {
        let (format, orientation) = (header.format(), header.orientation());
        let (stored_width, stored_height) = header.stored_size();
        let turned = orientation >= 5;
        let (width, height) =
            if turned { (stored_height, stored_width) } else { (stored_width, stored_height) };
        Self { format, width, height, orientation, decode_time: cost::decode_time(header, bytes) }
    }
}

/// Decoded pixels.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    /// Pixels per row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Packed RGB, row-major: `3 * width * height` bytes.
    pub pixels: Vec<u8>,
}

/// Decoded pixels in memory that will hold those of another image later.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RgbPixels<'a> {
    /// Pixels per row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Packed RGB, row-major: `3 * width * height` bytes.
    pub pixels: &'a [u8],
}

impl fmt::Debug for RgbPixels<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RgbPixels({}x{})", self.width, self.height)
    }
}

impl fmt::Debug for RgbImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RgbImage({}x{})", self.width, self.height)
    }
}
