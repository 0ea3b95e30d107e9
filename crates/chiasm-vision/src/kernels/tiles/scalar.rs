//! The reference implementation of cutting tiles, with and without normalisation.

use super::TileGrid;
use crate::kernels::ChannelTable;

/// Copies the channel values of `lines` to their tiles.
///
/// `lines` are rows of the image from row `y` on, all in one row of tiles. `out` has the elements
/// of that row of tiles.
pub(crate) fn copy(lines: &[u8], y: usize, grid: &TileGrid, out: &mut [u8]) {
    cut(lines, y, grid, out, |_, channel| [channel]);
}

/// Does the same as [`copy`] with normalised elements, which are looked up in `table`.
pub(crate) fn map<const N: usize>(
    lines: &[u8],
    y: usize,
    grid: &TileGrid,
    table: &ChannelTable<N>,
    out: &mut [u8],
) {
    cut(lines, y, grid, out, |channel, value| table[channel][usize::from(value)]);
}

/// Writes `encode(channel, value)` for each channel value of `lines`.
fn cut<const N: usize>(
    lines: &[u8],
    y: usize,
    grid: &TileGrid,
    out: &mut [u8],
    encode: impl Fn(usize, u8) -> [u8; N],
) {
    let plane = grid.width * grid.height;
    for (index, line) in lines.chunks_exact(3 * grid.image_width()).enumerate() {
        for (start, pixels) in grid.line_starts(y + index).zip(line.chunks_exact(3 * grid.width)) {
            for channel in 0..3 {
                let at = N * (start + channel * plane);
                let elements = out[at..at + N * grid.width].chunks_exact_mut(N);
                for (element, pixel) in elements.zip(pixels.chunks_exact(3)) {
                    element.copy_from_slice(&encode(channel, pixel[channel]));
                }
            }
        }
    }
}
