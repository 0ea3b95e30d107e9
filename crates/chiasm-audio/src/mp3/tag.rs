//! The tag that encoders write into a silent first frame: Xing's header, extended by LAME.

use super::DECODER_DELAY;
use super::header::FrameHeader;
use crate::bytes::{array_at, u32_at};
use crate::error::LengthError;
use crate::loader::Loader;

/// The bytes of a frame's header.
const HEADER_BYTES: usize = 4;
/// The bytes of the table for seeking.
const TABLE_BYTES: usize = 100;
/// The offset of delay and padding in LAME's part.
const DELAYS: usize = 21;
/// The bytes of LAME's part that mpg123 requires.
const LAME_BYTES: usize = 24;
/// The beginnings of encoder names for which FFmpeg reads delay and padding.
const ENCODERS: [&[u8; 4]; 3] = [b"LAME", b"Lavf", b"Lavc"];

/// The tag of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tag {
    /// The number of frames behind the tag's own.
    pub(super) frames: u32,
    /// The samples that the encoder added at the beginning and at the end.
    delays: Option<(u64, u64)>,
}

impl Tag {
    /// Reads the tag of the first frame; `None` if the frame is part of the sound.
    ///
    /// # Errors
    ///
    /// Returns an error if mpg123 and FFmpeg may see different tags.
    pub(super) fn read(
        file: &[u8],
        start: usize,
        header: &FrameHeader,
    ) -> Result<Option<Self>, LengthError> {
        let frame = file.get(start..start + header.bytes).ok_or(LengthError::Truncated)?;
        let name_at = HEADER_BYTES + header.side_bytes();
        let has_name = matches!(array_at(frame, name_at).as_ref(), Some(b"Xing" | b"Info"));
        // A header of another kind, which only FFmpeg knows.
        if array_at(frame, HEADER_BYTES + 32) == Some(*b"VBRI") {
            return Err(LengthError::Encoding);
        }
        if !has_name {
            return Ok(None);
        }
        // mpg123 looks for a tag only behind silence.
        if !is_silent(file, start, header) {
            return Err(LengthError::Malformed);
        }
        let flags = u32_at(frame, name_at + 4).ok_or(LengthError::Malformed)?;
        if flags & 1 == 0 {
            return Err(LengthError::NoLength);
        }
        let frames = u32_at(frame, name_at + 8).ok_or(LengthError::Malformed)?;
        if flags & 2 != 0 {
            let bytes = u32_at(frame, name_at + 12).ok_or(LengthError::Malformed)?;
            check_bytes(bytes as usize, file.len() - start)?;
        }
        let optional = [(2, 4), (4, TABLE_BYTES), (8, 4)];
        let optional_bytes: usize =
            optional.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, bytes)| bytes).sum();
        let lame = frame.get(name_at + 12 + optional_bytes..).ok_or(LengthError::Malformed)?;
        Ok(Some(Self { frames, delays: read_delays(lame)? }))
    }

    /// Returns the number of samples that are left of `total`.
    pub(super) fn samples(&self, total: u64, loader: &Loader) -> u64 {
        let (delay, padding) = match (self.delays, loader) {
            (Some(delays), _) => delays,
            // mpg123 cuts the decoder's delay off all the same.
            (None, Loader::Sndfile { .. }) => (0, 0),
            (None, Loader::Torchcodec { .. }) => return total,
        };
        // The decoder's delay moves the sound out of the encoder's padding.
        let end = total.min((total + DECODER_DELAY).saturating_sub(padding));
        end.saturating_sub(delay + DECODER_DELAY)
    }
}

/// Returns `true` if a frame has empty side information, apart from a checksum.
pub(super) fn is_silent(file: &[u8], start: usize, header: &FrameHeader) -> bool {
    let side = start + HEADER_BYTES + 2..start + HEADER_BYTES + header.side_bytes();
    file.get(side).is_some_and(|side| side.iter().all(|&byte| byte == 0))
}

/// Checks the number of bytes in a tag. FFmpeg ignores the number of frames of a tag if the file is
/// more than a sixteenth larger.
fn check_bytes(stated: usize, actual: usize) -> Result<(), LengthError> {
    let is_known = stated > 0 && actual <= stated.saturating_add(stated / 16);
    if is_known { Ok(()) } else { Err(LengthError::OtherLength) }
}

/// Reads the samples that the encoder added, if it tells them.
fn read_delays(lame: &[u8]) -> Result<Option<(u64, u64)>, LengthError> {
    if lame.iter().all(|&byte| byte == 0) {
        return Ok(None);
    }
    let encoder = array_at(lame, 0).ok_or(LengthError::Encoding)?;
    let Some(&[high, middle, low]) = lame.get(DELAYS..LAME_BYTES) else {
        return Err(LengthError::Encoding);
    };
    if !ENCODERS.contains(&&encoder) {
        return Err(LengthError::Encoding);
    }
    let packed = u64::from(high) << 16 | u64::from(middle) << 8 | u64::from(low);
    Ok(Some((packed >> 12, packed & 0xFFF)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_within_the_decoders_delay_is_kept() {
        let sndfile = Loader::Sndfile { sndfile: "1.2.2".to_owned(), avformat: None };
        let torchcodec = Loader::Torchcodec { ffmpeg: Some(8) };
        let samples = |delays, loader| Tag { frames: 3, delays }.samples(1_728, loader);
        assert_eq!(samples(Some((576, 832)), &sndfile), 320);
        assert_eq!(samples(Some((576, 832)), &torchcodec), 320);
        assert_eq!(samples(Some((576, 100)), &sndfile), 1_728 - 576 - 529);
        assert_eq!(samples(None, &sndfile), 1_728 - 529);
        assert_eq!(samples(None, &torchcodec), 1_728);
        assert_eq!(samples(Some((4_000, 0)), &sndfile), 0);
    }
}
