//! The sound tracks of clips.

use chiasm_video::{SoundError, SoundTrack};

fn read(name: &str) -> Result<SoundTrack, SoundError> {
    let path = format!("{}/tests/clips/{name}", env!("CARGO_MANIFEST_DIR"));
    SoundTrack::read(&std::fs::read(path).unwrap())
}

#[test]
fn packets_up_to_the_end_of_the_edit_are_read() {
    let whole = read("h264_audio.mp4").unwrap();
    assert_eq!((whole.timescale, whole.packet_ticks), (16_000, 1_024));
    // Two seconds.
    assert!(whole.packets * 1_024 - whole.hidden_ticks >= 32_000, "{whole:?}");
    assert!(!whole.descriptor.is_empty());
    let edited = read("h264_edit_audio.mp4").unwrap();
    assert!(edited.packets < whole.packets || edited.hidden_ticks > whole.hidden_ticks);
}

#[test]
fn files_without_plain_sound_are_refused() {
    assert_eq!(read("h264.mp4"), Err(SoundError::Codec));
    assert_eq!(read("h264_fragments_audio.mp4"), Err(SoundError::Fragments));
    assert_eq!(read("h264_audio.mkv"), Err(SoundError::Truncated));
}
