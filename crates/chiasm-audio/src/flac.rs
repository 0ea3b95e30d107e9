//! FLAC (RFC 9639): the length of STREAMINFO, confirmed by all frames.
//!
//! Frames do not tell their size, so the start of the next frame is found by its header, and
//! confirmed by the checksum of the frame before it.

mod checksum;
mod frame;

use crate::bytes::{array_at, u32_at};
use crate::error::LengthError;
use crate::loader::Loader;
use crate::recording::{Format, Recording};
use checksum::Crc16;
use frame::FrameHeader;

/// The size of STREAMINFO.
const STREAM_INFO_BYTES: usize = 34;
/// The offset of the first metadata block.
const FIRST_BLOCK: usize = 4;
/// The bytes of a metadata block's header.
const HEADER_BYTES: usize = 4;
/// The number of bytes of a frame's checksum.
const CHECKSUM_BYTES: usize = 2;

/// Returns `true` if a file begins like a FLAC file.
pub(crate) fn accepts(file: &[u8]) -> bool {
    array_at(file, 0) == Some(*b"fLaC")
}

/// Reads the length of a FLAC file. Both loaders decode the same length.
pub(crate) fn read(file: &[u8], _: &Loader) -> Result<Recording, LengthError> {
    let (info, first_frame) = read_metadata(file)?;
    // vLLM takes an unknown length for an endless recording.
    if info.samples == 0 {
        return Err(LengthError::NoLength);
    }
    if check_frames(file, first_frame, &info)? != info.samples {
        return Err(LengthError::OtherLength);
    }
    Ok(Recording {
        format: Format::Flac,
        rate: info.rate,
        channels: info.channels,
        samples: info.samples,
    })
}

/// The content of STREAMINFO.
#[derive(Clone, Copy, Debug)]
struct StreamInfo {
    /// The number of samples of a frame, if all frames but the last have the same.
    block_samples: Option<u32>,
    rate: u32,
    channels: u32,
    bits: u32,
    /// The number of samples of each channel; 0 if unknown.
    samples: u64,
}

/// Reads STREAMINFO. Returns it and the offset of the first frame.
fn read_metadata(file: &[u8]) -> Result<(StreamInfo, usize), LengthError> {
    let mut info = None;
    let mut at = FIRST_BLOCK;
    loop {
        let header = u32_at(file, at).ok_or(LengthError::Truncated)?;
        let is_last = header >> 31 == 1;
        let kind = header >> 24 & 0x7F;
        let size = (header & 0xFF_FFFF) as usize;
        let start = at + HEADER_BYTES;
        let body = file.get(start..start + size).ok_or(LengthError::Truncated)?;
        match (kind, info) {
            (0, None) => info = Some(StreamInfo::read(body)?),
            (1..=6, Some(_)) => {}
            _ => return Err(LengthError::Malformed),
        }
        at = start + size;
        if is_last {
            return Ok((info.ok_or(LengthError::Malformed)?, at));
        }
    }
}

impl StreamInfo {
    fn read(body: &[u8]) -> Result<Self, LengthError> {
        let body: &[u8; STREAM_INFO_BYTES] = body.try_into().map_err(|_| LengthError::Malformed)?;
        let least = u16::from_be_bytes([body[0], body[1]]);
        let most = u16::from_be_bytes([body[2], body[3]]);
        let packed = array_at(body, 10).map(u64::from_be_bytes).ok_or(LengthError::Malformed)?;
        let info = Self {
            block_samples: (least == most).then_some(most.into()),
            rate: (packed >> 44) as u32,
            channels: (packed >> 41 & 7) as u32 + 1,
            bits: (packed >> 36 & 31) as u32 + 1,
            samples: packed & 0xF_FFFF_FFFF,
        };
        if info.rate == 0 || least < 16 || least > most {
            return Err(LengthError::Malformed);
        }
        // libsndfile knows these.
        if [8, 16, 24].contains(&info.bits) { Ok(info) } else { Err(LengthError::Encoding) }
    }
}

/// Checks all frames. Returns the number of samples of each channel.
fn check_frames(file: &[u8], first: usize, info: &StreamInfo) -> Result<u64, LengthError> {
    let mut samples = 0;
    let mut number = 0;
    let mut start = first;
    while start < file.len() {
        let header = FrameHeader::read(&file[start..]).ok_or(LengthError::Frames)?;
        let size = header.check_format(info).and_then(|()| header.check_position(number, samples));
        size?;
        start = frame_end(file, start, &header)?;
        samples += u64::from(header.samples);
        number += 1;
        // Only the last frame of a stream with frames of one size may have another.
        if start < file.len() && !header.has_full_size(info) {
            return Err(LengthError::Frames);
        }
    }
    Ok(samples)
}

/// Returns the end of a frame: where the next frame begins, or the file ends, and the checksum of
/// the bytes before is right.
fn frame_end(file: &[u8], start: usize, header: &FrameHeader) -> Result<usize, LengthError> {
    let body = start + header.bytes;
    let mut crc = Crc16::from_bytes(&file[start..body]);
    let mut end = body;
    let mut zeros = 0;
    while end < file.len() {
        crc.add(file[end]);
        end += 1;
        // The CRC is 0 after a frame and its checksum, and one byte earlier if the checksum's last
        // byte is 0, and before the checksum if that is 0. At the end of the file, a third zero may
        // also be padding.
        zeros = if crc.is_zero() { zeros + 1 } else { 0 };
        let max_zeros = if end < file.len() { 3 } else { 2 };
        let is_end = (1..=max_zeros).contains(&zeros) && end >= body + CHECKSUM_BYTES;
        if is_end && is_boundary(file, end) {
            return Ok(end);
        }
    }
    Err(LengthError::Frames)
}

/// Returns `true` if the file ends at an offset, or a frame may begin there.
fn is_boundary(file: &[u8], at: usize) -> bool {
    at == file.len() || FrameHeader::read(&file[at..]).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDING: &[u8] = include_bytes!("../tests/recordings/tone_16k.flac");

    fn read(file: &[u8]) -> Result<u64, LengthError> {
        let loader = Loader::Torchcodec { ffmpeg: Some(8) };
        Recording::read(file, &loader).map(|recording| recording.samples)
    }

    #[test]
    fn every_damaged_byte_of_a_frame_is_found() {
        let samples = read(RECORDING).unwrap();
        let (_, first) = read_metadata(RECORDING).unwrap();
        for at in (first..RECORDING.len()).step_by(7) {
            let mut damaged = RECORDING.to_vec();
            damaged[at] ^= 0x10;
            assert_eq!(read(&damaged), Err(LengthError::Frames), "byte {at}");
        }
        assert_eq!(read(&RECORDING[..RECORDING.len() - 1]), Err(LengthError::Frames));
        assert_eq!(read(&[RECORDING, b"\0\0"].concat()), Err(LengthError::Frames));
        assert_eq!(read(&[RECORDING, b"\x01"].concat()), Err(LengthError::Frames));
        assert!(samples > 0);
    }

    #[test]
    fn length_of_header_must_be_that_of_frames() {
        // The lowest byte of the number of samples.
        let last = FIRST_BLOCK + HEADER_BYTES + 17;
        let mut other = RECORDING.to_vec();
        other[last] ^= 1;
        assert_eq!(read(&other), Err(LengthError::OtherLength));
        let mut unknown = RECORDING.to_vec();
        unknown[last - 4] &= 0xF0;
        unknown[last - 3..=last].fill(0);
        assert_eq!(read(&unknown), Err(LengthError::NoLength));
    }
}
