//! The reference for cutting patches, with and without a table to the output's element type.

use super::PatchGrid;
use crate::kernels::ChannelTable;

/// Pixels as they are.
pub(crate) fn copy(pixels: &[u8], grid: &PatchGrid, out: &mut [u8]) {
    patchify(pixels, grid, out, |_, channel| [channel]);
}

/// Pixels through a table.
pub(crate) fn map<const N: usize>(
    pixels: &[u8],
    grid: &PatchGrid,
    table: &ChannelTable<N>,
    out: &mut [u8],
) {
    patchify(pixels, grid, out, |channel, value| table[channel][usize::from(value)]);
}

fn patchify<const N: usize>(
    pixels: &[u8],
    grid: &PatchGrid,
    out: &mut [u8],
    encode: impl Fn(usize, u8) -> [u8; N],
) {
    let (patch, image_row) = (grid.patch, grid.image_row());
    let frame = N * patch * patch;
    for (origin, row) in grid.origins().zip(out.chunks_exact_mut(N * grid.row_len())) {
        for (channel, frames) in row.chunks_exact_mut(frame * grid.temporal).enumerate() {
            let (first, others) = frames.split_at_mut(frame);
            for (y, line) in first.chunks_exact_mut(N * patch).enumerate() {
                let start = origin + y * image_row;
                let pixels = pixels[start..start + 3 * patch].chunks_exact(3);
                for (pixel, element) in pixels.zip(line.chunks_exact_mut(N)) {
                    element.copy_from_slice(&encode(channel, pixel[channel]));
                }
            }
            for other in others.chunks_exact_mut(frame) {
                other.copy_from_slice(first);
            }
        }
    }
}
