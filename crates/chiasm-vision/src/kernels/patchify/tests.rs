//! Checks the order of rows and elements against an explicit index computation.

use super::{PatchGrid, scalar};

#[test]
fn patch_elements_follow_the_documented_order() {
    let grid = PatchGrid { height: 4, width: 6, patch: 3, merge: 2, temporal: 2 };
    let width = grid.width * grid.patch;
    let height = grid.height * grid.patch;
    let mut pixels = vec![0; 3 * width * height];
    for (index, byte) in pixels.iter_mut().enumerate() {
        *byte = (index * 31 % 251) as u8;
    }
    let mut out = vec![0; grid.rows() * grid.row_len()];
    scalar::copy(&pixels, &grid, &mut out);

    let mut elements = out.into_iter();
    for group_y in 0..grid.height / grid.merge {
        for group_x in 0..grid.width / grid.merge {
            for patch in 0..grid.merge * grid.merge {
                let top = (group_y * grid.merge + patch / grid.merge) * grid.patch;
                let left = (group_x * grid.merge + patch % grid.merge) * grid.patch;
                for channel in 0..3 {
                    for _frame in 0..grid.temporal {
                        for pixel in 0..grid.patch * grid.patch {
                            let y = top + pixel / grid.patch;
                            let x = left + pixel % grid.patch;
                            assert_eq!(
                                elements.next(),
                                Some(pixels[3 * (y * width + x) + channel])
                            );
                        }
                    }
                }
            }
        }
    }
    assert_eq!(elements.next(), None);
}

#[test]
fn patch_table_is_applied_per_channel() {
    let grid = PatchGrid { height: 2, width: 2, patch: 2, merge: 1, temporal: 1 };
    let pixels: Vec<u8> = (0..48).collect();
    let table = [0_u8, 1, 2].map(|channel| std::array::from_fn(|value| [channel, value as u8]));
    let mut raw = vec![0; 48];
    scalar::copy(&pixels, &grid, &mut raw);
    let mut mapped = vec![0; 96];
    scalar::map(&pixels, &grid, &table, &mut mapped);
    for (pair, value) in mapped.chunks_exact(2).zip(raw) {
        assert_eq!(pair, [value % 3, value]);
    }
}
