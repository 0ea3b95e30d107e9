//! The first frame of a GIF, on the screen.

mod lzw;

use crate::container::gif::GifHeader;
use crate::decode::buffer;
use crate::decode::pixel::{grey_table, palette_table};
use crate::{ImageFormat, MediaError};

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Gif, reason }
}

/// Decodes to RGB rows.
pub(super) fn decode(header: &GifHeader<'_>) -> Result<Vec<u8>, MediaError> {
    let indices = screen(header)?;
    let mut table = match header.palette {
        Some(colours) => palette_table(colours, 3, |rgb| [rgb[0], rgb[1], rgb[2]])
            .ok_or(corrupt("the palette has more than 256 entries"))?,
        None => grey_table(),
    };
    if let Some(index) = header.transparent {
        table[usize::from(index)] = [255; 3];
    }
    let mut rgb = buffer(ImageFormat::Gif, header.size, 3)?;
    for (pixel, &index) in rgb.chunks_exact_mut(3).zip(&indices) {
        pixel.copy_from_slice(&table[usize::from(index)]);
    }
    Ok(rgb)
}

/// The palette index of every pixel of the screen. Outside the frame it is the transparent one, or 0.
fn screen(header: &GifHeader<'_>) -> Result<Vec<u8>, MediaError> {
    let (frame, width) = (header.frame, header.size.0 as usize);
    let mut screen = buffer(ImageFormat::Gif, header.size, 1)?;
    screen.fill(header.transparent.unwrap_or(0));
    let mut indices = lzw::Indices::new(header.data, header.code_bits)?;
    for y in row_order(frame.height as usize, header.interlaced) {
        let start = (frame.y as usize + y) * width + frame.x as usize;
        indices.fill(&mut screen[start..start + frame.width as usize])?;
    }
    Ok(screen)
}

/// The order in which rows are stored.
fn row_order(height: usize, interlaced: bool) -> impl Iterator<Item = usize> {
    let passes: &[(usize, usize)] = if interlaced { &[(0, 8), (4, 8), (2, 4), (1, 2)] } else { &[(0, 1)] };
    passes.iter().flat_map(move |&(first, step)| (first..height).step_by(step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interlaced_rows_come_in_four_passes() {
        assert_eq!(row_order(10, true).collect::<Vec<_>>(), [0, 8, 4, 2, 6, 1, 3, 5, 7, 9]);
        assert_eq!(row_order(1, true).collect::<Vec<_>>(), [0]);
    }
}
