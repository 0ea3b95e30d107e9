//! EXIF orientations: flips and quarter turns of packed RGB.

use crate::image::decode::pixel::RGB;

/// Pixels per side of the squares that a quarter turn is made in, so that the rows it reads from
/// stay in the cache.
const TILE: usize = 32;

/// Writes the upright image for orientation 2 to 8; any other copies. `width` and `height` are
/// those of `stored`, and `upright` has as many bytes.
pub(super) fn apply(
    orientation: u8,
    width: usize,
    height: usize,
    stored: &[u8],
    upright: &mut [u8],
) {
    // Where the pixel at (x, y) of the upright image is stored.
    match orientation {
        2 => each_row(width, stored, upright, |y| y, true),
        3 => each_row(width, stored, upright, |y| height - 1 - y, true),
        4 => each_row(width, stored, upright, |y| height - 1 - y, false),
        5 => turn(width, height, stored, upright, |x, y| (y, x)),
        6 => turn(width, height, stored, upright, |x, y| (y, height - 1 - x)),
        7 => turn(width, height, stored, upright, |x, y| (width - 1 - y, height - 1 - x)),
        8 => turn(width, height, stored, upright, |x, y| (width - 1 - y, x)),
        _ => upright.copy_from_slice(stored),
    }
}

/// Row `y` is the stored row `from(y)`, or its mirror image.
fn each_row(
    width: usize,
    stored: &[u8],
    upright: &mut [u8],
    from: impl Fn(usize) -> usize,
    mirrored: bool,
) {
    for (y, row) in upright.chunks_exact_mut(RGB * width).enumerate() {
        let source = &stored[RGB * width * from(y)..][..RGB * width];
        if mirrored {
            for (pixel, source) in row.chunks_exact_mut(RGB).zip(source.rchunks_exact(RGB)) {
                pixel.copy_from_slice(source);
            }
        } else {
            row.copy_from_slice(source);
        }
    }
}

/// Pixel (x, y) is the one that is stored at column and row `from(x, y)`. The upright image is
/// `height` wide.
fn turn(
    width: usize,
    height: usize,
    stored: &[u8],
    upright: &mut [u8],
    from: impl Fn(usize, usize) -> (usize, usize),
) {
    for top in (0..width).step_by(TILE) {
        for left in (0..height).step_by(TILE) {
            let right = (left + TILE).min(height);
            for y in top..(top + TILE).min(width) {
                let row = &mut upright[RGB * (y * height + left)..RGB * (y * height + right)];
                for (x, pixel) in (left..right).zip(row.chunks_exact_mut(RGB)) {
                    let (column, line) = from(x, y);
                    pixel.copy_from_slice(&stored[RGB * (line * width + column)..][..RGB]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 3x2 image of the "colours" a to f, upright.
    fn upright(orientation: u8) -> String {
        let stored: Vec<u8> = "abcdef".bytes().flat_map(|colour| [colour; 3]).collect();
        let mut upright = vec![0; stored.len()];
        apply(orientation, 3, 2, &stored, &mut upright);
        upright.chunks(3).map(|pixel| char::from(pixel[0])).collect()
    }

    #[test]
    fn each_orientation_moves_pixels_as_exif_says() {
        let expected =
            ["abcdef", "cbafed", "fedcba", "defabc", "adbecf", "daebfc", "fcebda", "cfbead"];
        for (orientation, pixels) in (1..=8).zip(expected) {
            assert_eq!(upright(orientation), pixels);
        }
    }

    #[test]
    fn images_of_several_tiles_come_back_by_the_inverse_turn() {
        let (width, height) = (2 * TILE + 5, TILE + 3);
        let stored: Vec<u8> =
            (0..RGB * width * height).map(|index| (index * 31 % 251) as u8).collect();
        let (mut turned, mut back) = (vec![0; stored.len()], vec![0; stored.len()]);
        for (orientation, inverse) in [(2, 2), (3, 3), (4, 4), (5, 5), (6, 8), (7, 7), (8, 6)] {
            apply(orientation, width, height, &stored, &mut turned);
            let (width, height) = if orientation >= 5 { (height, width) } else { (width, height) };
            apply(inverse, width, height, &turned, &mut back);
            assert!(back == stored, "{orientation}");
        }
    }
}
