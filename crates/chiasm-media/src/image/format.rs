//! The supported formats of image files.

use std::fmt;

/// A supported image format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageFormat {
    /// Portable Network Graphics; for an animation, its default image.
    Png,
    /// JPEG, baseline and progressive.
    Jpeg,
    /// WebP, lossy and lossless; for an animation, its first frame.
    WebP,
    /// GIF; for an animation, its first frame.
    Gif,
    /// Windows bitmap.
    Bmp,
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        })
    }
}

impl ImageFormat {
    /// Returns the registered media type.
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
