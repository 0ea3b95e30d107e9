//! Tests of broken EXIF blocks in every container that may hold one: the image is read, with the
//! orientation that Pillow applies.

use chiasm_media::{EncodedMedia, MediaHeader, MediaLimits, RgbImage, decode};
use libjpeg_turbo_rs as jpeg;

const WIDTH: u32 = 21;
const HEIGHT: u32 = 13;

const BYTE: u16 = 1;
const ASCII: u16 = 2;
const SHORT: u16 = 3;
const LONG: u16 = 4;
const RATIONAL: u16 = 5;
const UNDEFINED: u16 = 7;
const SIGNED_LONG: u16 = 9;
const FLOAT: u16 = 11;
const UNKNOWN: u16 = 99;

const IMAGE_WIDTH: u16 = 256;
const ORIENTATION: u16 = 274;

/// The default offset of the first directory.
const DIRECTORY: u32 = 8;

/// An entry of a directory: tag, type, count, and the value or its offset.
type Entry = (u16, u16, u32, [u8; 4]);

fn orientation(kind: u16, count: u32, value: u32) -> Entry {
    (ORIENTATION, kind, count, value.to_le_bytes())
}

/// A quarter turn, as cameras write it.
const SIX: Entry = (ORIENTATION, SHORT, 1, [6, 0, 0, 0]);

/// Returns a little-endian TIFF structure whose directory announces `count` entries.
fn tiff_block(
    magic: &[u8; 4],
    directory: u32,
    count: u16,
    entries: &[Entry],
    after: &[u8],
) -> Vec<u8> {
    let mut block = [&magic[..], &directory.to_le_bytes(), &count.to_le_bytes()].concat();
    for (tag, kind, count, value) in entries {
        block.extend(
            tag.to_le_bytes()
                .into_iter()
                .chain(kind.to_le_bytes())
                .chain(count.to_le_bytes())
                .chain(*value),
        );
    }
    block.extend([0; 4]);
    block.extend(after);
    block
}

fn block(entries: &[Entry]) -> Vec<u8> {
    tiff_block(b"II*\0", DIRECTORY, entries.len() as u16, entries, &[])
}

/// Returns a directory with one entry whose value follows it.
fn block_with_value(entry: (u16, u16, u32), value: &[u8]) -> Vec<u8> {
    const VALUE_OFFSET: u32 = DIRECTORY + 2 + 12 + 4;
    let (tag, kind, count) = entry;
    tiff_block(b"II*\0", DIRECTORY, 1, &[(tag, kind, count, VALUE_OFFSET.to_le_bytes())], value)
}

/// Returns named EXIF blocks, each with the orientation that Pillow 13's `ImageOps.exif_transpose`
/// applies.
///
/// Measured with each block in a JPEG, a PNG and a WebP file. The orientation is 1 also where
/// Pillow raises, because vLLM 0.33 then uses the image as stored.
fn cases() -> Vec<(&'static str, Vec<u8>, u8)> {
    let cut = |bytes: usize| block(&[SIX])[..bytes].to_vec();
    let big_endian = |directory: &[u8]| [b"MM\0*\0\0\0\x08", directory].concat();
    vec![
        ("sound", block(&[SIX]), 6),
        ("big-endian", big_endian(b"\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"), 6),
        // The block.
        ("empty", Vec::new(), 1),
        ("only a byte order", b"II".to_vec(), 1),
        ("only a header", cut(8), 1),
        ("no byte order", tiff_block(b"XX*\0", DIRECTORY, 1, &[SIX], &[]), 1),
        ("two byte orders", tiff_block(b"IM*\0", DIRECTORY, 1, &[SIX], &[]), 1),
        ("the other byte order", tiff_block(b"MM\0*", DIRECTORY, 1, &[SIX], &[]), 1),
        ("no magic number", tiff_block(b"II\0\0", DIRECTORY, 1, &[SIX], &[]), 1),
        ("a swapped magic number", tiff_block(b"II\0*", DIRECTORY, 1, &[SIX], &[]), 6),
        ("BigTIFF", tiff_block(b"II+\0", DIRECTORY, 1, &[SIX], &[]), 1),
        // The directory.
        ("cut off in the count", cut(9), 1),
        ("cut off in the entry", cut(21), 1),
        ("cut off after the entry", cut(22), 6),
        ("more entries than there are", tiff_block(b"II*\0", DIRECTORY, 32, &[SIX], &[]), 6),
        (
            "the maximum number of entries",
            tiff_block(b"II*\0", DIRECTORY, u16::MAX, &[SIX], &[]),
            6,
        ),
        ("fewer entries than there are", tiff_block(b"II*\0", DIRECTORY, 0, &[SIX], &[]), 1),
        ("a directory in the header", tiff_block(b"II*\0", 0, 1, &[SIX], &[]), 1),
        ("a directory past the end", tiff_block(b"II*\0", 4000, 1, &[SIX], &[]), 1),
        ("a directory at the maximum offset", tiff_block(b"II*\0", u32::MAX, 1, &[SIX], &[]), 1),
        // The value.
        ("zero", block(&[orientation(SHORT, 1, 0)]), 1),
        ("nine", block(&[orientation(SHORT, 1, 9)]), 1),
        ("the maximum", block(&[orientation(SHORT, 1, 0xffff)]), 1),
        ("a long", block(&[orientation(LONG, 1, 6)]), 6),
        ("a signed long", block(&[orientation(SIGNED_LONG, 1, 6)]), 6),
        ("a float", block(&[orientation(FLOAT, 1, 6f32.to_bits())]), 6),
        ("a fractional float", block(&[orientation(FLOAT, 1, 6.5f32.to_bits())]), 1),
        ("a rational", block_with_value((ORIENTATION, RATIONAL, 1), b"\x0c\0\0\0\x02\0\0\0"), 6),
        ("a rational of zeros", block_with_value((ORIENTATION, RATIONAL, 1), &[0; 8]), 1),
        ("a byte", block(&[orientation(BYTE, 1, 6)]), 1),
        ("a text", block(&[orientation(ASCII, 1, b'6'.into())]), 1),
        ("undefined", block(&[orientation(UNDEFINED, 1, 6)]), 1),
        ("an unknown type", block(&[orientation(UNKNOWN, 1, 6)]), 1),
        ("no value", block(&[orientation(SHORT, 0, 6)]), 1),
        ("two values", block(&[orientation(SHORT, 2, 0x0003_0006)]), 6),
        (
            "three values after the directory",
            block_with_value((ORIENTATION, SHORT, 3), b"\x06\0\x03\0\x03\0"),
            6,
        ),
        ("three values cut off", block_with_value((ORIENTATION, SHORT, 3), b"\x06\0\x03\0"), 1),
        ("values past the end", block(&[orientation(SHORT, 3, 4000)]), 1),
        ("more values than fit", block(&[orientation(SHORT, u32::MAX, 8)]), 1),
        // Other entries.
        ("twice", block(&[SIX, orientation(SHORT, 1, 3)]), 6),
        ("twice, first without a value", block(&[orientation(SHORT, 0, 3), SIX]), 6),
        ("twice, first of an unknown type", block(&[orientation(UNKNOWN, 1, 3), SIX]), 6),
        ("twice, first a text", block(&[orientation(ASCII, 1, 3), SIX]), 1),
        (
            "after a truncated value",
            block(&[(IMAGE_WIDTH, SHORT, 9, 4000u32.to_le_bytes()), SIX]),
            1,
        ),
        (
            "after a value that is too long",
            block(&[(IMAGE_WIDTH, SHORT, 9999, [8, 0, 0, 0]), SIX]),
            6,
        ),
        (
            "after a truncated second value",
            block(&[
                (IMAGE_WIDTH, SHORT, 1, [9, 0, 0, 0]),
                (IMAGE_WIDTH, SHORT, 9, 4000u32.to_le_bytes()),
                SIX,
            ]),
            6,
        ),
        (
            "after second values that are too long together",
            block(&[
                (IMAGE_WIDTH, SHORT, 1, [9, 0, 0, 0]),
                (IMAGE_WIDTH, SHORT, 20, [0; 4]),
                (IMAGE_WIDTH, SHORT, 20, [0; 4]),
                (257, SHORT, 3, [0; 4]),
                SIX,
            ]),
            6,
        ),
    ]
}

/// Returns the pixels of a picture that differs in each orientation.
fn picture() -> Vec<u8> {
    (0..HEIGHT)
        .flat_map(|y| (0..WIDTH).flat_map(move |x| [12 * x as u8, 19 * y as u8, (x * y) as u8]))
        .collect()
}

fn jpeg(exif: &[u8]) -> Vec<u8> {
    let file =
        jpeg::Encoder::new(&picture(), WIDTH as usize, HEIGHT as usize, jpeg::PixelFormat::Rgb)
            .encode()
            .unwrap();
    let segment = [b"Exif\0\0", exif].concat();
    let length = (segment.len() as u16 + 2).to_be_bytes();
    [&file[..2], b"\xff\xe1", &length, &segment, &file[2..]].concat()
}

fn png(exif: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, WIDTH, HEIGHT);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().unwrap();
    writer.write_chunk(png::chunk::eXIf, exif).unwrap();
    writer.write_image_data(&picture()).unwrap();
    writer.finish().unwrap();
    file
}

fn webp(exif: &[u8]) -> Vec<u8> {
    const EXIF: u8 = 8;
    let mut file = Vec::new();
    image_webp::WebPEncoder::new(&mut file)
        .encode(&picture(), WIDTH, HEIGHT, image_webp::ColorType::Rgb8)
        .unwrap();
    let chunk = |kind: &[u8; 4], content: &[u8]| {
        let length = (content.len() as u32).to_le_bytes();
        [kind, &length[..], content, &[0][..content.len() % 2]].concat()
    };
    let header = [EXIF, 0, 0, 0, WIDTH as u8 - 1, 0, 0, HEIGHT as u8 - 1, 0, 0];
    let body = [b"WEBP", &chunk(b"VP8X", &header)[..], &file[12..], &chunk(b"EXIF", exif)].concat();
    chunk(b"RIFF", &body)
}

/// Returns the orientation and the upright pixels of a file.
fn open(file: Vec<u8>) -> (u8, RgbImage) {
    let image = EncodedMedia::from_bytes(file.into(), &MediaLimits::default()).unwrap();
    let MediaHeader::Image(header) = image.header else { panic!("{image:?} is not an image") };
    (header.orientation, decode(&image).unwrap())
}

#[test]
fn broken_exif_is_read_as_pillow_reads_it() {
    for (name, exif, expected) in cases() {
        for (container, file) in [("JPEG", jpeg(&exif)), ("PNG", png(&exif)), ("WebP", webp(&exif))]
        {
            let (orientation, pixels) = open(file);
            assert_eq!(orientation, expected, "{name} in a {container}");
            let upright = if expected < 5 { (WIDTH, HEIGHT) } else { (HEIGHT, WIDTH) };
            assert_eq!((pixels.width, pixels.height), upright, "{name} in a {container}");
        }
    }
}

#[test]
fn exif_without_orientation_changes_no_pixel() {
    for (name, exif, _) in cases().iter().filter(|(_, _, expected)| *expected == 1) {
        for make in [jpeg, png, webp] {
            assert_eq!(open(make(exif)), open(make(&block(&[]))), "{name}");
        }
    }
}
