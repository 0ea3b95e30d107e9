//! Cutting patches with NEON: its loads take 16 or 8 pixels apart into channels.

use std::arch::aarch64::*;

use super::{PatchGrid, scalar};

/// Pixels per step of patches that have so many per line.
const PIXELS: usize = 16;
/// Pixels per step of smaller patches, and their smallest side.
const FEWER_PIXELS: usize = 8;

/// See [`scalar::copy`].
#[target_feature(enable = "neon")]
pub(crate) fn copy(pixels: &[u8], grid: &PatchGrid, out: &mut [u8]) {
    let (patch, image_row, frames) = (grid.patch, grid.image_row(), grid.temporal);
    if patch < FEWER_PIXELS {
        return scalar::copy(pixels, grid, out);
    }
    let plane = patch * patch;
    for (origin, row) in grid.origins().zip(out.chunks_exact_mut(grid.row_len())) {
        assert!(
            origin + (patch - 1) * image_row + 3 * patch <= pixels.len()
                && row.len() == 3 * frames * plane
        );
        for y in 0..patch {
            // SAFETY: the patch's line y, and line y of the first frame's first plane.
            let (line, at) = unsafe {
                (pixels.as_ptr().add(origin + y * image_row), row.as_mut_ptr().add(y * patch))
            };
            let step = if patch >= PIXELS { PIXELS } else { FEWER_PIXELS };
            for x in (0..patch).step_by(step) {
                // The last step may repeat some pixels.
                let x = x.min(patch - step);
                // SAFETY: x + step <= patch, so that all is within the line and its copies in each
                // plane.
                unsafe {
                    if step == PIXELS {
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
