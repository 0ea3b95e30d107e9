//! AAC in mp4, as FFmpeg decodes it.

mod config;

use chiasm_video::{SoundError, SoundTrack, accepts_mp4};

use crate::error::LengthError;
use crate::loader::Loader;
use crate::recording::{Format, Recording};
use config::AacConfig;

/// The samples of a packet, in each channel.
const PACKET_SAMPLES: u32 = 1_024;

/// Returns `true` if a file begins like an mp4.
pub(crate) fn accepts(file: &[u8]) -> bool {
    accepts_mp4(file)
}

/// Reads the length of the first sound track of an mp4. Both loaders use FFmpeg: libsndfile does
/// not know mp4.
///
/// Each packet gives 1,024 samples, also the last one. The edit list hides samples at the beginning
/// and whole packets at the end.
pub(crate) fn read(file: &[u8], loader: &Loader) -> Result<Recording, LengthError> {
    if !loader.knows_aac() {
        return Err(LengthError::Loader);
    }
    let track = SoundTrack::read(file)?;
    let config = AacConfig::read(&track.descriptor)?;
    if track.timescale != config.rate || track.packet_ticks > PACKET_SAMPLES {
        return Err(LengthError::Malformed);
    }
    // The only packet of a track may be short.
    if track.packet_ticks < PACKET_SAMPLES && track.packets > 1 {
        return Err(LengthError::Malformed);
    }
    let decoded = track.packets * u64::from(PACKET_SAMPLES);
    Ok(Recording {
        format: Format::Aac,
        rate: config.rate,
        channels: config.channels,
        samples: decoded.saturating_sub(track.hidden_ticks),
    })
}

impl From<SoundError> for LengthError {
    fn from(error: SoundError) -> Self {
        match error {
            SoundError::Truncated => Self::Truncated,
            SoundError::Codec => Self::Encoding,
            SoundError::EditList => Self::EditList,
            SoundError::Fragments => Self::Fragments,
            _ => Self::Malformed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDING: &[u8] = include_bytes!("../tests/recordings/tone_edit.m4a");

    fn read(file: &[u8]) -> Result<u64, LengthError> {
        let loader = Loader::Torchcodec { ffmpeg: Some(8) };
        Recording::read(file, &loader).map(|recording| recording.samples)
    }

    /// Returns the recording with another duration and start in its edit.
    fn with_edit(duration: u32, media_time: i32) -> Vec<u8> {
        let mut file = RECORDING.to_vec();
        let at = file.windows(4).position(|name| name == b"elst").unwrap() + 12;
        file[at..at + 4].copy_from_slice(&duration.to_be_bytes());
        file[at + 4..at + 8].copy_from_slice(&media_time.to_be_bytes());
        file
    }

    #[test]
    fn edit_hides_samples_in_front_and_packets_behind() {
        let all = read(&with_edit(u32::MAX >> 1, 0)).unwrap();
        assert_eq!(all % 1_024, 0);
        assert_eq!(read(&with_edit(u32::MAX >> 1, 1_025)), Ok(all - 1_025));
        // A tenth of a second: 2,205 ticks, so three packets begin before its end.
        assert_eq!(read(&with_edit(100, 0)), Ok(3 * 1_024));
        assert_eq!(read(&with_edit(100, 1_000)), Ok(4 * 1_024 - 1_000));
    }

    #[test]
    fn other_edits_are_refused() {
        assert_eq!(read(&with_edit(0, 0)), Err(LengthError::EditList));
        assert_eq!(read(&with_edit(100, -1)), Err(LengthError::EditList));
        assert_eq!(read(&with_edit(100, i32::MAX)), Err(LengthError::Empty));
    }
}
