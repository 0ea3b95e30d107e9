//! Safe starts and droppable samples.

use chiasm_video::{CutError, IndexError, VideoIndex};

use crate::clips::{Clip, clips};

/// Clips with their numbers of safe starts and of droppable samples, by an implementation in Python
/// that was written before this crate.
const ROLES: [(&str, u64, u64); 18] = [
    ("h264.mp4", 4, 20),
    ("h264_baseline.mp4", 5, 0),
    ("h264_pyramid.mp4", 2, 42),
    ("h264_open_gop.mp4", 5, 26),
    ("h264_intra_refresh.mp4", 1, 26),
    ("h264_no_stss.mp4", 4, 20),
    ("h264_slices.mp4", 4, 20),
    ("h264_all_intra.mp4", 18, 0),
    ("h264_edit.mp4", 3, 15),
    ("h264_fragments.mp4", 4, 20),
    ("h264.mkv", 4, 20),
    ("hevc.mp4", 4, 28),
    ("hevc_open_gop.mp4", 5, 34),
    ("hevc_closed_gop.mp4", 5, 30),
    ("hevc_temporal_layers.mp4", 2, 35),
    ("hevc_hev1.mp4", 4, 35),
    ("vp8.webm", 3, 0),
    ("vp9_alt_ref.webm", 3, 0),
];

/// Clips that are not indexed, and why.
const UNINDEXED: [(&str, IndexError); 18] = [
    ("audio_only.mp4", IndexError::VideoTracks),
    ("av1.mp4", IndexError::Codec),
    ("h264.ts", IndexError::Container),
    ("h264_fragments_truncated.mp4", IndexError::Truncated),
    ("h264_interlaced.mp4", IndexError::Interlaced),
    ("h264_live.mkv", IndexError::FrameCount),
    ("h264_no_ctts.mp4", IndexError::Order),
    ("h264_no_moov.mp4", IndexError::Truncated),
    ("h264_paff_free.mp4", IndexError::Interlaced),
    ("h264_truncated.mkv", IndexError::Truncated),
    ("h264_truncated.mp4", IndexError::Truncated),
    ("h264_two_edits.mp4", IndexError::EditList),
    ("h264_zero_fps.mp4", IndexError::FrameRate),
    ("hevc_no_ctts.mp4", IndexError::Order),
    ("mjpeg.mov", IndexError::Codec),
    ("mpeg4.avi", IndexError::Container),
    ("mpeg4.mp4", IndexError::Codec),
    ("two_frames.gif", IndexError::Container),
];

fn clip(name: &str) -> Clip {
    let clip = clips().into_iter().find(|clip| clip.name == name);
    clip.unwrap_or_else(|| panic!("{name} is missing"))
}

#[test]
fn safe_starts_and_droppable_samples_are_counted() {
    for (name, safe_starts, droppable_samples) in ROLES {
        let index = VideoIndex::read(&clip(name).file).unwrap();
        let found = (index.properties().safe_starts, index.properties().droppable_samples);
        assert_eq!(found, (safe_starts, droppable_samples), "{name}");
    }
}

#[test]
fn clips_without_an_index_have_a_cause() {
    let unindexed = clips().into_iter().filter_map(|clip| {
        let error = VideoIndex::read(&clip.file).err()?;
        Some((clip.name, error))
    });
    let mut unindexed: Vec<_> = unindexed.collect();
    unindexed.sort_by(|one, other| one.0.cmp(&other.0));
    let expected = UNINDEXED.map(|(name, error)| (name.to_owned(), error));
    assert_eq!(unindexed, expected);
}

#[test]
fn more_temporal_layers_than_stated_drop_nothing() {
    let Clip { mut file, .. } = clip("hevc.mp4");
    // The first picture that no other one of its layer needs moves to the second layer.
    let mut at = file.windows(4).position(|name| name == b"mdat").unwrap() + 4;
    while file[at + 4] >> 1 >= 16 || file[at + 4] >> 1 & 1 != 0 {
        at += 4 + u32::from_be_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    }
    assert_eq!(file[at + 5], 1);
    file[at + 5] = 2;
    let index = VideoIndex::read(&file).unwrap();
    assert_eq!(index.properties().droppable_samples, 0);
}

#[test]
fn changed_parameter_set_needs_the_whole_file() {
    let Clip { file, .. } = clip("h264_in_band_changes.mp4");
    let index = VideoIndex::read(&file).unwrap();
    assert_eq!(index.cut(&file, &[0]), Err(CutError::ParameterSets));
}

#[test]
fn large_header_needs_the_whole_file() {
    // The moov of this clip is behind the samples, so they stay where they are.
    let Clip { mut file, .. } = clip("h264.mp4");
    let moov = file.windows(4).position(|name| name == b"moov").unwrap();
    let mvhd = file.windows(4).position(|name| name == b"mvhd").unwrap();
    const MORE_BYTES: u32 = 1 << 16;
    let mut end = 0;
    for name in [moov, mvhd] {
        let size = u32::from_be_bytes(file[name - 4..name].try_into().unwrap());
        end = name - 4 + size as usize;
        file[name - 4..name].copy_from_slice(&(size + MORE_BYTES).to_be_bytes());
    }
    file.splice(end..end, vec![0; MORE_BYTES as usize]);
    let index = VideoIndex::read(&file).unwrap();
    assert_eq!(index.cut(&file, &[0]), Err(CutError::Headers));
}

#[test]
fn cues_without_a_key_frame_leave_the_count_unknown() {
    let Clip { mut file, .. } = clip("h264_vfr.mkv");
    let cues = file.windows(4).rposition(|id| id == b"\x1c\x53\xbb\x6b").unwrap();
    // The last cue's time changes.
    let last = cues + file[cues..].windows(2).rposition(|id| id == b"\xb3\x82").unwrap();
    file[last + 3] ^= 1;
    assert_eq!(VideoIndex::read(&file).err(), Some(IndexError::FrameCount));
}

#[test]
fn frame_beyond_the_index_needs_the_whole_file() {
    let Clip { file, .. } = clip("h264_edit.mp4");
    let index = VideoIndex::read(&file).unwrap();
    assert_eq!(index.cut(&file, &[38]), Err(CutError::BeyondIndex));
    assert_eq!(index.cut(&file, &[]), Err(CutError::NothingWanted));
    assert_eq!(index.cut(&file[1..], &[0]), Err(CutError::OtherFile));
}
