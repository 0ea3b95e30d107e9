//! GIF headers: the blocks up to the first frame's data.

use crate::reader::Reader;
use crate::{ImageFormat, MediaError};

/// The logical screen and the first frame of a GIF.
pub(crate) struct GifHeader<'a> {
    /// The size of the logical screen, enlarged to hold the first frame, as in Pillow.
    pub(crate) size: (u32, u32),
    pub(crate) frame: Frame,
    /// The palette as RGB triplets. `None` means grey: the palette is missing, or maps every index
    /// to the grey of its value.
    pub(crate) palette: Option<&'a [u8]>,
    /// The transparent index, if any.
    pub(crate) transparent: Option<u8>,
    pub(crate) interlaced: bool,
    /// The LZW minimum code size.
    pub(crate) code_bits: u8,
    /// The file from the sub-blocks of the frame's LZW data on.
    pub(crate) data: &'a [u8],
}

/// The rectangle of a frame on the screen, in pixels.
#[derive(Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
}

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Gif, reason }
}

/// A colour table.
#[derive(Clone, Copy)]
enum Table<'a> {
    Missing,
    /// Maps every index to the grey of its value.
    Grey,
    Colours(&'a [u8]),
}

/// Reads the blocks up to the first frame's data.
pub(crate) fn read(bytes: &[u8]) -> Result<GifHeader<'_>, MediaError> {
    let cut_off = || corrupt("it ends before the first frame");
    let mut reader = Reader::at(bytes, 6);
    let screen: [u8; 7] = reader.array().ok_or_else(cut_off)?;
    let mut size = (u32::from(u16_at(&screen, 0)), u32::from(u16_at(&screen, 2)));
    let global = match read_table(&mut reader, screen[4])? {
        Table::Colours(colours) => Some(colours),
        Table::Grey | Table::Missing => None,
    };
    let mut transparent = None;
    loop {
        // Pillow skips unknown bytes between blocks.
        match reader.byte().ok_or_else(cut_off)? {
            b';' => return Err(cut_off()),
            b'!' => {
                let label = reader.byte().ok_or_else(cut_off)?;
                let first = sub_block(&mut reader);
                if label == 0xf9
                    && let Some(control) = first
                {
                    let flags = *control.first().ok_or_else(cut_off)?;
                    if flags & 1 != 0 {
                        transparent = Some(*control.get(3).ok_or_else(cut_off)?);
                    }
                    if control.len() < 3 {
                        return Err(corrupt("a graphic control extension is cut off"));
                    }
                }
                // A comment that starts with an empty sub-block ends there. Other extensions
                // continue.
                if label != 0xfe || first.is_some() {
                    while sub_block(&mut reader).is_some() {}
                }
            }
            b',' => break,
            _ => {}
        }
    }
    let descriptor: [u8; 9] = reader.array().ok_or_else(cut_off)?;
    let frame = Frame {
        x: u16_at(&descriptor, 0).into(),
        y: u16_at(&descriptor, 2).into(),
        width: u16_at(&descriptor, 4).into(),
        height: u16_at(&descriptor, 6).into(),
    };
    if frame.width == 0 || frame.height == 0 {
        return Err(corrupt("the first frame is empty"));
    }
    size = (size.0.max(frame.x + frame.width), size.1.max(frame.y + frame.height));
    let flags = descriptor[8];
    let palette = match read_table(&mut reader, flags)? {
        Table::Colours(colours) => Some(colours),
        Table::Missing => global,
        // Pillow reads a frame with a grey table as grey, then applies the global palette to it.
        Table::Grey => global,
    };
    let code_bits = reader.byte().ok_or_else(cut_off)?;
    Ok(GifHeader {
        size,
        frame,
        palette,
        transparent,
        interlaced: flags & 0x40 != 0,
        code_bits,
        data: bytes.get(reader.position()..).unwrap_or_default(),
    })
}

/// Reads the colour table that `flags` announce.
fn read_table<'a>(reader: &mut Reader<'a>, flags: u8) -> Result<Table<'a>, MediaError> {
    if flags & 0x80 == 0 {
        return Ok(Table::Missing);
    }
    let colours = reader.up_to(6 << (flags & 7));
    if !colours.len().is_multiple_of(3) {
        return Err(corrupt("a colour table is cut off"));
    }
    let grey = colours
        .chunks_exact(3)
        .enumerate()
        .all(|(index, rgb)| rgb.iter().all(|&value| usize::from(value) == index));
    Ok(if grey { Table::Grey } else { Table::Colours(colours) })
}

/// Reads the next sub-block's content, as far as available. Returns `None` for the empty sub-block
/// that ends a chain.
fn sub_block<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    match reader.byte() {
        None | Some(0) => None,
        Some(length) => Some(reader.up_to(length.into())),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}
