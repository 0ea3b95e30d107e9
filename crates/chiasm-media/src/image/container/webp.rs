//! WebP headers: the RIFF chunks, read as libwebp's demuxer reads them for Pillow.

use crate::image::exif;
use crate::reader::Reader;
use crate::{ImageFormat, MediaError};

/// The canvas and the first frame of a WebP file.
pub(crate) struct WebPHeader<'a> {
    pub(crate) size: (u32, u32),
    /// `true` if Pillow reads the image as one with transparency. If not, alpha is dropped, not
    /// blended onto white.
    pub(crate) has_alpha: bool,
    /// The EXIF orientation, 1 to 8.
    pub(crate) orientation: u8,
    pub(crate) frame: Frame<'a>,
}

/// The first frame, or the only one.
pub(crate) struct Frame<'a> {
    /// The offset in pixels from the left of the canvas.
    pub(crate) x: u32,
    /// The offset in pixels from the top of the canvas.
    pub(crate) y: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// The chunks for libwebp: `ALPH`, if the frame has separate alpha, and `VP8 ` or `VP8L`.
    ///
    /// They include the padding byte of the last chunk, which libwebp reads if the pixels continue
    /// past the end of their chunk.
    pub(crate) chunks: &'a [u8],
}

// The flags of `VP8X`.
const ANIMATION: u8 = 0x02;
const XMP: u8 = 0x04;
const EXIF: u8 = 0x08;
const ALPHA: u8 = 0x10;
const KNOWN_FLAGS: u8 = 0x3e;

/// The number of pixels from which libwebp refuses a canvas or a frame.
const AREA_LIMIT: u64 = 1 << 32;

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::WebP, reason }
}

/// Returns `true` if Pillow reads the bytes as a WebP file.
pub(crate) fn accepts(bytes: &[u8]) -> bool {
    bytes.starts_with(b"RIFF")
        && bytes.get(8..12) == Some(b"WEBP")
        && matches!(bytes.get(12..16), Some(b"VP8 " | b"VP8X" | b"VP8L"))
}

/// A RIFF chunk.
struct Chunk<'a> {
    kind: [u8; 4],
    content: &'a [u8],
    /// The file from this chunk on.
    file_from_here: &'a [u8],
    /// The bytes of the chunk, including its head and padding.
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
    let mut after_first = reader.clone();
    let first = read_chunk(&mut after_first)?;
    if &first.kind == b"VP8X" {
        return read_extended(first.content, after_first);
    }
    let picture = read_picture(&mut reader)?;
    let frame = picture.frame((0, 0), false)?;
    Ok(WebPHeader {
        size: (frame.width, frame.height),
        has_alpha: picture.image_has_alpha,
        orientation: 1,
        frame,
    })
}

/// Reads the chunks after `VP8X`.
fn read_extended<'a>(vp8x: &[u8], mut reader: Reader<'a>) -> Result<WebPHeader<'a>, MediaError> {
    let &[flags, _, _, _, w0, w1, w2, h0, h1, h2] = vp8x else {
        return Err(corrupt("its header has a wrong length"));
    };
    let size = (u24([w0, w1, w2]) + 1, u24([h0, h1, h2]) + 1);
    if flags & !KNOWN_FLAGS != 0 || u64::from(size.0) * u64::from(size.1) >= AREA_LIMIT {
        return Err(corrupt("its header is not valid"));
    }
    let is_animation = flags & ANIMATION != 0;
    let mut frame = None;
    let mut has_alpha = flags & ALPHA != 0;
    let mut has_anim_chunk = false;
    let mut exif = None;
    let mut xmp = None;
    while !reader.is_at_end() {
        let start = reader.clone();
        let chunk = read_chunk(&mut reader)?;
        match &chunk.kind {
            b"VP8X" => return Err(corrupt("a second header")),
            b"EXIF" if flags & EXIF != 0 && exif.is_none() => exif = Some(chunk.content),
            b"XMP " if flags & XMP != 0 && xmp.is_none() => xmp = Some(chunk.content),
            b"ANIM" if chunk.content.len() < 5 => {
                return Err(corrupt("the animation's header is cut off"));
            }
            b"ANIM" => has_anim_chunk = true,
            b"ANMF" if !has_anim_chunk => {
                return Err(corrupt("a frame before the animation's header"));
            }
            b"ANMF" => {
                reader = start;
                let (offset, picture) = read_animation_frame(&mut reader)?;
                if is_animation && !picture.is_empty() {
                    let next = picture.frame(offset, true)?;
                    if next.x + next.width > size.0 || next.y + next.height > size.1 {
                        return Err(corrupt("a frame does not fit its canvas"));
                    }
                    frame.get_or_insert(next);
                }
            }
            b"ALPH" | b"VP8 " | b"VP8L" if is_animation || has_anim_chunk => {
                return Err(corrupt("an image outside the animation's frames"));
            }
            b"ALPH" | b"VP8 " | b"VP8L" => {
                reader = start;
                let picture = read_picture(&mut reader)?;
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

/// Reads an `ANMF` chunk. Returns its offset from the left and the top of the canvas, and its
/// picture.
///
/// The reader is left after the image, as libwebp's is. Further chunks inside the `ANMF` chunk
/// therefore count as if they were outside.
fn read_animation_frame<'a>(
    reader: &mut Reader<'a>,
) -> Result<((u32, u32), Picture<'a>), MediaError> {
    let outer = read_chunk(&mut reader.clone())?;
    let whole = &outer.file_from_here[CHUNK_HEAD_BYTES..outer.length];
    // The duration and flags follow the size. The size only has to be possible, because libwebp
    // uses the size in the image itself.
    let &[x0, x1, x2, y0, y1, y2, w0, w1, w2, h0, h1, h2, _, _, _, _, ref chunks @ ..] = whole
    else {
        return Err(corrupt("a frame is cut off"));
    };
    if (u64::from(u24([w0, w1, w2])) + 1) * (u64::from(u24([h0, h1, h2])) + 1) >= AREA_LIMIT {
        return Err(corrupt("a frame is too large"));
    }
    reader.skip(outer.length - chunks.len());
    let start = reader.position();
    let picture = read_picture(reader)?;
    if reader.position() - start > chunks.len() {
        return Err(corrupt("an image is longer than its frame"));
    }
    Ok(((2 * u24([x0, x1, x2]), 2 * u24([y0, y1, y2])), picture))
}

/// The chunks of one image.
#[derive(Default)]
struct Picture<'a> {
    alpha: Option<Chunk<'a>>,
    image: Option<Chunk<'a>>,
    size: (u32, u32),
    /// `true` if the image itself has alpha, without an `ALPH` chunk.
    image_has_alpha: bool,
}

/// Reads the chunks of one image, up to the first chunk that does not belong to it.
fn read_picture<'a>(reader: &mut Reader<'a>) -> Result<Picture<'a>, MediaError> {
    let mut picture = Picture::default();
    loop {
        let start = reader.clone();
        let chunk = read_chunk(reader)?;
        match &chunk.kind {
            b"VP8L" if picture.alpha.is_some() => {
                return Err(corrupt("a lossless image with separate alpha"));
            }
            b"ALPH" if picture.alpha.is_none() => picture.alpha = Some(chunk),
            b"VP8 " | b"VP8L" if picture.image.is_none() => {
                picture.size = image_size(&chunk)?;
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

    /// Returns `true` if the `ALPH` chunk precedes the image.
    fn alpha_is_first(&self) -> bool {
        self.alpha
            .as_ref()
            .zip(self.image.as_ref())
            .is_some_and(|(alpha, image)| alpha.file_from_here.len() > image.file_from_here.len())
    }

    /// Returns the frame at offset (x, y), with the separate alpha or without.
    fn frame(&self, (x, y): (u32, u32), with_alpha: bool) -> Result<Frame<'a>, MediaError> {
        let (width, height) = self.size;
        let image = self.image.as_ref().ok_or(corrupt("no image"))?;
        let chunks = match &self.alpha {
            Some(_) if with_alpha && !self.alpha_is_first() => {
                return Err(corrupt("its alpha follows the image"));
            }
            Some(alpha) if with_alpha => &alpha.file_from_here[..alpha.length + image.length],
            _ => &image.file_from_here[..image.length],
        };
        Ok(Frame { x, y, width, height, chunks })
    }
}

/// The bytes of a chunk's name and length.
const CHUNK_HEAD_BYTES: usize = 8;

impl Chunk<'_> {
    fn is_lossless(&self) -> bool {
        &self.kind == b"VP8L"
    }
}

/// Reads the next chunk.
fn read_chunk<'a>(reader: &mut Reader<'a>) -> Result<Chunk<'a>, MediaError> {
    let cut_off = || corrupt("a chunk is cut off");
    let file_from_here = reader.clone().up_to(usize::MAX);
    let kind = reader.array().ok_or_else(cut_off)?;
    let length = u32::from_le_bytes(reader.array().ok_or_else(cut_off)?) as usize;
    let content = reader.exactly(length).ok_or_else(cut_off)?;
    if length % 2 == 1 {
        reader.byte().ok_or_else(cut_off)?;
    }
    let length = CHUNK_HEAD_BYTES + length.next_multiple_of(2);
    Ok(Chunk { kind, content, file_from_here, length })
}

/// Returns the width and height in the header of the compressed pixels, checked as in libwebp.
fn image_size(image: &Chunk<'_>) -> Result<(u32, u32), MediaError> {
    let size = match (image.is_lossless(), image.content) {
        (false, &[t0, t1, t2, 0x9d, 0x01, 0x2a, w0, w1, h0, h1, ..]) => {
            let tag = u24([t0, t1, t2]);
            let is_shown_key_frame = tag & 0x11 == 0x10;
            let profile = tag >> 1 & 7;
            let first_partition_bytes = tag as usize >> 5;
            if is_shown_key_frame && profile <= 3 && first_partition_bytes < image.content.len() {
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
