//! How long decoding takes, by what the header tells.
//!
//! The rates are rounded up from `cargo run --release -p chiasm-media --example decode` on an AMD
//! Zen 5; a usual core is within a factor of two. They are there to tell cheap files from dear ones
//! before the work is done.

use std::time::Duration;

use crate::image::container::Header;
use crate::image::container::bmp::{Pixels, Rows};

/// About how long one core takes to decode a file of so many bytes with this header, at most.
pub(super) fn decode_time(header: &Header<'_>, bytes: usize) -> Duration {
    let (width, height) = header.stored_size();
    let (bytes, pixels) = (bytes as f64, f64::from(width) * f64::from(height));
    let nanos = match header {
        Header::Jpeg(header) => {
            // Codes; then for each pixel the transform and colours. Where there are several scans,
            // each may go over all coefficients: 0.15 ns for each pixel if nearly all are zero, as
            // in a bomb, and 1 ns at worst; 3 ns where it takes a decision that costs no bits for
            // each of them, as arithmetic coding can.
            let (code, pass) = if header.arithmetic { (80.0, 3.0) } else { (10.0, 0.5) };
            let passes = if header.single_scan { 0.0 } else { f64::from(header.scans) };
            bytes * code + pixels * (3.0 + pass * passes)
        }
        Header::Png(header) => {
            // Inflating and filters, mostly by what comes out; interlaced rows are put together
            // pixel by pixel. A byte that comes in costs some 2 ns, and up to 60 where the stream
            // is nothing but descriptions of codes that hardly occur.
            let inflated = pixels * header.layout.bits() as f64 / 8.0;
            bytes * 10.0 + inflated * 3.0 + pixels * if header.interlaced { 6.0 } else { 2.0 }
        }
        Header::WebP(_) => bytes * 10.0 + pixels * 12.0,
        Header::Gif(_) => bytes * 8.0 + pixels * 4.0,
        Header::Bmp(header) => {
            // Whole bytes of colours are moved, anything else is taken apart. Runs may fill no
            // pixel at all.
            let (byte, unpacked) = if matches!(header.rows, Rows::Rle4 | Rows::Rle8) {
                (2.0, 2.0)
            } else {
                (0.2, 0.0)
            };
            let pixel = if header.pixels == Pixels::Bgr { 0.5 } else { 2.5 };
            bytes * byte + pixels * (unpacked + pixel)
        }
    };
    Duration::try_from_secs_f64(nanos * 1e-9).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::container::bmp::BmpHeader;
    use crate::image::container::jpeg::JpegHeader;

    fn jpeg(side: u32, scans: u32) -> Duration {
        decode_time(&Header::Jpeg(jpeg_header(side, scans, false)), 1 << 20)
    }

    fn jpeg_header(side: u32, scans: u32, arithmetic: bool) -> JpegHeader {
        JpegHeader {
            size: (side, side),
            components: 3,
            orientation: 1,
            scan_start: 0,
            single_scan: scans == 1,
            scans,
            arithmetic,
            restarts: false,
        }
    }

    fn bmp(side: u32, pixels: Pixels, rows: Rows, bytes: usize) -> Duration {
        let size = (side, side);
        let header = BmpHeader {
            size,
            top_down: false,
            pixels,
            rows,
            palette: &[],
            palette_entry: 4,
            data_start: 1078,
        };
        decode_time(&Header::Bmp(header), bytes)
    }

    /// Prices are compared with what such files took on an AMD EPYC.
    #[test]
    fn what_is_made_to_take_long_is_priced_for_it() {
        let plain = Rows::Plain { stride: 0 };
        let arithmetic = Header::Jpeg(jpeg_header(4000, 11, true));
        for (file, price, took_ms) in [
            ("a bit for each pixel", bmp(13_000, Pixels::Indexed(1), plain, 21_164_062), 361),
            ("two bytes for each pixel", bmp(4000, Pixels::Bgr565, plain, 32_000_066), 48),
            ("runs of two pixels", bmp(3950, Pixels::Indexed(4), Rows::Rle4, 15_607_918), 66),
            ("jumps", bmp(13_000, Pixels::Indexed(8), Rows::Rle8, 1_320), 415),
            (
                "ends of rows and nothing else",
                bmp(100, Pixels::Indexed(8), Rows::Rle8, 30_001_478),
                57,
            ),
            ("decisions that need no bits", decode_time(&arithmetic, 656_702), 501),
        ] {
            let took = Duration::from_millis(took_ms);
            assert!(took < 2 * price && price < 3 * took, "{file}: {price:?}, {took:?}");
        }
    }

    #[test]
    fn every_scan_costs_as_every_pixel_does() {
        let [baseline, usual, bomb] = [1, 10, 480].map(|scans| jpeg(4000, scans));
        assert!(baseline < usual && usual < 10 * baseline);
        assert!(bomb > 20 * usual);
        assert!(jpeg(8000, 10) > 3 * usual);
    }

    #[test]
    fn nothing_is_too_large_to_be_priced() {
        assert!(jpeg(u32::MAX, u32::MAX) > jpeg(65_535, 100));
    }
}
