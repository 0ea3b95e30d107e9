//! Pillow's arithmetic for single pixels.

/// An RGB triplet.
pub(super) type Rgb = [u8; RGB];

/// The bytes of a packed RGB pixel.
pub(super) const RGB: usize = 3;
/// The bytes of a packed RGBA pixel.
pub(super) const RGBA: usize = 4;

/// Returns `a · b / 255`, rounded as Pillow's `MULDIV255`.
fn scale(a: u8, b: u8) -> u8 {
    div_255(u16::from(a) * u16::from(b))
}

/// Returns `value / 255` for `value ≤ 255²`, rounded to nearest.
///
/// 16 bits are enough, so that vector registers hold twice as many pixels as with 32.
fn div_255(value: u16) -> u8 {
    let value = value + 128;
    ((value + (value >> 8)) >> 8) as u8
}

/// Blends a channel onto white by its alpha.
pub(super) fn on_white(value: u8, alpha: u8) -> u8 {
    div_255(255 * u16::from(255 - alpha) + u16::from(value) * u16::from(alpha))
}

/// Blends a pixel onto white by its alpha.
pub(super) fn rgb_on_white(rgb: Rgb, alpha: u8) -> Rgb {
    rgb.map(|value| on_white(value, alpha))
}

/// The number of pixels that are blended at a time. They stay in registers and the first-level
/// cache.
const BLOCK_PIXELS: usize = 64;

/// Blends RGBA pixels onto white by their alpha, as [`rgb_on_white`] does, with one word per pixel.
pub(super) fn row_on_white(rgba: &[u8], rgb: &mut [u8]) {
    let mut flat = [0; BLOCK_PIXELS];
    for (stored, out) in rgba.chunks(RGBA * BLOCK_PIXELS).zip(rgb.chunks_mut(RGB * BLOCK_PIXELS)) {
        let (stored, _) = stored.as_chunks::<RGBA>();
        let mut opaque = u32::MAX;
        for (flat, pixel) in flat.iter_mut().zip(stored) {
            *flat = u32::from_le_bytes(*pixel);
            opaque &= *flat;
        }
        // Most blocks of most images are opaque and need no blending.
        if opaque >> 24 != 255 {
            for pixel in &mut flat {
                let alpha = *pixel >> 24;
                let flattened = |value: u32| {
                    let value = (value & 255) * alpha + 255 * (255 - alpha) + 128;
                    (value + (value >> 8)) >> 8
                };
                *pixel =
                    flattened(*pixel) | flattened(*pixel >> 8) << 8 | flattened(*pixel >> 16) << 16;
            }
        }
        pack(&flat[..stored.len()], out);
    }
}

/// Writes the low three bytes of every word.
fn pack(pixels: &[u32], rgb: &mut [u8]) {
    // Four words of pixels pack into three words of output.
    let (fours, rest) = pixels.as_chunks::<4>();
    let (twelves, rgb_rest) = rgb.as_chunks_mut::<{ 4 * RGB }>();
    for (four, out) in fours.iter().zip(twelves) {
        let [a, b, c, d] = four.map(|pixel| pixel & 0xff_ffff);
        let words = [a | b << 24, b >> 8 | c << 16, c >> 16 | d << 8];
        for (out, word) in out.chunks_exact_mut(4).zip(words) {
            out.copy_from_slice(&word.to_le_bytes());
        }
    }
    for (out, pixel) in rgb_rest.chunks_exact_mut(RGB).zip(rest) {
        out.copy_from_slice(&pixel.to_le_bytes()[..RGB]);
    }
}

/// Converts CMYK to RGB, as Pillow does.
pub(super) fn cmyk_to_rgb([c, m, y, k]: [u8; 4]) -> Rgb {
    let light = 255 - k;
    [c, m, y].map(|ink| light - scale(ink, light))
}

/// A lookup table from byte values to colours: a palette, or greys.
pub(super) type Table = [Rgb; 256];

/// Returns the table that maps every value to its grey.
pub(super) fn grey_table() -> Table {
    std::array::from_fn(|value| [value as u8; 3])
}

/// Returns the table of a palette, whose entries of `entry` bytes are converted by `read`.
///
/// Indices past the end of the palette are black. Returns `None` for more than 256 entries.
pub(super) fn palette_table(
    palette: &[u8],
    entry: usize,
    read: impl Fn(&[u8]) -> Rgb,
) -> Option<Table> {
    let mut table = [[0; 3]; 256];
    let entries = palette.chunks_exact(entry);
    if entries.len() > table.len() {
        return None;
    }
    for (colour, entry) in table.iter_mut().zip(entries) {
        *colour = read(entry);
    }
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blending_is_exact_at_extreme_values() {
        for value in 0..=255 {
            assert_eq!(on_white(value, 255), value);
            assert_eq!(on_white(value, 0), 255);
            assert_eq!(scale(value, 255), value);
            assert_eq!(scale(value, 0), 0);
        }
        assert_eq!(cmyk_to_rgb([0, 0, 0, 0]), [255; 3]);
        assert_eq!(cmyk_to_rgb([0, 255, 0, 0]), [255, 0, 255]);
        assert_eq!(cmyk_to_rgb([9, 9, 9, 255]), [0; 3]);
    }

    #[test]
    fn row_blending_equals_pixel_blending() {
        for pixels in [1, 2, 3, 4, 5, 63, 64, 65, 300] {
            for opaque in [true, false] {
                let alpha = |index: usize| if opaque { 255 } else { (index * 37) as u8 };
                let rgba: Vec<u8> = (0..pixels)
                    .flat_map(|index| {
                        [index as u8, (7 * index) as u8, 255 - index as u8, alpha(index)]
                    })
                    .collect();
                let mut rgb = vec![7; RGB * pixels];
                row_on_white(&rgba, &mut rgb);
                let expected: Vec<u8> = rgba
                    .chunks(4)
                    .flat_map(|pixel| rgb_on_white([pixel[0], pixel[1], pixel[2]], pixel[3]))
                    .collect();
                assert_eq!(rgb, expected, "{pixels}");
            }
        }
    }

    #[test]
    fn row_blending_is_exact_for_every_alpha() {
        for value in 0..=255 {
            let rgba: Vec<u8> =
                (0..=255).flat_map(|alpha| [value, 255 - value, value / 2, alpha]).collect();
            let mut rgb = vec![0; RGB * 256];
            row_on_white(&rgba, &mut rgb);
            for (alpha, pixel) in (0..=255).zip(rgb.chunks(RGB)) {
                assert_eq!(pixel, rgb_on_white([value, 255 - value, value / 2], alpha));
            }
        }
    }

    #[test]
    fn div_255_rounds_to_nearest() {
        for value in 0..=255 * 255 {
            assert_eq!(u32::from(div_255(value)), (u32::from(value) + 127) / 255);
        }
    }
}
