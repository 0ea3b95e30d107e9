//! RIFF WAVE, as libsndfile's `wav.c` and FFmpeg's `wavdec.c` read it.

use crate::bytes::{array_at, u16_le_at, u32_le_at};
use crate::error::LengthError;
use crate::loader::Loader;
use crate::recording::{Format, Recording};

/// The bytes of a chunk's name and size.
const HEADER_BYTES: usize = 8;
/// The offset of the first chunk.
const FIRST_CHUNK: usize = 12;
/// The maximum number of chunks.
const MAX_CHUNKS: usize = 64;
/// The maximum number of channels: those of 7.1 sound.
const MAX_CHANNELS: u16 = 8;
/// The size of a data chunk whose writer could not seek back to write its size.
const UNKNOWN_SIZE: u32 = u32::MAX;
/// Chunks whose content neither loader uses for the samples.
const HARMLESS_CHUNKS: [&[u8; 4]; 8] =
    [b"LIST", b"JUNK", b"junk", b"FLLR", b"PAD ", b"id3 ", b"ID3 ", b"iXML"];
/// The smallest broadcast extension that FFmpeg accepts.
const MIN_BROADCAST_BYTES: usize = 602;

/// Returns `true` if a file begins like a WAVE file.
pub(crate) fn accepts(file: &[u8]) -> bool {
    array_at(file, 0) == Some(*b"RIFF") && array_at(file, 8) == Some(*b"WAVE")
}

/// Reads the length of a WAVE file.
pub(crate) fn read(file: &[u8], loader: &Loader) -> Result<Recording, LengthError> {
    let mut layout = None;
    let mut data = None;
    let mut rest = FIRST_CHUNK;
    for _ in 0..MAX_CHUNKS {
        if rest == file.len() {
            break;
        }
        let chunk = Chunk::read(file, rest)?;
        match &chunk.name {
            b"fmt " if layout.is_none() => layout = Some(Layout::read(chunk.body(file)?)?),
            b"data" if data.is_none() => {
                let layout = layout.ok_or(LengthError::Malformed)?;
                data = Some(Data::read(file, &chunk, layout, loader)?);
            }
            b"fact" if chunk.body(file)?.len() >= 4 => {}
            b"bext" if chunk.body(file)?.len() >= MIN_BROADCAST_BYTES => {}
            b"PEAK" => {
                let channels = layout.ok_or(LengthError::Malformed)?.channels;
                // libsndfile refuses another size.
                if chunk.body(file)?.len() != 8 + 8 * usize::from(channels) {
                    return Err(LengthError::Malformed);
                }
            }
            name if HARMLESS_CHUNKS.contains(&name) => {
                chunk.body(file)?;
            }
            _ => return Err(LengthError::Chunks),
        }
        rest = match &data {
            Some(data) if data.is_last => file.len(),
            _ => chunk.end_with_padding().min(file.len()),
        };
    }
    if rest != file.len() {
        return Err(LengthError::Chunks);
    }
    let layout = layout.ok_or(LengthError::Malformed)?;
    let data = data.ok_or(LengthError::Truncated)?;
    Ok(Recording {
        format: Format::Wav,
        rate: layout.rate,
        channels: layout.channels.into(),
        samples: (data.bytes / usize::from(layout.block_bytes)) as u64,
    })
}

/// A chunk, which may end beyond the file.
struct Chunk {
    name: [u8; 4],
    start: usize,
    size: u32,
}

impl Chunk {
    fn read(file: &[u8], start: usize) -> Result<Self, LengthError> {
        let name = array_at(file, start).ok_or(LengthError::TrailingBytes)?;
        let size = u32_le_at(file, start + 4).ok_or(LengthError::TrailingBytes)?;
        Ok(Self { name, start: start + HEADER_BYTES, size })
    }

    /// Returns the chunk's bytes.
    fn body<'a>(&self, file: &'a [u8]) -> Result<&'a [u8], LengthError> {
        file.get(self.start..self.end()).ok_or(LengthError::Truncated)
    }

    fn end(&self) -> usize {
        self.start.saturating_add(self.size as usize)
    }

    /// Returns the start of the next chunk: chunks have an even number of bytes.
    fn end_with_padding(&self) -> usize {
        self.end().saturating_add(self.size as usize % 2)
    }
}

/// The layout of the samples.
#[derive(Clone, Copy)]
struct Layout {
    rate: u32,
    channels: u16,
    /// The bytes of one sample of each channel.
    block_bytes: u16,
}

impl Layout {
    /// Reads a `fmt ` chunk.
    fn read(body: &[u8]) -> Result<Self, LengthError> {
        const PCM: u16 = 1;
        const FLOAT: u16 = 3;
        const A_LAW: u16 = 6;
        const MU_LAW: u16 = 7;
        const EXTENSIBLE: u16 = 0xFFFE;
        /// The GUID of an encoding, behind its first two bytes.
        const GUID_REST: [u8; 14] = *b"\0\0\0\0\x10\0\x80\0\0\xAA\0\x38\x9B\x71";

        let short = |at| u16_le_at(body, at).ok_or(LengthError::Malformed);
        let long = |at| u32_le_at(body, at).ok_or(LengthError::Malformed);
        let mut encoding = short(0)?;
        let channels = short(2)?;
        let rate = long(4)?;
        let bytes_per_second = long(8)?;
        let block_bytes = short(12)?;
        let bits = short(14)?;
        let is_size_known = match encoding {
            EXTENSIBLE => body.len() == 40 && short(16)? == 22 && short(18)? == bits,
            _ => [16, 18].contains(&body.len()),
        };
        if encoding == EXTENSIBLE {
            encoding = short(24)?;
            if array_at(body, 26) != Some(GUID_REST) {
                return Err(LengthError::Encoding);
            }
        }
        let are_bits_known = match encoding {
            PCM => [8, 16, 24, 32].contains(&bits),
            FLOAT => [32, 64].contains(&bits),
            A_LAW | MU_LAW => bits == 8,
            _ => false,
        };
        if !is_size_known || !are_bits_known || !(1..=MAX_CHANNELS).contains(&channels) {
            return Err(LengthError::Encoding);
        }
        let is_consistent = u32::from(block_bytes) == u32::from(channels) * u32::from(bits / 8)
            && rate.checked_mul(block_bytes.into()) == Some(bytes_per_second);
        if rate == 0 || !is_consistent {
            return Err(LengthError::Malformed);
        }
        Ok(Self { rate, channels, block_bytes })
    }
}

/// The samples of a file.
struct Data {
    bytes: usize,
    /// Set if the samples reach to the end of the file.
    is_last: bool,
}

impl Data {
    fn read(
        file: &[u8],
        chunk: &Chunk,
        layout: Layout,
        loader: &Loader,
    ) -> Result<Self, LengthError> {
        let available = file.len() - chunk.start;
        let is_truncated = chunk.size as usize > available;
        let bytes = available.min(chunk.size as usize);
        let has_broken_block = !bytes.is_multiple_of(layout.block_bytes.into());
        match loader {
            // libsndfile reads up to the end of the file, and ignores a broken block.
            Loader::Sndfile { .. } => {}
            // FFmpeg fails at a broken block, and skips it before other chunks.
            Loader::Torchcodec { .. } => {
                if has_broken_block || is_truncated && chunk.size != UNKNOWN_SIZE {
                    return Err(LengthError::Truncated);
                }
            }
        }
        // libsndfile takes these for WavPack and Ogg.
        if matches!(array_at(file, chunk.start).as_ref(), Some(b"wvpk" | b"OggS")) {
            return Err(LengthError::Encoding);
        }
        Ok(Self { bytes, is_last: bytes == available })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sndfile() -> Loader {
        Loader::Sndfile { sndfile: "1.2.2".to_owned(), avformat: None }
    }

    fn chunk(name: &[u8; 4], size: u32, body: &[u8]) -> Vec<u8> {
        [name.as_slice(), &size.to_le_bytes(), body].concat()
    }

    /// Returns a `fmt ` chunk of 16-bit samples at 16 kHz.
    fn layout(channels: u16) -> Vec<u8> {
        let mut body = Vec::new();
        for short in [1, channels] {
            body.extend(u16::to_le_bytes(short));
        }
        for long in [16_000, 16_000 * 2 * u32::from(channels)] {
            body.extend(u32::to_le_bytes(long));
        }
        for short in [2 * channels, 16] {
            body.extend(u16::to_le_bytes(short));
        }
        chunk(b"fmt ", 16, &body)
    }

    fn file(chunks: &[Vec<u8>]) -> Vec<u8> {
        [b"RIFF\0\0\0\0WAVE".to_vec(), chunks.concat()].concat()
    }

    #[test]
    fn chunks_around_the_samples_are_skipped() {
        let file = file(&[
            chunk(b"JUNK", 3, &[0; 4]),
            layout(2),
            chunk(b"data", 40, &[0; 40]),
            chunk(b"LIST", 6, b"INFO\0\0"),
        ]);
        let recording = Recording::read(&file, &sndfile()).unwrap();
        assert_eq!((recording.samples, recording.channels, recording.rate), (10, 2, 16_000));
    }

    #[test]
    fn torchcodec_fails_at_broken_block() {
        let file = file(&[layout(2), chunk(b"data", 1_000, &[0; 42])]);
        assert_eq!(Recording::read(&file, &sndfile()).unwrap().samples, 10);
        let torchcodec = Loader::Torchcodec { ffmpeg: Some(8) };
        assert_eq!(Recording::read(&file, &torchcodec), Err(LengthError::Truncated));
    }

    #[test]
    fn unknown_chunks_and_trailing_bytes_are_refused() {
        let data = chunk(b"data", 4, &[0; 4]);
        let read = |more: &[u8]| {
            Recording::read(&[file(&[layout(1), data.clone()]), more.to_vec()].concat(), &sndfile())
        };
        assert_eq!(read(&[]).map(|recording| recording.samples), Ok(2));
        assert_eq!(read(&chunk(b"cart", 0, &[])), Err(LengthError::Chunks));
        assert_eq!(read(&data), Err(LengthError::Chunks));
        assert_eq!(read(b"LIST"), Err(LengthError::TrailingBytes));
        assert_eq!(read(&chunk(b"LIST", 9, b"x")), Err(LengthError::Truncated));
    }

    #[test]
    fn inconsistent_layout_is_refused() {
        let mut broken = layout(1);
        broken[8 + 12] = 3;
        let broken = file(&[broken, chunk(b"data", 4, &[0; 4])]);
        assert_eq!(Recording::read(&broken, &sndfile()), Err(LengthError::Malformed));
        let late = file(&[chunk(b"data", 4, &[0; 4]), layout(1)]);
        assert_eq!(Recording::read(&late, &sndfile()), Err(LengthError::Malformed));
    }
}
