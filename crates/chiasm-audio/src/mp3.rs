//! MPEG audio, layer III: a scan of all frames, and the tag of the encoder.
//!
//! libsndfile reads MP3 files with mpg123, torchcodec with FFmpeg. Both cut the encoder's delay and
//! padding off if a tag in front of the sound tells them. Without a tag, libsndfile reads no
//! further than mpg123 estimates from the size of the file and of the first frame.

mod header;
mod tag;

use crate::bytes::array_at;
use crate::error::LengthError;
use crate::loader::Loader;
use crate::recording::{Format, Recording};
use header::FrameHeader;
use tag::Tag;

/// The samples by which decoders of layer III are late, which mpg123 and FFmpeg cut off with the
/// encoder's delay.
const DECODER_DELAY: u64 = 529;
/// The bytes of the header of an ID3v2 tag.
const ID3_HEADER_BYTES: usize = 10;
/// The smallest content of an ID3v2 tag: the header of one entry.
const MIN_ID3_BYTES: usize = 10;
/// The bytes of an ID3v1 tag, at the end of a file.
const ID3V1_BYTES: usize = 128;

/// The number of frames by which FFmpeg recognizes an MP3 file.
const MIN_RECOGNIZED_FRAMES: u64 = 4;

/// Returns `true` if a file begins like an MP3 file.
pub(crate) fn accepts(file: &[u8]) -> bool {
    array_at(file, 0) == Some(*b"ID3") || FrameHeader::read(file, 0).is_some()
}

/// Reads the length of an MP3 file.
pub(crate) fn read(file: &[u8], loader: &Loader) -> Result<Recording, LengthError> {
    if !loader.knows_mp3() {
        return Err(LengthError::Loader);
    }
    let start = end_of_id3(file)?;
    let has_id3v1 =
        file.len() >= start + ID3V1_BYTES && file[file.len() - ID3V1_BYTES..].starts_with(b"TAG");
    let end = if has_id3v1 { file.len() - ID3V1_BYTES } else { file.len() };
    let first = FrameHeader::read(file, start).ok_or(LengthError::Frames)?;
    let tag = Tag::read(file, start, &first)?;
    let sound = if tag.is_some() { start + first.bytes } else { start };
    let scan = Scan::run(&file[..end], sound, &first)?;
    let total = scan.frames * u64::from(first.samples);
    let samples = match (tag, loader) {
        (Some(tag), loader) => {
            if u64::from(tag.frames) != scan.frames {
                return Err(LengthError::OtherLength);
            }
            let samples = tag.samples(total, loader);
            // FFmpeg does not cut both ends off the same frame.
            let is_one_frame = samples < u64::from(first.samples);
            if is_one_frame && matches!(loader, Loader::Torchcodec { .. }) {
                return Err(LengthError::NoLength);
            }
            samples
        }
        (None, Loader::Torchcodec { .. }) => {
            // FFmpeg drops the frame behind a tag that is damaged.
            let may_have_tag = tag::is_silent(file, start, &first);
            if may_have_tag || scan.frames < MIN_RECOGNIZED_FRAMES {
                return Err(LengthError::Frames);
            }
            total
        }
        (None, Loader::Sndfile { .. }) => {
            let frames = end as f64 / scan.first_bytes as f64;
            total.min((frames * f64::from(first.samples)) as u64)
        }
    };
    let rate = first.rate;
    Ok(Recording { format: Format::Mp3, rate, channels: first.channels, samples })
}

/// Returns the end of an ID3v2 tag; 0 if there is none.
fn end_of_id3(file: &[u8]) -> Result<usize, LengthError> {
    let header: [u8; ID3_HEADER_BYTES] = match array_at(file, 0) {
        Some(header) if header.starts_with(b"ID3") => header,
        _ => return Ok(0),
    };
    let [_, _, _, version, _, flags, size @ ..] = header;
    // A footer is not part of the size.
    let has_footer = flags & 0x10 != 0;
    if !(2..=4).contains(&version) || has_footer || size.iter().any(|byte| byte & 0x80 != 0) {
        return Err(LengthError::Malformed);
    }
    let size = size.iter().fold(0, |size, &byte| size << 7 | usize::from(byte));
    // libsndfile takes a file with a tiny tag for another format.
    if size < MIN_ID3_BYTES { Err(LengthError::Malformed) } else { Ok(ID3_HEADER_BYTES + size) }
}

/// The frames of a file.
struct Scan {
    frames: u64,
    /// The size of the first frame.
    first_bytes: usize,
}

impl Scan {
    /// Scans frames up to the end of the file. They must follow each other without a gap, and have
    /// the format of `first`.
    fn run(file: &[u8], start: usize, first: &FrameHeader) -> Result<Self, LengthError> {
        let mut frames = 0;
        let mut first_bytes = 0;
        let mut at = start;
        while at < file.len() {
            let header = FrameHeader::read(file, at).ok_or(LengthError::Frames)?;
            if !header.has_format_of(first) {
                return Err(LengthError::Frames);
            }
            if frames == 0 {
                first_bytes = header.bytes;
            }
            frames += 1;
            at += header.bytes;
        }
        match (at == file.len(), frames) {
            (false, _) => Err(LengthError::Truncated),
            (true, 0) => Err(LengthError::Empty),
            (true, frames) => Ok(Self { frames, first_bytes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAGGED: &[u8] = include_bytes!("../tests/recordings/tone_lame_vbr.mp3");
    const UNTAGGED: &[u8] = include_bytes!("../tests/recordings/tone_cbr_without_tag.mp3");

    fn sndfile() -> Loader {
        Loader::Sndfile { sndfile: "1.2.2".to_owned(), avformat: Some(62) }
    }

    fn read(file: &[u8]) -> Result<u64, LengthError> {
        Recording::read(file, &sndfile()).map(|recording| recording.samples)
    }

    #[test]
    fn truncated_and_interrupted_files_are_refused() {
        let cut = &TAGGED[..TAGGED.len() - 1];
        assert_eq!(read(cut), Err(LengthError::Truncated));
        assert_eq!(read(&[TAGGED, b"\0"].concat()), Err(LengthError::Frames));
        assert_eq!(read(&[TAGGED, TAGGED].concat()), Err(LengthError::OtherLength));
    }

    #[test]
    fn id3_tags_do_not_change_tagged_length() {
        let mut id3 = b"ID3\x04\0\0\0\0\x01\x00".to_vec();
        id3.extend([0; 128]);
        let v1 = [b"TAG".as_slice(), &[0; 125]].concat();
        assert_eq!(read(&[&id3, TAGGED, &v1].concat()), read(TAGGED));
        // The estimate grows with the size of the file, but the sound does not.
        let whole = read(&[&id3, UNTAGGED, &v1].concat()).unwrap();
        assert!(whole >= read(UNTAGGED).unwrap());
        assert_eq!(
            read(&[b"ID3\x04\0\0\0\0\0\x01\0", TAGGED].concat()),
            Err(LengthError::Malformed)
        );
        id3[5] = 0x10;
        assert_eq!(read(&[&id3, TAGGED].concat()), Err(LengthError::Malformed));
    }

    #[test]
    fn damaged_tag_is_sound_to_libsndfile_only() {
        let mut damaged = TAGGED.to_vec();
        let name = damaged.windows(4).position(|name| name == b"Xing").unwrap();
        damaged[name] = b'Y';
        let torchcodec = Loader::Torchcodec { ffmpeg: Some(8) };
        assert!(read(&damaged).unwrap() > 0);
        assert_eq!(Recording::read(&damaged, &torchcodec), Err(LengthError::Frames));
        let untagged = Recording::read(UNTAGGED, &torchcodec).unwrap();
        assert!(untagged.samples > 0 && untagged.samples.is_multiple_of(576));
    }

    #[test]
    fn unknown_versions_are_left_to_vllm() {
        let other = Loader::Sndfile { sndfile: "1.3.0".to_owned(), avformat: Some(62) };
        assert_eq!(Recording::read(TAGGED, &other), Err(LengthError::Loader));
        let other = Loader::Torchcodec { ffmpeg: Some(7) };
        assert_eq!(Recording::read(TAGGED, &other), Err(LengthError::Loader));
    }
}
