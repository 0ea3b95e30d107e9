//! Cutting patches with NEON, whose loads split 16 or 8 pixels into channels.

use std::arch::aarch64::*;

use super::{PatchGrid, scalar};

/// The pixels per step, for patches with at least this side.
const STEP_PIXELS: usize = 16;
/// The pixels per step for smaller patches, and their minimum side.
const SMALL_STEP_PIXELS: usize = 8;

/// Vector version of [`scalar::copy`].
#[target_feature(enable = "neon")]
pub(crate) fn copy(pixels: &[u8], grid: &PatchGrid, out: &mut [u8]) {
    let patch = grid.patch;
    let image_row = grid.image_row();
    let frames = grid.temporal;
    if patch < SMALL_STEP_PIXELS {
        return scalar::copy(pixels, grid, out);
    }
    let plane = patch * patch;
    for (origin, row) in grid.origins().zip(out.chunks_exact_mut(grid.row_len())) {
        assert!(
            origin + (patch - 1) * image_row + 3 * patch <= pixels.len()
                && row.len() == 3 * frames * plane
        );
        for y in 0..patch {
            // SAFETY: both pointers are in bounds (asserted above): line y of the patch, and line y
            // of the first plane of the first frame.
            let line = unsafe { pixels.as_ptr().add(origin + y * image_row) };
            // SAFETY: as above.
            let at = unsafe { row.as_mut_ptr().add(y * patch) };
            let step = if patch >= STEP_PIXELS { STEP_PIXELS } else { SMALL_STEP_PIXELS };
            for x in (0..patch).step_by(step) {
                // The last step may repeat some pixels.
                let x = x.min(patch - step);
                // SAFETY: x + step <= patch, so all accesses are within the line and its copies in
                // each plane.
                unsafe {
                    if step == STEP_PIXELS {
                        let uint8x16x3_t(red, green, blue) = vld3q_u8(line.add(3 * x));
                        for (channel, bytes) in [red, green, blue].into_iter().enumerate() {
                            for frame in 0..frames {
                                vst1q_u8(at.add((channel * frames + frame) * plane + x), bytes);
                            }
                        }
                    } else {
                        let uint8x8x3_t(red, green, blue) = vld3_u8(line.add(3 * x));
                        for (channel, bytes) in [red, green, blue].into_iter().enumerate() {
                            for frame in 0..frames {
                                vst1_u8(at.add((channel * frames + frame) * plane + x), bytes);
                            }
                        }
                    }
                }
            }
        }
    }
}
