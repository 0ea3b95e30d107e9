//! EXIF orientation: flips and quarter turns of packed RGB.

use crate::image::decode::pixel::RGB;

/// The side in pixels of the tiles of a quarter turn. The rows that a tile reads stay in the cache.
const TILE_SIDE: usize = 32;

/// Writes the upright image for orientations 2 to 8; any other orientation is copied.
///
/// `width` and `height` are those of `stored`. `upright` has as many bytes as `stored`.
pub(super) fn apply(
    orientation: u8,
    width: usize,
    height: usize,
    stored: &[u8],
    upright: &mut [u8],
) {
    // The closures map a row, or column and row, of the upright image to the stored one.
    match orientation {
        2 => copy_rows(width, stored, upright, |y| y, true),
        3 => copy_rows(width, stored, upright, |y| height - 1 - y, true),
        4 => copy_rows(width, stored, upright, |y| height - 1 - y, false),
        5 => transpose(width, height, stored, upright, |x, y| (y, x)),
        6 => transpose(width, height, stored, upright, |x, y| (y, height - 1 - x)),
        7 => transpose(width, height, stored, upright, |x, y| (width - 1 - y, height - 1 - x)),
        8 => transpose(width, height, stored, upright, |x, y| (width - 1 - y, x)),
        _ => upright.copy_from_slice(stored),
    }
}

/// Copies the stored row `source_row(y)`, or its mirror image, to each row `y`.
fn copy_rows(
    width: usize,
    stored: &[u8],
    upright: &mut [u8],
    source_row: impl Fn(usize) -> usize,
    mirrored: bool,
) {
    for (y, row) in upright.chunks_exact_mut(RGB * width).enumerate() {
        let source = &stored[RGB * width * source_row(y)..][..RGB * width];
        if mirrored {
            for (pixel, source) in row.chunks_exact_mut(RGB).zip(source.rchunks_exact(RGB)) {
                pixel.copy_from_slice(source);
            }
        } else {
            row.copy_from_slice(source);
        }
    }
}

/// Copies the pixel stored at column and row `source(x, y)` to each pixel (x, y). The upright image
/// is `height` pixels wide.
fn transpose(
    width: usize,
    height: usize,
    stored: &[u8],
    upright: &mut [u8],
    source: impl Fn(usize, usize) -> (usize, usize),
) {
    for top in (0..width).step_by(TILE_SIDE) {
        for left in (0..height).step_by(TILE_SIDE) {
            let right = (left + TILE_SIDE).min(height);
            for y in top..(top + TILE_SIDE).min(width) {
                let row = &mut upright[RGB * (y * height + left)..RGB * (y * height + right)];
                for (x, pixel) in (left..right).zip(row.chunks_exact_mut(RGB)) {
                    let (column, line) = source(x, y);
                    pixel.copy_from_slice(&stored[RGB * (line * width + column)..][..RGB]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies an orientation to a 3x2 image of the "colours" a to f.
    fn upright(orientation: u8) -> String {
        let stored: Vec<u8> = "abcdef".bytes().flat_map(|colour| [colour; 3]).collect();
        let mut upright = vec![0; stored.len()];
        apply(orientation, 3, 2, &stored, &mut upright);
        upright.chunks(3).map(|pixel| char::from(pixel[0])).collect()
    }

    #[test]
    fn each_orientation_moves_pixels_as_specified() {
        let expected =
            ["abcdef", "cbafed", "fedcba", "defabc", "adbecf", "daebfc", "fcebda", "cfbead"];
        for (orientation, pixels) in (1..=8).zip(expected) {
            assert_eq!(upright(orientation), pixels);
        }
    }

    #[test]
    fn inverse_orientation_restores_image_of_several_tiles() {
        let width = 2 * TILE_SIDE + 5;
        let height = TILE_SIDE + 3;
        let stored: Vec<u8> =
            (0..RGB * width * height).map(|index| (index * 31 % 251) as u8).collect();
        let mut turned = vec![0; stored.len()];
        let mut restored = vec![0; stored.len()];
        for (orientation, inverse) in [(2, 2), (3, 3), (4, 4), (5, 5), (6, 8), (7, 7), (8, 6)] {
            apply(orientation, width, height, &stored, &mut turned);
            let (width, height) = if orientation >= 5 { (height, width) } else { (width, height) };
            apply(inverse, width, height, &turned, &mut restored);
            assert!(restored == stored, "{orientation}");
        }
    }
}
