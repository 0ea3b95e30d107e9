//! Properties that hold for any bytes. The fuzz target `video` includes this file.

use chiasm_video::{CutError, Piece, VideoIndex};

/// The maximum size of the headers of a part, beside 16 bytes per sample and copied boxes.
const MAX_HEADER_BYTES: usize = 1024;

/// Reads the index of a file and cuts frames out of it. Asserts that sizes are within the limits,
/// and that a cut consists of ranges of the file. Returns `true` if there was a cut.
pub(crate) fn index_and_cut(file: &[u8], wanted: &[u64], parts: usize) -> bool {
    let Ok(index) = VideoIndex::read(file) else { return false };
    let properties = index.properties();
    assert!(properties.width >= 1 && properties.height >= 1, "{properties:?}");
    assert!(properties.fps.is_finite() && properties.fps > 0.0, "{properties:?}");
    assert!(properties.frames >= 1 && properties.visible_frames >= 1, "{properties:?}");
    assert!(properties.visible_frames <= properties.samples, "{properties:?}");
    assert!(properties.samples as usize <= file.len(), "{properties:?}");
    assert!(properties.safe_starts >= 1, "{properties:?}");
    assert!(properties.droppable_samples < properties.samples, "{properties:?}");
    let wanted: Vec<u64> = wanted.iter().map(|frame| frame % properties.visible_frames).collect();
    let cut = match index.cut_into(file, &wanted, parts) {
        Ok(cut) => cut,
        Err(error) => {
            assert_ne!(error, CutError::BeyondIndex);
            return false;
        }
    };
    assert!(!cut.parts.is_empty() && cut.parts.len() <= parts.max(wanted.len()));
    for part in &cut.parts {
        assert!(u64::from(part.samples) <= properties.samples);
        for piece in &part.pieces {
            if let Piece::File(range) = piece {
                assert!(range.start < range.end && range.end <= file.len(), "{range:?}");
            }
        }
        let most = 2 * file.len() + 16 * part.samples as usize + MAX_HEADER_BYTES;
        assert!(part.len() <= most, "{} bytes of {}", part.len(), file.len());
        assert!(part.frames.iter().all(|frame| frame.position < part.samples));
    }
    true
}
