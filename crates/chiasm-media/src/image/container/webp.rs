//! The RIFF chunks of a WebP file, as libwebp's demuxer reads them for Pillow.

use crate::image::exif;
use crate::reader::Reader;
use crate::{ImageFormat, MediaError};

/// The canvas and the first frame.
pub(crate) struct WebPHeader<'a> {
    pub(crate) size: (u32, u32),
    /// Whether Pillow takes the image for one with transparency. If not, alpha is dropped, not
    /// flattened.
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
    /// The chunks `ALPH`, if the frame has alpha beside its image, and `VP8 ` or `VP8L`: what
    /// libwebp decodes. The byte that pads the last one is among them, since libwebp reads it where
    /// the pixels go on behind their chunk's end.
    pub(crate) chunks: &'a [u8],
}

// Flags of VP8X.
const ANIMATION: u8 = 0x02;
const XMP: u8 = 0x04;
const EXIF: u8 = 0x08;
const ALPHA: u8 = 0x10;
const KNOWN: u8 = 0x3e;

/// Pixels of which libwebp reads no canvas and no frame.
const MAX_AREA: u64 = 1 << 32;

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
    /// The file from this chunk on.
    from: &'a [u8],
    /// Bytes of the chunk with its head and its padding.
    length: usize,
}

/// Reads the chunks of the whole file.
pub(crate) fn read(bytes: &[u8]) -> Result<WebPHeader<'_>, MediaError> {
    let riff_size = bytes
        .get(4..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |size| u32::from_le_bytes(*size));
    let end = riff_size as usize + 8;
    let body = bytes.get(12..end).ok_or(corrupt("it is cut off"))?;
    let mut reader = Reader::new(body);
    let mut behind = reader.clone();
    let first = chunk(&mut behind)?;
    if &first.kind == b"VP8X" {
        return extended(first.content, behind);
    }
    let picture = picture(&mut reader)?;
    let frame = picture.frame((0, 0), false)?;
    Ok(WebPHeader {
        size: (frame.width, frame.height),
        has_alpha: picture.image_has_alpha,
        orientation: 1,
        frame,
    })
}

/// The chunks behind `VP8X`.
fn extended<'a>(vp8x: &[u8], mut reader: Reader<'a>) -> Result<WebPHeader<'a>, MediaError> {
    let &[flags, _, _, _, w0, w1, w2, h0, h1, h2] = vp8x else {
        return Err(corrupt("its header has another length"));
    };
    let size = (u24([w0, w1, w2]) + 1, u24([h0, h1, h2]) + 1);
    if flags & !KNOWN != 0 || u64::from(size.0) * u64::from(size.1) >= MAX_AREA {
        return Err(corrupt("its header is not valid"));
    }
    let is_animation = flags & ANIMATION != 0;
    let (mut frame, mut has_alpha, mut seen_anim) = (None, flags & ALPHA != 0, false);
    let (mut exif, mut xmp) = (None, None);
    while !reader.is_at_end() {
        let start = reader.clone();
        let chunk = chunk(&mut reader)?;
        match &chunk.kind {
            b"VP8X" => return Err(corrupt("a second header")),
            b"EXIF" if flags & EXIF != 0 && exif.is_none() => exif = Some(chunk.content),
            b"XMP " if flags & XMP != 0 && xmp.is_none() => xmp = Some(chunk.content),
            b"ANIM" if chunk.content.len() < 5 => {
                return Err(corrupt("the animation's header is cut off"));
            }
            b"ANIM" => seen_anim = true,
            b"ANMF" if !seen_anim => return Err(corrupt("a frame before the animation's header")),
            b"ANMF" => {
                reader = start;
                let (place, picture) = animation_frame(&mut reader)?;
                if is_animation && !picture.is_empty() {
                    let next = picture.frame(place, true)?;
                    if next.x + next.width > size.0 || next.y + next.height > size.1 {
                        return Err(corrupt("a frame does not fit its canvas"));
                    }
                    frame.get_or_insert(next);
                }
            }
            b"ALPH" | b"VP8 " | b"VP8L" if is_animation || seen_anim => {
                return Err(corrupt("an image outside the animation's frames"));
            }
            b"ALPH" | b"VP8 " | b"VP8L" => {
                reader = start;
                let picture = picture(&mut reader)?;
                let image = picture.frame((0, 0), has_alpha)?;
                has_alpha = if picture.is_lossless() {
                    picture.image_has_alpha
                } else {
                    has_alpha || picture.alpha_is_first()
                };
                if (image.width, image.height) != size {
                    return Err(corrupt("the image does not fit its canvas"));
                }
                if frame.replace(image).is_some() {
                    return Err(corrupt("a second image"));
                }
            }
            _ => {}
        }
    }
    let frame = frame.ok_or(corrupt("no image"))?;
    let orientation = exif::orientation(exif.filter(|exif| !exif.is_empty()), xmp);
    Ok(WebPHeader { size, has_alpha, orientation, frame })
}

/// What is in an `ANMF` chunk, and how far from the left and the top of the canvas it belongs.
///
/// The reader is left behind the image, as libwebp's is: chunks that follow it in there count as if
/// they stood outside.
fn animation_frame<'a>(reader: &mut Reader<'a>) -> Result<((u32, u32), Picture<'a>), MediaError> {
    let outer = chunk(&mut reader.clone())?;
    let whole = &outer.from[CHUNK_HEAD..outer.length];
    // Durations and flags follow. The size only has to be possible: libwebp goes by the one that
    // the image itself has.
    let &[x0, x1, x2, y0, y1, y2, w0, w1, w2, h0, h1, h2, _, _, _, _, ref chunks @ ..] = whole
    else {
        return Err(corrupt("a frame is cut off"));
    };
    if (u64::from(u24([w0, w1, w2])) + 1) * (u64::from(u24([h0, h1, h2])) + 1) >= MAX_AREA {
        return Err(corrupt("a frame is too large"));
    }
    reader.skip(outer.length - chunks.len());
    let start = reader.position();
    let picture = picture(reader)?;
    if reader.position() - start > chunks.len() {
        return Err(corrupt("an image is longer than its frame"));
    }
    Ok(((2 * u24([x0, x1, x2]), 2 * u24([y0, y1, y2])), picture))
}

/// Chunks that make up one image.
#[derive(Default)]
struct Picture<'a> {
    alpha: Option<Chunk<'a>>,
    image: Option<Chunk<'a>>,
    size: (u32, u32),
    /// What the image says without the alpha beside it.
    image_has_alpha: bool,
}

/// Reads the chunks of one image, up to one that is none of it.
fn picture<'a>(reader: &mut Reader<'a>) -> Result<Picture<'a>, MediaError> {
    let mut picture = Picture::default();
    loop {
        let start = reader.clone();
        let chunk = chunk(reader)?;
        match &chunk.kind {
            b"VP8L" if picture.alpha.is_some() => {
                return Err(corrupt("a lossless image with separate alpha"));
            }
            b"ALPH" if picture.alpha.is_none() => picture.alpha = Some(chunk),
            b"VP8 " | b"VP8L" if picture.image.is_none() => {
                picture.size = size_of(&chunk)?;
                picture.image_has_alpha = chunk.is_lossless() && chunk.content[4] & 0x10 != 0;
                picture.image = Some(chunk);
            }
            _ => {
                *reader = start;
                return Ok(picture);
            }
        }
        if reader.is_at_end() {
            return Ok(picture);
        }
    }
}

impl<'a> Picture<'a> {
    fn is_empty(&self) -> bool {
        self.alpha.is_none() && self.image.is_none()
    }

    fn is_lossless(&self) -> bool {
        self.image.as_ref().is_some_and(Chunk::is_lossless)
    }

    fn alpha_is_first(&self) -> bool {
        self.alpha
            .as_ref()
            .zip(self.image.as_ref())
            .is_some_and(|(alpha, image)| alpha.from.len() > image.from.len())
    }

    /// The frame that it is at this place, with the alpha beside it or without.
    fn frame(&self, (x, y): (u32, u32), with_alpha: bool) -> Result<Frame<'a>, MediaError> {
        let (width, height) = self.size;
        let image = self.image.as_ref().ok_or(corrupt("no image"))?;
        let chunks = match &self.alpha {
            Some(_) if with_alpha && !self.alpha_is_first() => {
                return Err(corrupt("its alpha follows the image"));
            }
            Some(alpha) if with_alpha => &alpha.from[..alpha.length + image.length],
            _ => &image.from[..image.length],
        };
        Ok(Frame { x, y, width, height, chunks })
    }
}

/// Bytes of a chunk's name and of its length.
const CHUNK_HEAD: usize = 8;

impl Chunk<'_> {
    fn is_lossless(&self) -> bool {
        &self.kind == b"VP8L"
    }
}

/// The next chunk.
fn chunk<'a>(reader: &mut Reader<'a>) -> Result<Chunk<'a>, MediaError> {
    let cut_off = || corrupt("a chunk is cut off");
    let from = reader.clone().up_to(usize::MAX);
    let kind = reader.array().ok_or_else(cut_off)?;
    let length = u32::from_le_bytes(reader.array().ok_or_else(cut_off)?) as usize;
    let content = reader.exactly(length).ok_or_else(cut_off)?;
    if length % 2 == 1 {
        reader.byte().ok_or_else(cut_off)?;
    }
    Ok(Chunk { kind, content, from, length: CHUNK_HEAD + length.next_multiple_of(2) })
}

/// Width and height in the header of the compressed pixels, which is checked as libwebp does.
fn size_of(image: &Chunk<'_>) -> Result<(u32, u32), MediaError> {
    let size = match (image.is_lossless(), image.content) {
        (false, &[t0, t1, t2, 0x9d, 0x01, 0x2a, w0, w1, h0, h1, ..]) => {
            let tag = u24([t0, t1, t2]);
            let is_shown_key_frame = tag & 0x11 == 0x10;
            let (profile, first_partition) = (tag >> 1 & 7, tag as usize >> 5);
            if is_shown_key_frame && profile <= 3 && first_partition < image.content.len() {
                (
                    u32::from(u16::from_le_bytes([w0, w1])) & 0x3fff,
                    u32::from(u16::from_le_bytes([h0, h1])) & 0x3fff,
                )
            } else {
                (0, 0)
            }
        }
        (true, &[0x2f, b0, b1, b2, b3, ..]) if b3 >> 5 == 0 => {
            let bits = u32::from_le_bytes([b0, b1, b2, b3]);
            ((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1)
        }
        _ => (0, 0),
    };
    if size.0 == 0 || size.1 == 0 {
        Err(corrupt("its image header is not valid"))
    } else {
        Ok(size)
    }
}

fn u24([b0, b1, b2]: [u8; 3]) -> u32 {
    u32::from_le_bytes([b0, b1, b2, 0])
}
