//! Run-length encoded bitmaps of four and eight bits per pixel.

use super::corrupt;
use crate::MediaError;
use crate::image::container::bmp::{BmpHeader, Pixels, Rows};
use crate::reader::Reader;

/// Decodes the run lengths to one byte per pixel, in stored row order, into the empty `pixels`.
///
/// An image that ends early is an error, and one that runs over its rows is not, as in Pillow.
pub(super) fn unpack(
    bytes: &[u8],
    header: &BmpHeader<'_>,
    pixels: &mut Vec<u8>,
) -> Result<(), MediaError> {
    if !matches!(header.pixels, Pixels::BlackWhite | Pixels::Grey | Pixels::Indexed(_)) {
        return Err(corrupt("run lengths for pixels without a palette"));
    }
    let nibbles = header.rows == Rows::Rle4;
    let width = header.size.0 as usize;
    let total = width * header.size.1 as usize;
    let mut reader = Reader::at(bytes, header.data_start);
    // `pixels` grows as data is read, so that a small file cannot claim much memory.
    let mut x = 0;
    while pixels.len() < total {
        let (Some(count), Some(value)) = (reader.byte(), reader.byte()) else {
            break;
        };
        match (count, value) {
            (0, 0) => {
                pixels.resize(pixels.len().next_multiple_of(width), 0);
                x = 0;
            }
            (0, 1) => break,
            (0, 2) => {
                let Some([right, up]) = reader.array() else {
                    break;
                };
                let skipped = usize::from(right) + usize::from(up) * width;
                pixels.resize(total.min(pixels.len() + skipped), 0);
                x = pixels.len() % width;
            }
            (0, literal) => {
                let count = usize::from(literal).min(total - pixels.len());
                let stored = if nibbles { count.div_ceil(2) } else { count };
                let values = reader.up_to(stored);
                if nibbles {
                    let indices = values.iter().flat_map(|&pair| [pair >> 4, pair & 15]);
                    pixels.extend(indices.take(count));
                } else {
                    pixels.extend_from_slice(values);
                }
                if values.len() < stored || pixels.len() == total {
                    break;
                }
                x += usize::from(literal);
                // Literals are padded to whole 16-bit words.
                if !reader.position().is_multiple_of(2) {
                    reader.skip(1);
                }
            }
            (count, value) => {
                let count = usize::from(count).min(width.saturating_sub(x));
                let pair = if nibbles { [value >> 4, value & 15] } else { [value; 2] };
                pixels.extend(pair.into_iter().cycle().take(count));
                x += count;
            }
        }
    }
    if pixels.len() < total {
        return Err(corrupt("the image data ends too early"));
    }
    Ok(())
}
