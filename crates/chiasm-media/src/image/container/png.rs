//! PNG chunks: those before the image data, and those behind it that may still say something.

use crate::image::container::png_text::Texts;
use crate::reader::Reader;
use crate::{ImageFormat, MediaError};

/// What the chunks say.
pub(crate) struct PngHeader<'a> {
    pub(crate) size: (u32, u32),
    pub(crate) layout: Layout,
    pub(crate) interlaced: bool,
    /// The content of `PLTE`.
    pub(crate) palette: &'a [u8],
    pub(crate) transparency: Option<Transparency<'a>>,
    pub(crate) orientation: u8,
    pub(crate) data: ImageData<'a>,
}

/// How a pixel is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// 1, 2, 4 or 8 bits of grey.
    Grey(u8),
    Grey16,
    /// 1, 2, 4 or 8 bits of palette index.
    Indexed(u8),
    Rgb8,
    Rgb16,
    GreyAlpha8,
    GreyAlpha16,
    Rgba8,
    Rgba16,
}

impl Layout {
    fn new(depth: u8, colour: u8) -> Option<Self> {
        Some(match (depth, colour) {
            (1 | 2 | 4 | 8, 0) => Self::Grey(depth),
            (16, 0) => Self::Grey16,
            (8, 2) => Self::Rgb8,
            (16, 2) => Self::Rgb16,
            (1 | 2 | 4 | 8, 3) => Self::Indexed(depth),
            (8, 4) => Self::GreyAlpha8,
            (16, 4) => Self::GreyAlpha16,
            (8, 6) => Self::Rgba8,
            (16, 6) => Self::Rgba16,
            _ => return None,
        })
    }

    /// Bits per pixel.
    pub(crate) fn bits(self) -> usize {
        match self {
            Self::Grey(depth) | Self::Indexed(depth) => depth.into(),
            Self::Grey16 | Self::GreyAlpha8 => 16,
            Self::Rgb8 => 24,
            Self::GreyAlpha16 | Self::Rgba8 => 32,
            Self::Rgb16 => 48,
            Self::Rgba16 => 64,
        }
    }
}

/// What `tRNS` says of the layouts for which Pillow heeds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transparency<'a> {
    /// One palette index is transparent, the others are opaque.
    Index(usize),
    /// Alpha of the first palette indices.
    Alphas(&'a [u8]),
    /// Pixels of this grey are transparent.
    Grey(u16),
    /// Pixels of this red, green and blue are transparent.
    Rgb([u16; 3]),
}

/// The chunks that hold the zlib stream.
#[derive(Clone)]
pub(crate) struct ImageData<'a> {
    reader: Reader<'a>,
    next: Option<usize>,
}

impl<'a> Iterator for ImageData<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let length = self.next.take()?;
        let content = self.reader.up_to(length);
        if content.len() == length {
            // The checksum, which Pillow does not check here, and the next chunk's head.
            self.reader.skip(4);
            if let Some(Chunk { kind: [b'I' | b'D', b'D', b'A', b'T'], length }) =
                Chunk::read(&mut self.reader)
            {
                self.next = Some(length);
            }
        }
        Some(content)
    }
}

struct Chunk {
    length: usize,
    kind: [u8; 4],
}

impl Chunk {
    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let length = u32::from_be_bytes(reader.array()?) as usize;
        let kind: [u8; 4] = reader.array()?;
        let is_word = kind.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
        is_word.then_some(Self { length, kind })
    }
}

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Png, reason }
}

/// Everything that chunks may set, in the order they come.
#[derive(Default)]
struct Info<'a> {
    size: (u32, u32),
    layout: Option<Layout>,
    interlaced: bool,
    palette: &'a [u8],
    transparency: Option<Transparency<'a>>,
    texts: Texts,
    /// Frames of an animation.
    frames: Option<u32>,
    /// The next sequence number of an animation's chunks.
    sequence: Option<u32>,
    /// The rectangle of the first frame: x, y, width, height.
    frame: Option<[u32; 4]>,
}

/// A chunk that Pillow raises for.
struct Refused;

impl From<super::png_text::Refused> for Refused {
    fn from(_: super::png_text::Refused) -> Self {
        Self
    }
}

/// Reads all chunks up to the image data, and those behind it for metadata.
pub(crate) fn read(bytes: &[u8]) -> Result<PngHeader<'_>, MediaError> {
    let mut reader = Reader::at(bytes, 8);
    let mut info = Info::default();
    let data_length = loop {
        let chunk = Chunk::read(&mut reader).ok_or(corrupt("it ends before the image data"))?;
        match &chunk.kind {
            b"IDAT" => break chunk.length,
            b"IEND" | b"fdAT" => return Err(corrupt("no image data")),
            _ => {}
        }
        let content = reader.exactly(chunk.length).ok_or(corrupt("a chunk is cut off"))?;
        info.heed(&chunk.kind, content).map_err(|_| corrupt("a malformed chunk"))?;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&chunk.kind);
        hasher.update(content);
        if reader.array().map(u32::from_be_bytes) != Some(hasher.finalize()) {
            return Err(corrupt("a chunk's checksum is wrong"));
        }
    };
    let layout = info.layout.ok_or(corrupt("no valid header"))?;
    let size = info.size;
    if size.0 == 0 || size.1 == 0 {
        return Err(corrupt("no width or height"));
    }
    if info.frame.is_some_and(|frame| frame != [0, 0, size.0, size.1]) {
        return Err(corrupt("the first animation frame does not fill the image"));
    }
    let (interlaced, palette) = (info.interlaced, info.palette);
    let data = ImageData { reader: reader.clone(), next: Some(data_length) };
    let animated = match (info.frames, info.frame) {
        (Some(frames), Some(_)) => frames > 1,
        // The image data is no frame but a default image beside them.
        (Some(_), None) => true,
        (None, _) => false,
    };
    reader.skip(data_length);
    // Pillow raises for some chunks here only after the pixels have been read, and vLLM then goes
    // on without orientation.
    let orientation = match read_behind(&mut reader, &mut info, animated) {
        Ok(()) => info.texts.orientation(),
        Err(Refused) => 1,
    };
    Ok(PngHeader {
        size,
        layout,
        interlaced,
        palette,
        transparency: info.transparency,
        orientation,
        data,
    })
}

/// Heeds the chunks behind the first one of the image data.
fn read_behind<'a>(
    reader: &mut Reader<'a>,
    info: &mut Info<'a>,
    animated: bool,
) -> Result<(), Refused> {
    loop {
        reader.skip(4);
        let Some(chunk) = Chunk::read(reader) else {
            return Ok(());
        };
        match &chunk.kind {
            b"IEND" => return Ok(()),
            b"fcTL" if animated => return Ok(()),
            kind => {
                let content = reader.exactly(chunk.length).ok_or(Refused)?;
                info.heed(kind, content)?;
            }
        }
    }
}

impl<'a> Info<'a> {
    fn heed(&mut self, kind: &[u8; 4], content: &'a [u8]) -> Result<(), Refused> {
        match kind {
            b"IHDR" => self.header(content),
            b"PLTE" => {
                if matches!(self.layout, Some(Layout::Indexed(_))) {
                    self.palette = content;
                }
                Ok(())
            }
            b"tRNS" => self.transparency(content),
            b"gAMA" => at_least(content, 4),
            b"cHRM" => at_least(content, 32),
            b"sRGB" => at_least(content, 1),
            b"pHYs" => at_least(content, 9),
            b"iCCP" => Ok(self.texts.colour_profile(content)?),
            b"tEXt" => Ok(self.texts.plain(content)?),
            b"zTXt" => Ok(self.texts.compressed(content)?),
            b"iTXt" => Ok(self.texts.international(content)?),
            b"eXIf" => {
                self.texts.exif_chunk(content);
                Ok(())
            }
            b"acTL" => self.animation(content),
            b"fcTL" => self.frame(content),
            b"fdAT" => self.frame_data(content),
            _ => Ok(()),
        }
    }

    fn header(&mut self, content: &[u8]) -> Result<(), Refused> {
        let &[w3, w2, w1, w0, h3, h2, h1, h0, depth, colour, _, filter, interlace, ..] = content
        else {
            return Err(Refused);
        };
        self.size = (u32::from_be_bytes([w3, w2, w1, w0]), u32::from_be_bytes([h3, h2, h1, h0]));
        self.layout = Layout::new(depth, colour).or(self.layout);
        self.interlaced |= interlace != 0;
        if filter == 0 { Ok(()) } else { Err(Refused) }
    }

    fn transparency(&mut self, content: &'a [u8]) -> Result<(), Refused> {
        match self.layout {
            Some(Layout::Indexed(_)) => {
                if let Some(index) = single_transparent(content) {
                    self.transparency = Some(Transparency::Index(index));
                } else {
                    self.transparency = Some(Transparency::Alphas(content));
                }
            }
            Some(Layout::Grey(_) | Layout::Grey16) => {
                let value = u16::from_be_bytes(*content.first_chunk().ok_or(Refused)?);
                let is_bit = self.layout == Some(Layout::Grey(1));
                self.transparency = Some(Transparency::Grey(match (is_bit, value) {
                    (true, 0) => 0,
                    (true, _) => 255,
                    (false, value) => value,
                }));
            }
            Some(Layout::Rgb8 | Layout::Rgb16) => {
                let [r1, r2, g1, g2, b1, b2] = *content.first_chunk().ok_or(Refused)?;
                let rgb = [[r1, r2], [g1, g2], [b1, b2]].map(u16::from_be_bytes);
                self.transparency = Some(Transparency::Rgb(rgb));
            }
            _ => {}
        }
        Ok(())
    }

    fn animation(&mut self, content: &[u8]) -> Result<(), Refused> {
        at_least(content, 8)?;
        let frames = u32_at(content, 0);
        if self.frames.is_some() {
            self.frames = None;
        } else if frames != 0 && frames <= 0x8000_0000 {
            self.frames = Some(frames);
        }
        Ok(())
    }

    fn frame(&mut self, content: &[u8]) -> Result<(), Refused> {
        at_least(content, 26)?;
        self.in_sequence(u32_at(content, 0))?;
        let [width, height, x, y] = [4, 8, 12, 16].map(|at| u32_at(content, at));
        let fits = |offset: u32, length: u32, limit: u32| {
            u64::from(offset) + u64::from(length) <= limit.into()
        };
        if !fits(x, width, self.size.0) || !fits(y, height, self.size.1) {
            return Err(Refused);
        }
        self.frame = Some([x, y, width, height]);
        Ok(())
    }

    fn frame_data(&mut self, content: &[u8]) -> Result<(), Refused> {
        at_least(content, 4)?;
        match self.sequence {
            // Pillow expects a number before this one.
            None => Err(Refused),
            Some(_) => self.in_sequence(u32_at(content, 0)),
        }
    }

    fn in_sequence(&mut self, number: u32) -> Result<(), Refused> {
        if number != self.sequence.unwrap_or(0) {
            return Err(Refused);
        }
        self.sequence = Some(number.wrapping_add(1));
        Ok(())
    }
}

fn at_least(content: &[u8], length: usize) -> Result<(), Refused> {
    if content.len() < length { Err(Refused) } else { Ok(()) }
}

fn u32_at(content: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([content[at], content[at + 1], content[at + 2], content[at + 3]])
}

/// The one index with alpha 0 when all others have 255. A closing newline is passed over, as
/// Python's `$` does.
fn single_transparent(alphas: &[u8]) -> Option<usize> {
    let single = |alphas: &[u8]| {
        let index = alphas.iter().position(|&alpha| alpha != 255)?;
        let rest_opaque = alphas[index + 1..].iter().all(|&alpha| alpha == 255);
        (alphas[index] == 0 && rest_opaque).then_some(index)
    };
    single(alphas).or_else(|| single(alphas.strip_suffix(b"\n")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_palette_with_one_transparent_index_is_told_from_one_with_alphas() {
        assert_eq!(single_transparent(&[255, 0, 255]), Some(1));
        assert_eq!(single_transparent(&[0]), Some(0));
        assert_eq!(single_transparent(&[0, b'\n']), Some(0));
        assert_eq!(single_transparent(&[0, 0]), None);
        assert_eq!(single_transparent(&[255, 255]), None);
        assert_eq!(single_transparent(&[128]), None);
        assert_eq!(single_transparent(&[]), None);
    }
}
