//! PNG headers: the chunks before the image data, and those after it that may hold metadata.

use crate::image::container::png_text::Texts;
use crate::reader::Reader;
use crate::{ImageFormat, MediaError};

/// The content of the chunks of a PNG.
pub(crate) struct PngHeader<'a> {
    pub(crate) size: (u32, u32),
    pub(crate) layout: Layout,
    pub(crate) interlaced: bool,
    /// The content of `PLTE`.
    pub(crate) palette: &'a [u8],
    pub(crate) transparency: Option<Transparency<'a>>,
    /// The EXIF orientation, 1 to 8.
    pub(crate) orientation: u8,
    /// The compressed image data.
    pub(crate) data: ImageData<'a>,
}

/// The storage format of a pixel.
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

    /// Returns the bits per pixel.
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

/// The content of `tRNS`, for the layouts for which Pillow applies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transparency<'a> {
    /// One palette index is transparent, the others are opaque.
    Index(usize),
    /// The alpha values of the first palette indices.
    Alphas(&'a [u8]),
    /// Pixels of this grey are transparent.
    Grey(u16),
    /// Pixels of this red, green and blue are transparent.
    Rgb([u16; 3]),
}

/// An iterator over the chunks of the zlib stream.
#[derive(Clone)]
pub(crate) struct ImageData<'a> {
    reader: Reader<'a>,
    /// The length of the next chunk, whose content is at `reader`.
    next_length: Option<usize>,
}

impl<'a> Iterator for ImageData<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let length = self.next_length.take()?;
        let content = self.reader.up_to(length);
        if content.len() == length {
            // Skips the checksum, which Pillow does not check here.
            self.reader.skip(4);
            if let Some(ChunkHead { kind: [b'I' | b'D', b'D', b'A', b'T'], length }) =
                ChunkHead::read(&mut self.reader)
            {
                self.next_length = Some(length);
            }
        }
        Some(content)
    }
}

/// The head of a chunk.
struct ChunkHead {
    length: usize,
    kind: [u8; 4],
}

impl ChunkHead {
    /// Reads the next head. Returns `None` at the end of the file, and for an invalid name.
    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let length = u32::from_be_bytes(reader.array()?) as usize;
        let kind: [u8; 4] = reader.array()?;
        let is_valid_name = kind.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
        is_valid_name.then_some(Self { length, kind })
    }
}

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Png, reason }
}

/// The state that chunks set, in the order of the file.
#[derive(Default)]
struct Metadata<'a> {
    size: (u32, u32),
    layout: Option<Layout>,
    interlaced: bool,
    palette: &'a [u8],
    transparency: Option<Transparency<'a>>,
    texts: Texts,
    /// The number of frames of an animation.
    frame_count: Option<u32>,
    /// The expected sequence number of the next animation chunk.
    next_sequence: Option<u32>,
    /// The rectangle of the first frame: x, y, width, height.
    frame: Option<[u32; 4]>,
}

/// The error for a chunk for which Pillow raises.
struct Refused;

impl From<super::png_text::Refused> for Refused {
    fn from(_: super::png_text::Refused) -> Self {
        Self
    }
}

/// Reads the chunks before the image data, and those after it for metadata.
pub(crate) fn read(bytes: &[u8]) -> Result<PngHeader<'_>, MediaError> {
    let mut reader = Reader::at(bytes, 8);
    let mut metadata = Metadata::default();
    let data_length = loop {
        let chunk = ChunkHead::read(&mut reader).ok_or(corrupt("it ends before the image data"))?;
        match &chunk.kind {
            b"IDAT" => break chunk.length,
            b"IEND" | b"fdAT" => return Err(corrupt("no image data")),
            _ => {}
        }
        let content = reader.exactly(chunk.length).ok_or(corrupt("a chunk is cut off"))?;
        metadata.apply(&chunk.kind, content).map_err(|_| corrupt("a malformed chunk"))?;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&chunk.kind);
        hasher.update(content);
        if reader.array().map(u32::from_be_bytes) != Some(hasher.finalize()) {
            return Err(corrupt("a chunk's checksum is wrong"));
        }
    };
    let layout = metadata.layout.ok_or(corrupt("no valid header"))?;
    let size = metadata.size;
    if size.0 == 0 || size.1 == 0 {
        return Err(corrupt("no width or height"));
    }
    if metadata.frame.is_some_and(|frame| frame != [0, 0, size.0, size.1]) {
        return Err(corrupt("the first animation frame does not fill the image"));
    }
    // Chunks after the image data do not change these.
    let interlaced = metadata.interlaced;
    let palette = metadata.palette;
    let data = ImageData { reader: reader.clone(), next_length: Some(data_length) };
    let is_animated = match (metadata.frame_count, metadata.frame) {
        (Some(count), Some(_)) => count > 1,
        // The image data is not a frame, but the default image of an animation.
        (Some(_), None) => true,
        (None, _) => false,
    };
    reader.skip(data_length);
    // Pillow raises for some chunks here only after it has read the pixels. vLLM then continues
    // without orientation.
    let orientation = match read_trailing_chunks(&mut reader, &mut metadata, is_animated) {
        Ok(()) => metadata.texts.orientation(),
        Err(Refused) => 1,
    };
    Ok(PngHeader {
        size,
        layout,
        interlaced,
        palette,
        transparency: metadata.transparency,
        orientation,
        data,
    })
}

/// Applies the chunks after the first one of the image data.
fn read_trailing_chunks<'a>(
    reader: &mut Reader<'a>,
    metadata: &mut Metadata<'a>,
    is_animated: bool,
) -> Result<(), Refused> {
    loop {
        reader.skip(4);
        let Some(chunk) = ChunkHead::read(reader) else {
            return Ok(());
        };
        match &chunk.kind {
            b"IEND" => return Ok(()),
            b"fcTL" if is_animated => return Ok(()),
            kind => {
                let content = reader.exactly(chunk.length).ok_or(Refused)?;
                metadata.apply(kind, content)?;
            }
        }
    }
}

impl<'a> Metadata<'a> {
    /// Applies a chunk.
    fn apply(&mut self, kind: &[u8; 4], content: &'a [u8]) -> Result<(), Refused> {
        match kind {
            b"IHDR" => self.header(content),
            b"PLTE" => {
                if matches!(self.layout, Some(Layout::Indexed(_))) {
                    self.palette = content;
                }
                Ok(())
            }
            b"tRNS" => self.transparency(content),
            b"gAMA" => require_length(content, 4),
            b"cHRM" => require_length(content, 32),
            b"sRGB" => require_length(content, 1),
            b"pHYs" => require_length(content, 9),
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
                let is_one_bit = self.layout == Some(Layout::Grey(1));
                let grey = if is_one_bit && value != 0 { 255 } else { value };
                self.transparency = Some(Transparency::Grey(grey));
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
        require_length(content, 8)?;
        let count = u32_at(content, 0);
        if self.frame_count.is_some() {
            self.frame_count = None;
        } else if count != 0 && count <= 0x8000_0000 {
            self.frame_count = Some(count);
        }
        Ok(())
    }

    fn frame(&mut self, content: &[u8]) -> Result<(), Refused> {
        require_length(content, 26)?;
        self.check_sequence(u32_at(content, 0))?;
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
        require_length(content, 4)?;
        // Pillow requires an earlier chunk with a sequence number.
        if self.next_sequence.is_none() {
            return Err(Refused);
        }
        self.check_sequence(u32_at(content, 0))
    }

    /// Checks the sequence number of an animation chunk.
    fn check_sequence(&mut self, number: u32) -> Result<(), Refused> {
        if number != self.next_sequence.unwrap_or(0) {
            return Err(Refused);
        }
        self.next_sequence = Some(number.wrapping_add(1));
        Ok(())
    }
}

fn require_length(content: &[u8], length: usize) -> Result<(), Refused> {
    if content.len() < length { Err(Refused) } else { Ok(()) }
}

fn u32_at(content: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([content[at], content[at + 1], content[at + 2], content[at + 3]])
}

/// Returns the index with alpha 0, if all others have 255. A trailing newline is ignored, as by
/// Python's `$`.
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
    fn single_transparent_index_is_detected() {
        assert_eq!(single_transparent(&[255, 0, 255]), Some(1));
        assert_eq!(single_transparent(&[0]), Some(0));
        assert_eq!(single_transparent(&[0, b'\n']), Some(0));
        assert_eq!(single_transparent(&[0, 0]), None);
        assert_eq!(single_transparent(&[255, 255]), None);
        assert_eq!(single_transparent(&[128]), None);
        assert_eq!(single_transparent(&[]), None);
    }
}
