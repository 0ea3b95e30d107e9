//! How long decoding takes, by what the header tells.
//!
//! The rates are rounded up from `cargo run --release -p chiasm-media --example decode` on an AMD Zen 5; a usual core is
//! within a factor of two. They are there to tell cheap files from dear ones before the work is done.

use std::time::Duration;

use crate::image::container::Header;

/// About how long one core takes to decode a file of so many bytes with this header, at most.
pub(super) fn decode_time(header: &Header<'_>, bytes: usize) -> Duration {
    let (width, height) = header.stored_size();
    let (bytes, pixels) = (bytes as f64, f64::from(width) * f64::from(height));
    let nanos = match header {
        Header::Jpeg(header) => {
            // Codes; then for each pixel the transform and colours. Where there are several scans, each may go over all
            // coefficients: 0.15 ns for each pixel if nearly all are zero, as in a bomb, and 1 ns at worst.
            let codes = bytes * if header.arithmetic { 60.0 } else { 10.0 };
            let passes = if header.single_scan { 0.0 } else { f64::from(header.scans) };
            codes + pixels * (3.0 + 0.5 * passes)
        }
        Header::Png(header) => {
            // Inflating and filters, by what comes out; interlaced rows are put together pixel by pixel.
            let inflated = pixels * header.layout.bits() as f64 / 8.0;
            bytes * 2.0 + inflated * 4.0 + pixels * if header.interlaced { 6.0 } else { 2.0 }
        }
        Header::WebP(_) => bytes * 10.0 + pixels * 12.0,
        Header::Gif(_) => bytes * 8.0 + pixels * 4.0,
        Header::Bmp(_) => bytes * 0.2 + pixels * 0.5,
    };
    Duration::try_from_secs_f64(nanos * 1e-9).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::container::jpeg::JpegHeader;

    fn jpeg(side: u32, scans: u32) -> Duration {
        let header = JpegHeader {
            size: (side, side),
            components: 3,
            orientation: 1,
            scan_start: 0,
            single_scan: scans == 1,
            scans,
            arithmetic: false,
            restarts: false,
        };
        decode_time(&Header::Jpeg(header), 1 << 20)
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
