//! Pillow's arithmetic for single pixels.

/// An RGB triplet.
pub(super) type Rgb = [u8; 3];

/// `a · b / 255`, rounded as Pillow's `MULDIV255`.
fn scale(a: u8, b: u8) -> u8 {
    over_255(u32::from(a) * u32::from(b))
}

/// `value / 255` for `value ≤ 255²`, rounded to nearest.
fn over_255(value: u32) -> u8 {
    let value = value + 128;
    ((value + (value >> 8)) >> 8) as u8
}

/// A channel pasted onto white through its alpha.
pub(super) fn on_white(value: u8, alpha: u8) -> u8 {
    over_255(255 * u32::from(255 - alpha) + u32::from(value) * u32::from(alpha))
}

/// A pixel pasted onto white through its alpha.
pub(super) fn rgb_on_white(rgb: Rgb, alpha: u8) -> Rgb {
    rgb.map(|value| on_white(value, alpha))
}

/// CMYK to RGB.
pub(super) fn cmyk_to_rgb([c, m, y, k]: [u8; 4]) -> Rgb {
    let light = 255 - k;
    [c, m, y].map(|ink| light - scale(ink, light))
}

/// What every value of a byte becomes: the colours of a palette, or greys.
pub(super) type Table = [Rgb; 256];

/// Every value is the grey of that value.
pub(super) fn grey_table() -> Table {
    std::array::from_fn(|value| [value as u8; 3])
}

/// The entries of `palette`, by `read`; indices behind its end are black. `None` for more than 256 entries.
pub(super) fn palette_table(palette: &[u8], entry: usize, read: impl Fn(&[u8]) -> Rgb) -> Option<Table> {
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
    fn ends_of_the_scale_are_exact() {
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
    fn the_rounding_is_to_nearest() {
        for value in 0..=255 * 255 {
            assert_eq!(u32::from(over_255(value)), (value + 127) / 255);
        }
    }
}
