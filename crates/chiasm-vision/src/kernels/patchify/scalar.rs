//! The reference implementation of cutting patches, with and without normalisation.

use super::PatchGrid;
use crate::kernels::ChannelTable;

/// Copies the channel values of each patch to its row.
pub(crate) fn copy(pixels: &[u8], grid: &PatchGrid, out: &mut [u8]) {
    patchify(pixels, grid, out, |_, channel| [channel]);
}

/// Writes the normalised elements of each patch, looked up in `table`, to its row.
pub(crate) fn map<const N: usize>(
    pixels: &[u8],
    grid: &PatchGrid,
    table: &ChannelTable<N>,
    out: &mut [u8],
) {
    patchify(pixels, grid, out, |channel, value| table[channel][usize::from(value)]);
}

/// Writes `encode(channel, value)` for each channel value of each patch.
fn patchify<const N: usize>(
    pixels: &[u8],
    grid: &PatchGrid,
    out: &mut [u8],
    encode: impl Fn(usize, u8) -> [u8; N],
) {
    let patch = grid.patch;
    let image_row = grid.image_row();
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
