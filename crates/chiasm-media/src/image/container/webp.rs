//! The RIFF chunks of a WebP file, as libwebp's demuxer reads them for Pillow.

use crate::image::exif;
use crate::reader::Reader;
use crate::{ImageFormat, MediaError};

/// The canvas and the first frame.
pub(crate) struct WebPHeader<'a> {
    pub(crate) size: (u32, u32),
    /// Whether Pillow takes the image for one with transparency. If not, alpha is dropped, not flattened.
    pub(crate) has_alpha: bool,
    pub(crate) orientation: u8,
    pub(crate) frame: Frame<'a>,
}

/// The first frame, or the only one.
pub(crate) struct Frame<'a> {
    /// Pixels from the left and the top of the canvas.
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// The content of `ALPH`, for lossy frames.
    pub(crate) alpha: Option<&'a [u8]>,
    pub(crate) image: Image<'a>,
}

/// The compressed pixels of a frame.
#[derive(Clone, Copy)]
pub(crate) enum Image<'a> {
    /// The content of `VP8 `.
    Lossy(&'a [u8]),
    /// The content of `VP8L`.
    Lossless(&'a [u8]),
}

impl<'a> Image<'a> {
    pub(crate) fn content(self) -> &'a [u8] {
        match self {
            Self::Lossy(content) | Self::Lossless(content) => content,
        }
    }
}

// Flags of VP8X.
const ANIMATION: u8 = 0x02;
const XMP: u8 = 0x04;
const EXIF: u8 = 0x08;
const ALPHA: u8 = 0x10;
const KNOWN: u8 = 0x3e;

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::WebP, reason }
}

/// Whether Pillow takes the bytes for a WebP file.
pub(crate) fn accepts(bytes: &[u8]) -> bool {
    bytes.starts_with(b"RIFF")
        && bytes.get(8..12) == Some(b"WEBP")
        && matches!(bytes.get(12..16), Some(b"VP8 " | b"VP8X" | b"VP8L"))
}

struct Chunk<'a> {
    kind: [u8; 4],
    content: &'a [u8],
}

/// Reads the chunks of the whole file.
pub(crate) fn read(bytes: &[u8]) -> Result<WebPHeader<'_>, MediaError> {
    let riff_size = bytes.get(4..).and_then(|rest| rest.first_chunk()).map_or(0, |size| u32::from_le_bytes(*size));
    let end = riff_size as usize + 8;
    let body = bytes.get(12..end).ok_or(corrupt("it is cut off"))?;
    let mut reader = Reader::new(body);
    let first = chunk(&mut reader)?.ok_or(corrupt("it is cut off"))?;
    if &first.kind == b"VP8X" {
        return extended(first.content, reader);
    }
    let image = image_of(&first).ok_or(corrupt("no image"))?;
    // libwebp looks at one more chunk, and refuses the file if that one is cut off.
    chunk(&mut reader)?;
    let (width, height) = size_of(image)?;
    let has_alpha = matches!(image, Image::Lossless(content) if lossless_has_alpha(content));
    let frame = Frame { x: 0, y: 0, width, height, alpha: None, image };
    Ok(WebPHeader { size: (width, height), has_alpha, orientation: 1, frame })
}

/// The chunks behind `VP8X`.
fn extended<'a>(vp8x: &[u8], mut reader: Reader<'a>) -> Result<WebPHeader<'a>, MediaError> {
    let &[flags, _, _, _, w0, w1, w2, h0, h1, h2, ..] = vp8x else {
        return Err(corrupt("its header is cut off"));
    };
    let size = (u24([w0, w1, w2]) + 1, u24([h0, h1, h2]) + 1);
    if flags & !KNOWN != 0 || u64::from(size.0) * u64::from(size.1) >= 1 << 32 {
        return Err(corrupt("its header is not valid"));
    }
    let is_animation = flags & ANIMATION != 0;
    let (mut frame, mut alpha, mut seen_anim) = (None, None, false);
    let (mut exif, mut xmp) = (None, None);
    while let Some(chunk) = chunk(&mut reader)? {
        match &chunk.kind {
            b"VP8X" => return Err(corrupt("a second header")),
            b"EXIF" if flags & EXIF != 0 && exif.is_none() => exif = Some(chunk.content),
            b"XMP " if flags & XMP != 0 && xmp.is_none() => xmp = Some(chunk.content),
            b"ANIM" => seen_anim = true,
            b"ANMF" if !seen_anim => return Err(corrupt("a frame before the animation's header")),
            b"ANMF" if is_animation && frame.is_none() => frame = Some(animation_frame(chunk.content)?),
            b"ALPH" | b"VP8 " | b"VP8L" if is_animation || seen_anim => {
                return Err(corrupt("an image outside the animation's frames"));
            }
            b"ALPH" if alpha.is_none() && frame.is_none() => alpha = Some(chunk.content),
            _ => {
                if let Some(image) = image_of(&chunk) {
                    if frame.is_some() {
                        return Err(corrupt("a second image"));
                    }
                    let (width, height) = size_of(image)?;
                    // Without its flag, libwebp ignores the alpha of a lossy image.
                    let alpha = alpha.filter(|_| flags & ALPHA != 0);
                    frame = Some(Frame { x: 0, y: 0, width, height, alpha, image });
                }
            }
        }
    }
    let frame = frame.ok_or(corrupt("no image"))?;
    if matches!(frame.image, Image::Lossy(_)) && frame.alpha.is_some_and(|alpha| !alpha_is_valid(alpha)) {
        return Err(corrupt("its alpha is not valid"));
    }
    let fits = if is_animation {
        frame.x + frame.width <= size.0 && frame.y + frame.height <= size.1
    } else {
        (frame.width, frame.height) == size
    };
    if !fits {
        return Err(corrupt("the image does not fit its canvas"));
    }
    let has_alpha = match frame.image {
        Image::Lossless(content) if !is_animation => lossless_has_alpha(content),
        _ => flags & ALPHA != 0 || (!is_animation && alpha.is_some()),
    };
    let orientation = exif::orientation(exif.filter(|exif| !exif.is_empty()), xmp);
    Ok(WebPHeader { size, has_alpha, orientation, frame })
}

/// The content of an `ANMF` chunk.
fn animation_frame(content: &[u8]) -> Result<Frame<'_>, MediaError> {
    // Width, height and duration follow. libwebp goes by the size that the image itself has.
    let &[x0, x1, x2, y0, y1, y2, _, _, _, _, _, _, _, _, _, _, ref chunks @ ..] = content else {
        return Err(corrupt("a frame is cut off"));
    };
    let mut reader = Reader::new(chunks);
    let mut alpha = None;
    let image = loop {
        let chunk = chunk(&mut reader)?.ok_or(corrupt("a frame without an image"))?;
        match image_of(&chunk) {
            Some(image) => break image,
            None if &chunk.kind == b"ALPH" && alpha.is_none() => alpha = Some(chunk.content),
            None => return Err(corrupt("a frame without an image")),
        }
    };
    if alpha.is_some() && matches!(image, Image::Lossless(_)) {
        return Err(corrupt("a lossless frame with separate alpha"));
    }
    let (width, height) = size_of(image)?;
    Ok(Frame { x: 2 * u24([x0, x1, x2]), y: 2 * u24([y0, y1, y2]), width, height, alpha, image })
}

/// The next chunk; `None` at the end.
fn chunk<'a>(reader: &mut Reader<'a>) -> Result<Option<Chunk<'a>>, MediaError> {
    let cut_off = || corrupt("a chunk is cut off");
    if reader.is_at_end() {
        return Ok(None);
    }
    let kind = reader.array().ok_or_else(cut_off)?;
    let length = u32::from_le_bytes(reader.array().ok_or_else(cut_off)?) as usize;
    let content = reader.exactly(length).ok_or_else(cut_off)?;
    if length % 2 == 1 {
        reader.byte().ok_or_else(cut_off)?;
    }
    Ok(Some(Chunk { kind, content }))
}

fn image_of<'a>(chunk: &Chunk<'a>) -> Option<Image<'a>> {
    match &chunk.kind {
        b"VP8 " => Some(Image::Lossy(chunk.content)),
        b"VP8L" => Some(Image::Lossless(chunk.content)),
        _ => None,
    }
}

/// Width and height in the header of the compressed pixels, which is checked as libwebp does.
fn size_of(image: Image<'_>) -> Result<(u32, u32), MediaError> {
    let size = match image {
        Image::Lossy(&[t0, t1, t2, 0x9d, 0x01, 0x2a, w0, w1, h0, h1, ..]) => {
            let (tag, content) = (u24([t0, t1, t2]), image.content());
            let is_shown_key_frame = tag & 0x11 == 0x10;
            let (profile, first_partition) = (tag >> 1 & 7, tag as usize >> 5);
            if is_shown_key_frame && profile <= 3 && first_partition < content.len() {
                (u32::from(u16::from_le_bytes([w0, w1])) & 0x3fff, u32::from(u16::from_le_bytes([h0, h1])) & 0x3fff)
            } else {
                (0, 0)
            }
        }
        Image::Lossless(&[0x2f, b0, b1, b2, b3, ..]) if b3 >> 5 == 0 => {
            let bits = u32::from_le_bytes([b0, b1, b2, b3]);
            ((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1)
        }
        _ => (0, 0),
    };
    if size.0 == 0 || size.1 == 0 { Err(corrupt("its image header is not valid")) } else { Ok(size) }
}

/// Whether libwebp reads such alpha: compression of two kinds, one kind of preprocessing.
fn alpha_is_valid(alpha: &[u8]) -> bool {
    alpha.first().is_some_and(|header| header & 3 <= 1 && header >> 4 & 3 <= 1 && header >> 6 <= 1)
}

fn lossless_has_alpha(content: &[u8]) -> bool {
    content.get(4).is_some_and(|byte| byte & 0x10 != 0)
}

fn u24([b0, b1, b2]: [u8; 3]) -> u32 {
    u32::from_le_bytes([b0, b1, b2, 0])
}
