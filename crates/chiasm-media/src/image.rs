//! An image as it arrived, and as pixels.

use std::fmt;

use bytes::Bytes;

use crate::container::Header;
use crate::{ContentHash, ImageLimits, MediaError, probe};

/// The formats that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageFormat {
    /// Portable Network Graphics; of an animation the default image.
    Png,
    /// JPEG, baseline and progressive.
    Jpeg,
    /// WebP, lossy and lossless; of an animation the first frame.
    WebP,
    /// GIF; of an animation the first frame.
    Gif,
    /// Windows bitmap.
    Bmp,
}

impl ImageFormat {
    /// The usual name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        }
    }
}

impl ImageFormat {
    /// The registered media type.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::WebP => "image/webp",
            Self::Gif => "image/gif",
            Self::Bmp => "image/bmp",
        }
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An image file: its bytes, its identity, and what its header says. No pixel has been decoded.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncodedImage {
    /// The file.
    pub bytes: Bytes,
    /// blake3 of `bytes`.
    pub content: ContentHash,
    /// The format, found from the bytes; declared media types are not trusted.
    pub format: ImageFormat,
    /// Pixels per row, orientation applied; at least 1.
    pub width: u32,
    /// Rows, orientation applied; at least 1.
    pub height: u32,
    /// The EXIF orientation that has to be applied to the stored rows, 1 to 8; 1 is none.
    pub orientation: u8,
}

impl EncodedImage {
    /// Reads the header and hashes the bytes: linear in their number, no pixel is decoded.
    ///
    /// # Errors
    /// [`MediaError::UnsupportedFormat`], [`MediaError::Corrupt`], [`MediaError::UnsupportedVariant`], or one of
    /// [`ImageLimits::check`].
    pub fn from_bytes(bytes: Bytes, limits: impl Into<ImageLimits>) -> Result<Self, MediaError> {
        let header = probe::probe(&bytes)?;
        let (stored_width, stored_height) = header.stored_size();
        limits.into().check(stored_width, stored_height)?;
        let format = header.format();
        let (orientation, width, height) = oriented(&header);
        Ok(Self { content: ContentHash::of(&bytes), bytes, format, width, height, orientation })
    }
}

/// Orientation, width and height of what a header describes.
pub(crate) fn oriented(header: &Header<'_>) -> (u8, u32, u32) {
    let (width, height) = header.stored_size();
    let orientation = header.orientation();
    if orientation >= 5 { (orientation, height, width) } else { (orientation, width, height) }
}

impl fmt::Debug for EncodedImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncodedImage")
            .field("format", &self.format)
            .field("width", &self.width)
            .field("height", &self.height)
            .field("orientation", &self.orientation)
            .field("bytes", &self.bytes.len())
            .field("content", &self.content)
            .finish()
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
