//! EXIF orientations: flips and quarter turns of packed RGB.

/// Applies orientation 1 to 8; returns the new width, height and pixels.
pub(super) fn apply(orientation: u8, width: u32, height: u32, pixels: Vec<u8>) -> (u32, u32, Vec<u8>) {
    let (w, h) = (width as usize, height as usize);
    // Where the pixel at (x, y) of the upright image is stored.
    let stored: fn(usize, usize, usize, usize) -> (usize, usize) = match orientation {
        2 => |x, y, w, _| (w - 1 - x, y),
        3 => |x, y, w, h| (w - 1 - x, h - 1 - y),
        4 => |x, y, _, h| (x, h - 1 - y),
        5 => |x, y, _, _| (y, x),
        6 => |x, y, _, h| (y, h - 1 - x),
        7 => |x, y, w, h| (w - 1 - y, h - 1 - x),
        8 => |x, y, w, _| (w - 1 - y, x),
        _ => return (width, height, pixels),
    };
    let (out_width, out_height) = if orientation >= 5 { (height, width) } else { (width, height) };
    let mut upright = Vec::with_capacity(pixels.len());
    for y in 0..out_height as usize {
        for x in 0..out_width as usize {
            let (column, row) = stored(x, y, w, h);
            let at = 3 * (row * w + column);
            upright.extend_from_slice(&pixels[at..at + 3]);
        }
    }
    (out_width, out_height, upright)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 3x2 image of the "colours" a to f, and what it is upright.
    fn upright(orientation: u8) -> (u32, u32, String) {
        let pixels = "abcdef".bytes().flat_map(|colour| [colour; 3]).collect();
        let (width, height, pixels) = apply(orientation, 3, 2, pixels);
        (width, height, pixels.chunks(3).map(|pixel| char::from(pixel[0])).collect())
    }

    #[test]
    fn each_orientation_moves_pixels_as_exif_says() {
        let expected = [
            (3, 2, "abcdef"),
            (3, 2, "cbafed"),
            (3, 2, "fedcba"),
            (3, 2, "defabc"),
            (2, 3, "adbecf"),
            (2, 3, "daebfc"),
            (2, 3, "fcebda"),
            (2, 3, "cfbead"),
        ];
        for (orientation, (width, height, pixels)) in (1..=8).zip(expected) {
            assert_eq!(upright(orientation), (width, height, pixels.to_owned()));
        }
    }
}
