//! The reference for cutting tiles, with and without a table to the output's element type.

use super::TileGrid;
use crate::kernels::ChannelTable;

/// Pixels as they are. `lines` are rows of the image from row `y` on, all of one row of tiles,
/// whose elements are `out`.
pub(crate) fn copy(lines: &[u8], y: usize, grid: &TileGrid, out: &mut [u8]) {
    cut(lines, y, grid, out, |_, channel| [channel]);
}

/// Writes what [`copy`] writes, each value through its channel's table.
pub(crate) fn map<const N: usize>(
    lines: &[u8],
    y: usize,
    grid: &TileGrid,
    table: &ChannelTable<N>,
    out: &mut [u8],
) {
    cut(lines, y, grid, out, |channel, value| table[channel][usize::from(value)]);
}

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
