//! The estimated decode time, from the header.
//!
//! The rates are rounded up from `cargo run --release -p chiasm-media --example decode` on an AMD
//! Zen 5; a typical core is within a factor of two. They separate cheap from expensive files before
//! any decoding.

use std::time::Duration;

use crate::image::container::Header;
use crate::image::container::bmp::{Pixels, Rows};

/// Estimates the maximum time for one core to decode a file of `bytes` bytes with this header.
pub(super) fn decode_time(header: &Header<'_>, bytes: usize) -> Duration {
    let (width, height) = header.stored_size();
    let bytes = bytes as f64;
    let pixels = f64::from(width) * f64::from(height);
    let nanos = match header {
        Header::Jpeg(header) => {
            // The cost of entropy decoding per byte, and of the transform and colours per pixel.
            // With several scans, each may pass over all coefficients. A pass takes 0.15 ns per
            // pixel if nearly all coefficients are zero, as in a bomb, and 1 ns at worst. With
            // arithmetic coding it takes up to 3 ns, because each coefficient may take a decision
            // that costs no bits.
            let (code, pass) = if header.arithmetic { (80.0, 3.0) } else { (10.0, 0.5) };
            let passes = if header.single_scan { 0.0 } else { f64::from(header.scans) };
            bytes * code + pixels * (3.0 + pass * passes)
        }
        Header::Png(header) => {
            // Inflating and filters cost time mostly by the size of the output. Interlaced rows are
            // assembled pixel by pixel. A byte of input costs some 2 ns, and up to 60 ns if the
            // stream consists of tables for codes that hardly occur.
            let inflated = pixels * header.layout.bits() as f64 / 8.0;
            bytes * 10.0 + inflated * 3.0 + pixels * if header.interlaced { 6.0 } else { 2.0 }
        }
        Header::WebP(_) => bytes * 10.0 + pixels * 12.0,
        Header::Gif(_) => bytes * 8.0 + pixels * 4.0,
        Header::Bmp(header) => {
            // Pixels of three bytes are copied, others are unpacked. Runs may fill no pixel at all.
            let (byte, unpack) = if matches!(header.rows, Rows::Rle4 | Rows::Rle8) {
                (2.0, 2.0)
            } else {
                (0.2, 0.0)
            };
            let convert = if header.pixels == Pixels::Bgr { 0.5 } else { 2.5 };
            bytes * byte + pixels * (unpack + convert)
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

    /// Estimates are compared with times measured on an AMD EPYC.
    #[test]
    fn estimates_match_measured_worst_cases() {
        let plain = Rows::Plain { stride: 0 };
        let arithmetic = Header::Jpeg(jpeg_header(4000, 11, true));
        for (file, estimate, measured_ms) in [
            ("one bit per pixel", bmp(13_000, Pixels::Indexed(1), plain, 21_164_062), 361),
            ("two bytes per pixel", bmp(4000, Pixels::Bgr565, plain, 32_000_066), 48),
            ("runs of two pixels", bmp(3950, Pixels::Indexed(4), Rows::Rle4, 15_607_918), 66),
            ("jumps", bmp(13_000, Pixels::Indexed(8), Rows::Rle8, 1_320), 415),
            ("only ends of rows", bmp(100, Pixels::Indexed(8), Rows::Rle8, 30_001_478), 57),
            ("decisions that need no bits", decode_time(&arithmetic, 656_702), 501),
        ] {
            let measured = Duration::from_millis(measured_ms);
            assert!(
                measured < 2 * estimate && estimate < 3 * measured,
                "{file}: estimated {estimate:?}, measured {measured:?}"
            );
        }
    }

    #[test]
    fn estimate_grows_with_scans() {
        let baseline = jpeg(4000, 1);
        let progressive = jpeg(4000, 10);
        let bomb = jpeg(4000, 480);
        assert!(baseline < progressive && progressive < 10 * baseline);
        assert!(bomb > 20 * progressive);
        assert!(jpeg(8000, 10) > 3 * progressive);
    }

    #[test]
    fn estimate_of_maximum_size_does_not_overflow() {
        assert!(jpeg(u32::MAX, u32::MAX) > jpeg(65_535, 100));
    }
}
