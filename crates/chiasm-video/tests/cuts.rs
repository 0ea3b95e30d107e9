//! The structure of cuts. `real_opencv` decodes them.

use std::collections::BTreeSet;

use chiasm_video::{Cut, Piece, VideoIndex};

use crate::clips::{Clip, clips};

/// Returns sets of wanted frames: single ones, evenly spread ones, and all.
pub(crate) fn wanted_sets(frames: u64) -> Vec<Vec<u64>> {
    let spread = |count: u64| -> Vec<u64> {
        let last = frames - 1;
        let numbers = (0..count).map(|number| number * last / (count - 1).max(1));
        numbers.collect::<BTreeSet<_>>().into_iter().collect()
    };
    let mut sets = vec![
        vec![0],
        vec![frames - 1],
        vec![frames / 2],
        spread(3),
        spread(8),
        spread(21),
        (0..frames).collect(),
    ];
    // The frame before and behind the middle of each third: often leading pictures.
    sets.push((0..frames).filter(|frame| frame % 11 == 10).chain([frames - 1]).collect());
    sets
}

/// Returns the cuts of a clip: of all sets in one part, and of some in three.
pub(crate) fn cuts(index: &VideoIndex, file: &[u8]) -> Vec<(Vec<u64>, Cut)> {
    let frames = index.properties().visible_frames.min(index.properties().frames);
    let mut cuts = Vec::new();
    for wanted in wanted_sets(frames) {
        let Ok(cut) = index.cut(file, &wanted) else { continue };
        cuts.push((wanted.clone(), cut));
        if wanted.len() > 3 {
            let cut = index.cut_into(file, &wanted, 3).unwrap();
            cuts.push((wanted, cut));
        }
    }
    cuts
}

#[test]
fn any_number_of_parts_is_accepted() {
    for Clip { name, file, .. } in clips() {
        let Ok(index) = VideoIndex::read(&file) else { continue };
        let Ok(cut) = index.cut_into(&file, &[0], 1) else { continue };
        assert_eq!(index.cut_into(&file, &[0], usize::MAX), Ok(cut), "{name}");
        let last = index.properties().visible_frames - 1;
        assert!(index.cut_into(&file, &[0, last], usize::MAX).unwrap().parts.len() <= 2);
    }
}

#[test]
fn each_wanted_frame_has_one_position() {
    let mut count = 0;
    for Clip { name, file, .. } in clips() {
        let Ok(index) = VideoIndex::read(&file) else { continue };
        for (wanted, cut) in cuts(&index, &file) {
            count += 1;
            let frames: Vec<u64> =
                cut.parts.iter().flat_map(|part| &part.frames).map(|frame| frame.frame).collect();
            let sorted: BTreeSet<u64> = frames.iter().copied().collect();
            assert_eq!(frames.len(), sorted.len(), "{name}");
            assert_eq!(sorted, wanted.into_iter().collect::<BTreeSet<_>>(), "{name}");
            for part in &cut.parts {
                assert!(part.frames.iter().all(|frame| frame.position < part.samples), "{name}");
            }
        }
    }
    assert!(count > 500, "{count} cuts");
}

#[test]
fn part_is_an_mp4_of_its_length() {
    for Clip { name, file, .. } in clips() {
        let Ok(index) = VideoIndex::read(&file) else { continue };
        for (_, cut) in cuts(&index, &file) {
            for part in &cut.parts {
                let bytes = part.to_vec(&file);
                assert_eq!(bytes.len(), part.len(), "{name}");
                let small = VideoIndex::read(&bytes).unwrap_or_else(|error| {
                    panic!("{name}: {error}");
                });
                assert_eq!(small.properties().samples, u64::from(part.samples), "{name}");
                assert_eq!(small.properties().width, index.properties().width, "{name}");
                assert_eq!(small.properties().rotation, index.properties().rotation, "{name}");
            }
        }
    }
}

#[test]
fn one_frame_costs_less_than_the_whole_file() {
    let Clip { file, .. } = clips().into_iter().find(|clip| clip.name == "h264.mp4").unwrap();
    let index = VideoIndex::read(&file).unwrap();
    let cut = index.cut(&file, &[31]).unwrap();
    assert!(
        cut.decode_cost() <= index.decode_cost() / 20,
        "{} of {}",
        cut.decode_cost(),
        index.decode_cost()
    );
}

#[test]
fn recovery_point_begins_a_file_of_its_own() {
    let clip = clips().into_iter().find(|clip| clip.name == "h264_open_gop.mp4").unwrap();
    let index = VideoIndex::read(&clip.file).unwrap();
    let cut = index.cut(&clip.file, &[0, 59]).unwrap();
    assert_eq!(cut.parts.len(), 2);
    let all: Vec<u64> = (0..60).collect();
    assert_eq!(index.cut(&clip.file, &all).unwrap().parts.len(), 1);
}

#[test]
fn samples_are_copied_from_the_file_in_few_pieces() {
    let Clip { file, .. } = clips().into_iter().find(|clip| clip.name == "h264.mp4").unwrap();
    let index = VideoIndex::read(&file).unwrap();
    let all: Vec<u64> = (0..60).collect();
    let cut = index.cut(&file, &all).unwrap();
    assert!(matches!(&cut.parts[0].pieces[..], [Piece::Bytes(_), Piece::File(_)]));
}
