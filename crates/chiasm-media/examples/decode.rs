//! Times this crate's decoders against others, in alternation, and checks that their pixels agree:
//! `cargo run --release -p chiasm-media --example decode [-- file …]`.
//!
//! Prints a Markdown table of medians over all rounds in one thread, and of their ratios. On a
//! shared machine only the ratios are meaningful.
//!
//! `fresh` is [`decode`] and `reused` is [`with_pixels`]. `inflate` is the part of `reused` spent
//! in inflate, for PNG. `peer` is another crate that yields the same pixels, `copy` is one copy of
//! the pixels, and `estimate` is the decode time from [`ImageHeader`]. Without files, the example
//! generates pictures with detail at every scale, as in photographs.

use std::error::Error;
use std::hint::black_box;
use std::io::Cursor;
use std::time::Instant;

use chiasm_media::{
    EncodedMedia, ImageFormat, ImageHeader, ImageLimits, MediaHeader, MediaLimits, RgbPixels,
    decode, with_pixels,
};
use flate2::{Decompress, FlushDecompress};
use libjpeg_turbo_rs as jpeg;

const ROUNDS: usize = 21;
const SIZES: [(&str, usize, usize); 2] = [("1080p", 1920, 1080), ("4K", 3840, 2160)];

type Failure = Box<dyn Error>;
/// A timed piece of work, which returns pixels if it decodes any.
type Work<'a> = Box<dyn FnMut() -> Result<Vec<u8>, Failure> + 'a>;

fn main() -> Result<(), Failure> {
    println!(
        "| image | KB | fresh ms | reused ms | inflate | peer | fresh / reused | peer / reused | \
         reused / copy | estimate / reused |"
    );
    println!("|{}", "---|".repeat(10));
    let paths: Vec<_> = std::env::args().skip(1).collect();
    for path in &paths {
        measure(path, std::fs::read(path)?)?;
    }
    if paths.is_empty() {
        for (name, width, height) in SIZES {
            measure_formats(name, width, height)?;
        }
    }
    Ok(())
}

/// Measures one file and prints a row of the table.
fn measure(name: &str, bytes: Vec<u8>) -> Result<(), Failure> {
    let size = bytes.len() >> 10;
    let limits =
        ImageLimits { max_bytes: u64::MAX, max_pixels: u64::MAX, ..ImageLimits::default() };
    let image = EncodedMedia::from_bytes(
        bytes.into(),
        &MediaLimits { image: limits, ..MediaLimits::default() },
    )?;
    let MediaHeader::Image(header) = image.header else {
        return Err(format!("{name} is not an image").into());
    };
    let expected = decode(&image)?.pixels;
    let mut target = expected.clone();
    let mut works: Vec<(&str, Work<'_>)> = vec![
        ("fresh", Box::new(|| Ok(decode(&image)?.pixels))),
        ("reused", Box::new(|| Ok(with_pixels(&image, |pixels| discard(black_box(pixels)))?))),
        (
            "copy",
            Box::new(|| {
                black_box(&mut target).copy_from_slice(black_box(&expected));
                Ok(Vec::new())
            }),
        ),
    ];
    works.extend(inflate(&image, header).map(|work| ("inflate", work)));
    works.extend(peer(&image, header));
    let mut times = vec![Vec::with_capacity(ROUNDS); works.len()];
    for _ in 0..ROUNDS {
        for ((side, work), times) in works.iter_mut().zip(&mut times) {
            let start = Instant::now();
            let pixels = work()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            if !pixels.is_empty() && pixels != expected {
                return Err(format!("{name}: {side} decodes to other pixels").into());
            }
        }
    }
    let median = |matches: &dyn Fn(&str) -> bool| {
        let index = works.iter().position(|(side, _)| matches(side))?;
        let mut times = times[index].clone();
        times.sort_by(f64::total_cmp);
        Some(times[times.len() / 2])
    };
    let median_of = |side: &'static str| median(&|name| name == side);
    let fresh = median_of("fresh").ok_or("nothing was timed")?;
    let reused = median_of("reused").ok_or("nothing was timed")?;
    let copy = median_of("copy").ok_or("nothing was timed")?;
    let inflate = median_of("inflate")
        .map_or("–".to_owned(), |time| format!("{:.0} %", 100.0 * time / reused));
    let peer = median(&|name| !["fresh", "reused", "copy", "inflate"].contains(&name));
    let (peer_name, peer_ratio) = match peer.zip(works.last()) {
        Some((time, (name, _))) => (*name, format!("{:.2}", time / reused)),
        None => ("–", "–".to_owned()),
    };
    println!(
        "| {name} | {size} | {fresh:.2} | {reused:.2} | {inflate} | {peer_name} | {:.2} | \
         {peer_ratio} | {:.1} | {:.2} |",
        fresh / reused,
        reused / copy,
        header.decode_time.as_secs_f64() * 1e3 / reused
    );
    Ok(())
}

fn discard(_: RgbPixels<'_>) -> Vec<u8> {
    Vec::new()
}

/// Returns the work of inflating a PNG; `None` for other formats.
fn inflate(image: &EncodedMedia, header: ImageHeader) -> Option<Work<'_>> {
    if header.format != ImageFormat::Png {
        return None;
    }
    let stream = zlib_stream(&image.bytes);
    // One filter byte per row, and at most 16 bits in each of four channels.
    let mut rows = vec![0; header.height as usize * (1 + 8 * header.width as usize)];
    Some(Box::new(move || {
        Decompress::new(true).decompress(&stream, &mut rows, FlushDecompress::Finish)?;
        black_box(&rows);
        Ok(Vec::new())
    }))
}

/// Returns the concatenated contents of all image data chunks.
fn zlib_stream(png: &[u8]) -> Vec<u8> {
    let mut rest = &png[8..];
    let mut stream = Vec::new();
    while let [l3, l2, l1, l0, kind @ ..] = rest
        && let Some(after) = kind.get(4 + u32::from_be_bytes([*l3, *l2, *l1, *l0]) as usize..)
    {
        if let Some(content) = kind[..kind.len() - after.len()].strip_prefix(b"IDAT") {
            stream.extend_from_slice(content);
        }
        rest = after.get(4..).unwrap_or_default();
    }
    stream
}

/// Returns another crate's decoder to compare with. Returns `None` for files whose pixels it would
/// not convert to RGB.
fn peer(image: &EncodedMedia, header: ImageHeader) -> Option<(&'static str, Work<'_>)> {
    let bytes = &image.bytes[..];
    let length = 3 * header.width as usize * header.height as usize;
    match header.format {
        ImageFormat::Png => {
            let reader = png::Decoder::new(Cursor::new(bytes)).read_info().ok()?;
            if reader.output_color_type() != (png::ColorType::Rgb, png::BitDepth::Eight) {
                return None;
            }
            Some((
                "png",
                Box::new(move || {
                    let mut pixels = vec![0; length];
                    png::Decoder::new(Cursor::new(bytes)).read_info()?.next_frame(&mut pixels)?;
                    Ok(pixels)
                }),
            ))
        }
        ImageFormat::WebP => {
            if image_webp::WebPDecoder::new(Cursor::new(bytes)).ok()?.has_alpha() {
                return None;
            }
            Some((
                "image-webp",
                Box::new(move || {
                    let mut pixels = vec![0; length];
                    image_webp::WebPDecoder::new(Cursor::new(bytes))?.read_image(&mut pixels)?;
                    Ok(pixels)
                }),
            ))
        }
        ImageFormat::Gif => Some((
            "gif, indices only",
            Box::new(move || {
                let mut reader = gif::DecodeOptions::new().read_info(bytes)?;
                black_box(reader.read_next_frame()?);
                Ok(Vec::new())
            }),
        )),
        _ => None,
    }
}

/// Encodes one picture in every format, and measures each file.
fn measure_formats(name: &str, width: usize, height: usize) -> Result<(), Failure> {
    let rgb = picture(width, height);
    let w = width as u32;
    let h = height as u32;
    for progressive in [false, true] {
        let encoder = jpeg::Encoder::new(&rgb, width, height, jpeg::PixelFormat::Rgb)
            .quality(90)
            .subsampling(jpeg::Subsampling::S420)
            .progressive(progressive);
        let kind = if progressive { "progressive" } else { "baseline" };
        measure(&format!("{name} JPEG q90 4:2:0 {kind}"), encoder.encode()?)?;
    }
    let flat = jpeg::Encoder::new(&vec![128; rgb.len()], width, height, jpeg::PixelFormat::Rgb)
        .progressive(true)
        .encode()?;
    measure(&format!("{name} JPEG of 100 scans"), with_scans(&flat, 100)?)?;
    measure(&format!("{name} PNG RGB"), png_file(w, h, png::ColorType::Rgb, &rgb)?)?;
    let glass = |pixel: &[u8]| [pixel[0], pixel[1], pixel[2], pixel[1].saturating_mul(2)];
    let rgba: Vec<u8> = rgb.chunks_exact(3).flat_map(glass).collect();
    measure(&format!("{name} PNG RGBA"), png_file(w, h, png::ColorType::Rgba, &rgba)?)?;
    let mut lossless = Vec::new();
    image_webp::WebPEncoder::new(&mut lossless).encode(&rgb, w, h, image_webp::ColorType::Rgb8)?;
    measure(&format!("{name} WebP lossless"), lossless)?;
    let lossy = |layout: webpx::Encoder<'_>| layout.quality(90.0).encode(webpx::Unstoppable);
    measure(
        &format!("{name} WebP q90"),
        lossy(webpx::Encoder::new_rgb(&rgb, w, h)).map_err(|error| error.to_string())?,
    )?;
    measure(&format!("{name} GIF"), gif_file(width as u16, height as u16, &rgb)?)?;
    measure(&format!("{name} BMP"), bmp_file(w, h, &rgb))
}

/// Returns a progressive JPEG file with its last scan repeated until it has `scans` scans.
fn with_scans(file: &[u8], scans: usize) -> Result<Vec<u8>, Failure> {
    let starts: Vec<_> =
        (0..file.len() - 1).filter(|&at| file[at..].starts_with(&[0xff, 0xda])).collect();
    let (head, scan) = file[..file.len() - 2].split_at(*starts.last().ok_or("no scan")?);
    Ok([head, &scan.repeat(scans + 1 - starts.len()), &[0xff, 0xd9]].concat())
}

fn png_file(
    width: u32,
    height: u32,
    colour: png::ColorType,
    samples: &[u8],
) -> Result<Vec<u8>, Failure> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(colour);
    encoder.write_header()?.write_image_data(samples)?;
    Ok(file)
}

/// Returns a GIF whose indices are the green channel.
fn gif_file(width: u16, height: u16, rgb: &[u8]) -> Result<Vec<u8>, Failure> {
    let palette: Vec<u8> =
        (0..=255u8).flat_map(|index| [index, index.wrapping_mul(7), 255 - index]).collect();
    let indices: Vec<u8> = rgb.chunks_exact(3).map(|pixel| pixel[1]).collect();
    let mut file = Vec::new();
    let frame = gif::Frame { width, height, buffer: indices.into(), ..gif::Frame::default() };
    gif::Encoder::new(&mut file, width, height, &palette)?.write_frame(&frame)?;
    Ok(file)
}

/// Returns a bitmap of 24 bits per pixel. `width` must be a multiple of four, so that rows need no
/// padding.
fn bmp_file(width: u32, height: u32, bgr: &[u8]) -> Vec<u8> {
    let mut file = b"BM".to_vec();
    for field in [54 + bgr.len() as u32, 0, 54, 40, width, height, 24 << 16 | 1, 0, 0, 0, 0, 0, 0] {
        file.extend_from_slice(&field.to_le_bytes());
    }
    file.extend_from_slice(bgr);
    file
}

/// Returns packed RGB: noise at every scale, weaker at finer scales.
fn picture(width: usize, height: usize) -> Vec<u8> {
    let mut pixels = Vec::with_capacity(3 * width * height);
    for y in 0..height {
        for x in 0..width {
            let light = octaves(x, y, 0, 9);
            pixels.extend((1..=3).map(|channel| {
                let grain = 4.0 * lattice(x, y, 7 + channel);
                (128.0 + 1.3 * light + 0.5 * octaves(x, y, channel, 4) + grain) as u8
            }));
        }
    }
    pixels
}

fn octaves(x: usize, y: usize, seed: usize, count: i32) -> f32 {
    (0..count)
        .map(|octave| {
            smooth(x, y, 512 >> octave, 16 * seed + octave as usize) * 56.0 / 1.65f32.powi(octave)
        })
        .sum()
}

/// Returns a value from -1 to 1, interpolated bilinearly between lattice points `step` apart.
fn smooth(x: usize, y: usize, step: usize, seed: usize) -> f32 {
    let column = x / step;
    let row = y / step;
    let right = (x % step) as f32 / step as f32;
    let down = (y % step) as f32 / step as f32;
    let between =
        |row| lattice(column, row, seed) * (1.0 - right) + lattice(column + 1, row, seed) * right;
    between(row) * (1.0 - down) + between(row + 1) * down
}

/// Returns a pseudo-random value from -1 to 1.
fn lattice(column: usize, row: usize, seed: usize) -> f32 {
    let mut hash = [column, row, seed].into_iter().fold(0u32, |hash, value| {
        let mixed = (hash ^ value as u32).wrapping_mul(0x9E37_79B9);
        (mixed ^ mixed >> 15).wrapping_mul(0x85EB_CA6B)
    });
    hash ^= hash >> 13;
    hash as f32 / (1u32 << 31) as f32 - 1.0
}
