//! GIF decoding: the first frame, placed on the logical screen.
//!
//! The crate `gif` 0.14 does not compose frames on the screen, and it differs from Pillow in other
//! ways. It refuses files without any palette (grey), and files with stray bytes between blocks. It
//! applies a grey local palette, where Pillow applies the global palette to the indices. For its
//! differences in the frame's data see [`lzw`].

mod lzw;

use crate::image::container::gif::GifHeader;
use crate::image::decode::memory::{ReusableBuffer, Scratch, image_bytes, rgb_bytes};
use crate::image::decode::pixel::{RGB, Rgb, Table, grey_table, palette_table};
use crate::{ImageFormat, MediaError};

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Gif, reason }
}

/// Decodes the first frame to RGB rows.
pub(super) fn decode(
    header: &GifHeader<'_>,
    scratch: &mut Scratch,
    rgb: &mut ReusableBuffer,
) -> Result<(), MediaError> {
    let frame = header.frame;
    let width = header.size.0 as usize;
    let frame_width = frame.width as usize;
    let frame_height = frame.height as usize;
    let table = colours(header)?;
    let count = image_bytes(ImageFormat::Gif, (frame.width, frame.height), 1)?;
    let indices =
        scratch.samples.prepare(ImageFormat::Gif, count.saturating_add(lzw::SLACK_BYTES))?;
    lzw::unpack(header.data, header.code_bits, indices)?;
    let rgb = rgb.prepare(ImageFormat::Gif, rgb_bytes(ImageFormat::Gif, header.size)?)?;
    if (frame.width, frame.height) != header.size {
        // Pixels outside the frame have the transparent index, or 0.
        let around = table[usize::from(header.transparent.unwrap_or(0))];
        rgb.as_chunks_mut().0.fill(around);
    }
    let rows = indices.chunks_exact(frame_width).zip(row_order(frame_height, header.interlaced));
    for (row, y) in rows {
        let start = (frame.y as usize + y) * width + frame.x as usize;
        let (pixels, _) = rgb[RGB * start..RGB * (start + frame_width)].as_chunks_mut::<RGB>();
        for (pixel, &index) in pixels.iter_mut().zip(row) {
            *pixel = table[usize::from(index)];
        }
    }
    Ok(())
}

/// Returns the colour of every index.
fn colours(header: &GifHeader<'_>) -> Result<Table, MediaError> {
    let read = |rgb: &[u8]| -> Rgb { [rgb[0], rgb[1], rgb[2]] };
    let mut table = match header.palette {
        Some(colours) => palette_table(colours, RGB, read)
            .ok_or(corrupt("the palette has more than 256 entries"))?,
        None => grey_table(),
    };
    if let Some(index) = header.transparent {
        table[usize::from(index)] = [255; RGB];
    }
    Ok(table)
}

/// Returns the rows in the order in which they are stored.
fn row_order(height: usize, interlaced: bool) -> impl Iterator<Item = usize> {
    let passes: &[(usize, usize)] =
        if interlaced { &[(0, 8), (4, 8), (2, 4), (1, 2)] } else { &[(0, 1)] };
    passes.iter().flat_map(move |&(first, step)| (first..height).step_by(step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interlaced_rows_are_stored_in_four_passes() {
        assert_eq!(row_order(10, true).collect::<Vec<_>>(), [0, 8, 4, 2, 6, 1, 3, 5, 7, 9]);
        assert_eq!(row_order(1, true).collect::<Vec<_>>(), [0]);
    }
}
