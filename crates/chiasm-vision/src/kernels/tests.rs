//! Every implementation against the scalar one; the whole way in bands against the whole way image by image.

use proptest::prelude::*;

use super::resize::{self, Weights};
use super::{ChannelTable, Elements, Implementation, PatchGrid, patchify, write};
use crate::{ImageSize, RgbView};

/// Bytes without order; with `extreme`, only those that drive sums to their limits.
fn bytes(length: usize, seed: u64, extreme: bool) -> Vec<u8> {
    let mut state = seed;
    let next = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let byte = (state >> 56) as u8;
        if extreme { byte >> 7 | (byte >> 7).wrapping_neg() } else { byte }
    });
    next.take(length).collect()
}

fn table<const N: usize>(seed: u64) -> ChannelTable<N> {
    let bytes = bytes(3 * 256 * N, seed, false);
    std::array::from_fn(|channel| {
        std::array::from_fn(|value| std::array::from_fn(|byte| bytes[(channel * 256 + value) * N + byte]))
    })
}

/// A grid's extents: sides of patches around all limits of the vector code, and those of real models.
fn grids() -> impl Strategy<Value = PatchGrid> {
    let patch = prop_oneof![1..40_usize, Just(14), Just(16), Just(32)];
    (1..4_usize, 1..4_usize, patch, 1..4_usize, 1..4_usize).prop_map(|(height, width, patch, merge, temporal)| {
        PatchGrid { height: height * merge, width: width * merge, patch, merge, temporal }
    })
}

/// The way from an image to its tensor by the references, one image-sized step after the other.
fn reference(image: RgbView<'_>, grid: &PatchGrid, elements: Elements<'_>) -> Vec<u8> {
    let ImageSize { width, height } = image.size();
    let (width, height) = (width as usize, height as usize);
    let mut pixels = image.pixels().to_vec();
    if grid.image_width() != width {
        let mut out = vec![0; 3 * grid.image_width() * height];
        resize::scalar::horizontal(&pixels, width, &Weights::bicubic(width, grid.image_width()), &mut out);
        pixels = out;
    }
    if grid.image_height() != height {
        let row = 3 * grid.image_width();
        let weights = Weights::bicubic(height, grid.image_height());
        let mut out = vec![0; row * grid.image_height()];
        for (window, out) in weights.iter().zip(out.chunks_exact_mut(row)) {
            resize::scalar::vertical(&pixels[row * window.range.start..row * window.range.end], &window, out);
        }
        pixels = out;
    }
    let mut out = vec![0; grid.rows() * grid.row_len() * elements.size()];
    match elements {
        Elements::Raw => patchify::scalar::copy(&pixels, grid, &mut out),
        Elements::Two(table) => patchify::scalar::map(&pixels, grid, table, &mut out),
        Elements::Four(table) => patchify::scalar::map(&pixels, grid, table, &mut out),
    }
    out
}

#[test]
fn scalar_is_always_available_and_comes_first() {
    assert_eq!(Implementation::available().next().map(Implementation::name), Some("scalar"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn horizontal_passes_are_equal(
        (width, new_width) in prop_oneof![(1..40_usize, 1..40_usize), (1..700_usize, 1..300_usize)],
        rows in 1..12_usize,
        more_rows in 0..3_usize,
        seed: u64,
        extreme: bool,
    ) {
        let weights = Weights::bicubic(width, new_width);
        let pixels = bytes(3 * width * (rows + more_rows), seed, extreme);
        let mut expected = vec![0; 3 * new_width * rows];
        resize::scalar::horizontal(&pixels, width, &weights, &mut expected);
        for kernels in Implementation::available() {
            let mut out = vec![0xA5; expected.len()];
            kernels.horizontal(&pixels, width, &weights, &mut out);
            prop_assert!(out == expected, "{kernels:?}");
        }
    }

    #[test]
    fn vertical_passes_are_equal(
        (height, new_height) in prop_oneof![(1..40_usize, 1..40_usize), (1..700_usize, 1..300_usize)],
        row in 1..300_usize,
        line in 0..300_usize,
        seed: u64,
        extreme: bool,
    ) {
        let weights = Weights::bicubic(height, new_height);
        let window = weights.window(line % new_height);
        let rows = bytes(row * window.range.len(), seed, extreme);
        let mut expected = vec![0; row];
        resize::scalar::vertical(&rows, &window, &mut expected);
        for kernels in Implementation::available() {
            let mut out = vec![0xA5; row];
            kernels.vertical(&rows, &window, &mut out);
            prop_assert!(out == expected, "{kernels:?}");
        }
    }

    #[test]
    fn patches_are_equal(grid in grids(), seed: u64) {
        let pixels = bytes(3 * grid.image_width() * grid.image_height(), seed, false);
        let (two, four) = (table(seed), table(!seed));
        let size = ImageSize { width: grid.image_width() as u32, height: grid.image_height() as u32 };
        for elements in [Elements::Raw, Elements::Two(&two), Elements::Four(&four)] {
            let expected = reference(RgbView::new(size, &pixels).unwrap(), &grid, elements);
            for kernels in Implementation::available() {
                let mut out = vec![0xA5; expected.len()];
                kernels.patchify(&pixels, &grid, elements, &mut out);
                prop_assert!(out == expected, "{kernels:?}, {} bytes", elements.size());
            }
        }
    }

    #[test]
    fn bands_make_what_whole_images_make(
        grid in grids(),
        width in prop_oneof![Just(None), (1..400_u32).prop_map(Some)],
        height in prop_oneof![Just(None), (1..400_u32).prop_map(Some)],
        seed: u64,
        extreme: bool,
    ) {
        let size = ImageSize {
            width: width.unwrap_or(grid.image_width() as u32),
            height: height.unwrap_or(grid.image_height() as u32),
        };
        let pixels = bytes(3 * size.area() as usize, seed, extreme);
        let image = RgbView::new(size, &pixels).unwrap();
        let two = table(seed);
        for elements in [Elements::Raw, Elements::Two(&two)] {
            let expected = reference(image, &grid, elements);
            for kernels in Implementation::available() {
                let mut out = vec![0xA5; expected.len()];
                write(kernels, image, &grid, elements, &mut out);
                prop_assert!(out == expected, "{kernels:?}, {} bytes", elements.size());
            }
        }
    }
}
