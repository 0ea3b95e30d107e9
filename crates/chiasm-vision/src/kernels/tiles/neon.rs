//! Cutting tiles with NEON, whose loads split 16 pixels into channels.

use std::arch::aarch64::*;

use super::{TileGrid, scalar};

/// The number of pixels per step.
const STEP_PIXELS: usize = 16;

/// Vector version of [`scalar::copy`].
#[target_feature(enable = "neon")]
pub(crate) fn copy(lines: &[u8], y: usize, grid: &TileGrid, out: &mut [u8]) {
    let width = grid.width;
    let plane = grid.width * grid.height;
    if width < STEP_PIXELS {
        return scalar::copy(lines, y, grid, out);
    }
    for (index, line) in lines.chunks_exact(3 * grid.image_width()).enumerate() {
        for (start, pixels) in grid.line_starts(y + index).zip(line.chunks_exact(3 * width)) {
            assert!(out.len() >= start + 2 * plane + width);
            for x in (0..width).step_by(STEP_PIXELS) {
                // The last step may repeat some pixels.
                let x = x.min(width - STEP_PIXELS);
                // SAFETY: x + 16 <= width, the number of pixels; the assertion above.
                unsafe {
                    let uint8x16x3_t(red, green, blue) = vld3q_u8(pixels.as_ptr().add(3 * x));
                    let at = out.as_mut_ptr().add(start + x);
                    vst1q_u8(at, red);
                    vst1q_u8(at.add(plane), green);
                    vst1q_u8(at.add(2 * plane), blue);
                }
            }
        }
    }
}
