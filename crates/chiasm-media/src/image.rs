//! Still images: headers and pixels. All code for image formats is below this module.

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

/// The header of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageHeader {
    /// The format, detected from the bytes.
    pub format: ImageFormat,
    /// Pixels per row after orientation; at least 1.
    pub width: u32,
    /// Rows after orientation; at least 1.
    pub height: u32,
    /// The EXIF orientation to apply to the stored rows, 1 to 8; 1 leaves them as they are.
    pub orientation: u8,
    /// The estimated maximum time for one core to decode the file, from its size and coding.
    pub decode_time: Duration,
}

impl ImageHeader {
    /// Reads the header of a file and checks it against `limits`.
    pub(crate) fn read(bytes: &[u8], limits: &ImageLimits) -> Result<Self, MediaError> {
        if bytes.len() as u64 > limits.max_bytes {
            return Err(MediaError::TooManyBytes { limit: limits.max_bytes });
        }
        let header = probe::probe(bytes)?;
        let (stored_width, stored_height) = header.stored_size();
        limits.check(stored_width, stored_height)?;
        limits.check_scans(header.scans())?;
        Ok(Self::from_format_header(&header, bytes.len()))
    }

    /// Converts a format's own header, of a file of `bytes` bytes.
    fn from_format_header(header: &Header<'_>, bytes: usize) -> Self {
        let orientation = header.orientation();
        let (stored_width, stored_height) = header.stored_size();
        let is_transposed = orientation >= 5;
        let (width, height) = if is_transposed {
            (stored_height, stored_width)
        } else {
            (stored_width, stored_height)
        };
        Self {
            format: header.format(),
            width,
            height,
            orientation,
            decode_time: cost::decode_time(header, bytes),
        }
    }
}

/// Decoded pixels, owned.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    /// Pixels per row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Packed RGB, row-major: `3 * width * height` bytes.
    pub pixels: Vec<u8>,
}

/// Decoded pixels, borrowed from memory that is reused for the next image.
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
