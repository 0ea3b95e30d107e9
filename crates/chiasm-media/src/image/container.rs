//! Image file headers, read as Pillow reads them: everything a decoder needs before the first
//! pixel.

pub(crate) mod bmp;
pub(crate) mod gif;
pub(crate) mod jpeg;
pub(crate) mod png;
mod png_text;
pub(crate) mod webp;

use crate::ImageFormat;

/// The header of an image of any format.
pub(crate) enum Header<'a> {
    Png(png::PngHeader<'a>),
    Jpeg(jpeg::JpegHeader),
    WebP(webp::WebPHeader<'a>),
    Gif(gif::GifHeader<'a>),
    Bmp(bmp::BmpHeader<'a>),
}

impl Header<'_> {
    /// Returns the format.
    pub(crate) fn format(&self) -> ImageFormat {
        match self {
            Self::Png(_) => ImageFormat::Png,
            Self::Jpeg(_) => ImageFormat::Jpeg,
            Self::WebP(_) => ImageFormat::WebP,
            Self::Gif(_) => ImageFormat::Gif,
            Self::Bmp(_) => ImageFormat::Bmp,
        }
    }

    /// Returns the width and height of the stored rows, before orientation; both at least 1.
    pub(crate) fn stored_size(&self) -> (u32, u32) {
        match self {
            Self::Png(header) => header.size,
            Self::Jpeg(header) => header.size,
            Self::WebP(header) => header.size,
            Self::Gif(header) => header.size,
            Self::Bmp(header) => header.size,
        }
    }

    /// Returns the number of scans of a JPEG file, which is the number of passes over its pixels; 1
    /// for other formats.
    pub(crate) fn scans(&self) -> u32 {
        match self {
            Self::Jpeg(header) => header.scans,
            Self::Png(_) | Self::WebP(_) | Self::Gif(_) | Self::Bmp(_) => 1,
        }
    }

    /// Returns the EXIF orientation to apply, 1 to 8.
    pub(crate) fn orientation(&self) -> u8 {
        match self {
            Self::Png(header) => header.orientation,
            Self::Jpeg(header) => header.orientation,
            Self::WebP(header) => header.orientation,
            Self::Gif(_) | Self::Bmp(_) => 1,
        }
    }
}
