//! Compares every implementation with the scalar one, and the banded pipeline with a pipeline of
//! image-sized steps.

use std::ops::Range;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::dispatch::Resize;
use super::resize::{self, Weights};
use super::{
    ChannelTable, Elements, Filter, Implementation, Job, Layer, Layout, Parallelism, PatchGrid,
    Region, Resampler, TileGrid, patchify, tiles,
};
use crate::{ImageSize, RgbView};

static POOL: LazyLock<rayon::ThreadPool> =
    LazyLock::new(|| rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap());

/// Returns pseudo-random bytes; with `extreme` only 0 and 255, which drive sums to their limits.
fn bytes(length: usize, seed: u64, extreme: bool) -> Vec<u8> {
    let mut state = seed;
    let next = std::iter::repeat_with(|| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let byte = (state >> 56) as u8;
        if extreme { byte >> 7 | (byte >> 7).wrapping_neg() } else { byte }
    });
    next.take(length).collect()
}

/// Returns a lookup table of pseudo-random elements.
fn table<const N: usize>(seed: u64) -> ChannelTable<N> {
    let bytes = bytes(3 * 256 * N, seed, false);
    std::array::from_fn(|channel| {
        std::array::from_fn(|value| {
            std::array::from_fn(|byte| bytes[(channel * 256 + value) * N + byte])
        })
    })
}

/// Generates patch grids: sides around all limits of the vector code, and those of real models.
fn grids() -> impl Strategy<Value = PatchGrid> {
    let patch = prop_oneof![1..40_usize, Just(14), Just(16), Just(32)];
    (1..4_usize, 1..4_usize, patch, 1..4_usize, 1..4_usize).prop_map(
        |(height, width, patch, merge, temporal)| PatchGrid {
            height: height * merge,
            width: width * merge,
            patch,
            merge,
            temporal,
        },
    )
}

fn tile_grids() -> impl Strategy<Value = TileGrid> {
    let side = || prop_oneof![1..80_usize, 1..300_usize];
    (1..4_usize, 1..4_usize, side(), side()).prop_map(|(columns, rows, width, height)| TileGrid {
        columns,
        rows,
        width,
        height,
    })
}

fn layouts() -> impl Strategy<Value = Layout> {
    prop_oneof![grids().prop_map(Layout::Patches), tile_grids().prop_map(Layout::Tiles)]
}

fn filters() -> impl Strategy<Value = Filter> {
    prop_oneof![Just(Filter::Bilinear), Just(Filter::Bicubic), Just(Filter::Lanczos)]
}

/// Generates an image size and a layer of any region of it, with any resize and any position on the
/// canvas.
fn layers() -> impl Strategy<Value = (ImageSize, Layer)> {
    let side = || prop_oneof![Just(None), (1..300_usize).prop_map(Some)];
    let margins = prop_oneof![Just([0; 4]), prop::array::uniform4(0..20_usize)];
    let shift = || prop_oneof![Just(0), -60..60_isize];
    (layouts(), side(), side(), margins, side(), side(), shift(), shift(), any::<[u8; 3]>())
        .prop_map(
            |(layout, width, height, margins, source_width, source_height, left, top, fill)| {
                let width = width.unwrap_or(layout.width());
                let height = height.unwrap_or(layout.height());
                let source = Region {
                    left: margins[0],
                    top: margins[1],
                    width: source_width.unwrap_or(width),
                    height: source_height.unwrap_or(height),
                };
                let size = ImageSize {
                    width: (source.left + source.width + margins[2]) as u32,
                    height: (source.top + source.height + margins[3]) as u32,
                };
                (size, Layer { source, width, height, left, top, fill, layout })
            },
        )
}

/// Computes a tensor with the scalar kernels, one image-sized step after the other.
fn reference<T: Resize>(
    image: RgbView<'_>,
    filter: Filter,
    columns_first: bool,
    layer: &Layer,
    elements: Elements<'_>,
) -> Vec<u8> {
    let Layer { source, width, height, left, top, fill, layout } = *layer;
    let row = 3 * image.size().width as usize;
    let pixels: Vec<u8> = (source.top..source.top + source.height)
        .flat_map(|y| &image.pixels()[y * row + 3 * source.left..][..3 * source.width])
        .copied()
        .collect();
    let horizontal = |pixels: Vec<u8>, height: usize| {
        if width == source.width {
            return pixels;
        }
        let weights = Weights::<T>::new(filter, source.width, width, 0..width);
        let mut out = vec![0; 3 * width * height];
        resize::scalar::horizontal(&pixels, 3 * source.width, &weights, &mut out);
        out
    };
    let vertical = |pixels: Vec<u8>, width: usize| {
        if height == source.height {
            return pixels;
        }
        let weights = Weights::<T>::new(filter, source.height, height, 0..height);
        let mut out = vec![0; 3 * width * height];
        for (output, out) in out.chunks_exact_mut(3 * width).enumerate() {
            let Range { start, end } = weights.window(output).range;
            resize::scalar::vertical(
                &pixels[3 * width * start..3 * width * end],
                3 * width,
                &weights,
                output,
                out,
            );
        }
        out
    };
    let pixels = if columns_first {
        horizontal(vertical(pixels, source.width), height)
    } else {
        vertical(horizontal(pixels, source.height), width)
    };
    let mut canvas = Vec::new();
    for y in 0..layout.height() as isize {
        for x in 0..layout.width() as isize {
            let x = x - left;
            let y = y - top;
            let inside = (0..width as isize).contains(&x) && (0..height as isize).contains(&y);
            let at = 3 * (y * width as isize + x);
            canvas.extend(if inside { &pixels[at as usize..at as usize + 3] } else { &fill });
        }
    }
    let mut out = vec![0; layout.elements() * elements.size()];
    match layout {
        Layout::Patches(grid) => match elements {
            Elements::Raw => patchify::scalar::copy(&canvas, &grid, &mut out),
            Elements::Two(table) => patchify::scalar::map(&canvas, &grid, table, &mut out),
            Elements::Four(table) => patchify::scalar::map(&canvas, &grid, table, &mut out),
        },
        Layout::Tiles(grid) => {
            let lines = canvas.chunks_exact(3 * grid.image_width() * grid.height);
            let outs = out.chunks_exact_mut(elements.size() * grid.columns * grid.tile_len());
            for (row, (lines, out)) in lines.zip(outs).enumerate() {
                let y = row * grid.height;
                match elements {
                    Elements::Raw => tiles::scalar::copy(lines, y, &grid, out),
                    Elements::Two(table) => tiles::scalar::map(lines, y, &grid, table, out),
                    Elements::Four(table) => tiles::scalar::map(lines, y, &grid, table, out),
                }
            }
        }
    }
    out
}

/// Compares the horizontal pass of every implementation with the scalar one.
fn check_horizontal<T: Resize>(
    filter: Filter,
    [width, margin, new_width, rows, more_rows]: [usize; 5],
    seed: u64,
    extreme: bool,
) -> Result<(), TestCaseError> {
    let from = seed as usize % new_width;
    let weights = Weights::<T>::new(filter, width, new_width, from..new_width);
    let row_stride = 3 * (width + margin);
    // The kernels must not read beyond the pixels of the last row.
    let pixels = bytes(row_stride * (rows + more_rows) - 3 * margin, seed, extreme);
    let mut expected = vec![0; 3 * weights.len() * rows];
    resize::scalar::horizontal(&pixels, row_stride, &weights, &mut expected);
    for kernels in Implementation::available() {
        let mut out = vec![0xA5; expected.len()];
        kernels.horizontal(&pixels, row_stride, &weights, &mut out);
        prop_assert!(out == expected, "{kernels:?}");
    }
    Ok(())
}

/// Compares the vertical pass of every implementation with the scalar one.
fn check_vertical<T: Resize>(
    filter: Filter,
    [height, new_height, length, margin, line]: [usize; 5],
    seed: u64,
    extreme: bool,
) -> Result<(), TestCaseError> {
    let weights = Weights::<T>::new(filter, height, new_height, 0..new_height);
    let output = line % new_height;
    let row_stride = length + margin;
    // The kernels must not read beyond the end of the last row.
    let rows = bytes(row_stride * weights.window(output).range.len() - margin, seed, extreme);
    let mut expected = vec![0; length];
    resize::scalar::vertical(&rows, row_stride, &weights, output, &mut expected);
    for kernels in Implementation::available() {
        let mut out = vec![0xA5; length];
        kernels.vertical(&rows, row_stride, &weights, output, &mut out);
        prop_assert!(out == expected, "{kernels:?}");
    }
    Ok(())
}

#[test]
fn scalar_is_the_first_available_implementation() {
    assert_eq!(Implementation::available().next().map(Implementation::name), Some("scalar"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn horizontal_pass_equals_scalar(
        (width, new_width) in prop_oneof![(1..40_usize, 1..40_usize), (1..700_usize, 1..300_usize)],
        margin in 0..5_usize,
        rows in 1..12_usize,
        more_rows in 0..3_usize,
        filter in filters(),
        seed: u64,
        extreme: bool,
    ) {
        let extents = [width, margin, new_width, rows, more_rows];
        check_horizontal::<i16>(filter, extents, seed, extreme)?;
        check_horizontal::<i32>(filter, extents, seed, extreme)?;
    }

    #[test]
    fn vertical_pass_equals_scalar(
        (height, new_height) in
            prop_oneof![(1..40_usize, 1..40_usize), (1..700_usize, 1..300_usize)],
        length in 1..300_usize,
        margin in 0..5_usize,
        line in 0..300_usize,
        filter in filters(),
        seed: u64,
        extreme: bool,
    ) {
        let extents = [height, new_height, length, margin, line];
        check_vertical::<i16>(filter, extents, seed, extreme)?;
        check_vertical::<i32>(filter, extents, seed, extreme)?;
    }

    #[test]
    fn patchify_equals_scalar(grid in grids(), seed: u64) {
        let pixels = bytes(3 * grid.image_width() * grid.image_height(), seed, false);
        let two = table(seed);
        let four = table(!seed);
        let size = ImageSize {
            width: grid.image_width() as u32,
            height: grid.image_height() as u32,
        };
        let image = RgbView::new(size, &pixels).unwrap();
        let layer = Layer::whole(grid.image_width(), grid.image_height(), Layout::Patches(grid));
        for elements in [Elements::Raw, Elements::Two(&two), Elements::Four(&four)] {
            let expected = reference::<i16>(image, Filter::Bicubic, false, &layer, elements);
            for kernels in Implementation::available() {
                let mut out = vec![0xA5; expected.len()];
                kernels.patchify(&pixels, &grid, elements, &mut out);
                prop_assert!(out == expected, "{kernels:?}, {} bytes", elements.size());
            }
        }
    }

    #[test]
    fn tiles_equal_scalar(
        grid in tile_grids(),
        first in 0..300_usize,
        count in 1..40_usize,
        seed: u64,
    ) {
        let first = first % grid.height;
        let lines = count.min(grid.height - first);
        let pixels = bytes(3 * grid.image_width() * lines, seed, false);
        let two = table(seed);
        let four = table(!seed);
        for elements in [Elements::Raw, Elements::Two(&two), Elements::Four(&four)] {
            let mut expected = vec![0xA5; elements.size() * grid.columns * grid.tile_len()];
            let untouched = expected.clone();
            match elements {
                Elements::Raw => tiles::scalar::copy(&pixels, first, &grid, &mut expected),
                Elements::Two(table) => {
                    tiles::scalar::map(&pixels, first, &grid, table, &mut expected);
                }
                Elements::Four(table) => {
                    tiles::scalar::map(&pixels, first, &grid, table, &mut expected);
                }
            }
            for kernels in Implementation::available() {
                let mut out = untouched.clone();
                kernels.tiles(&pixels, first, &grid, elements, &mut out);
                prop_assert!(out == expected, "{kernels:?}, {} bytes", elements.size());
            }
        }
    }

    #[test]
    fn bands_equal_the_whole_image_reference(
        (size, layer) in layers(),
        filter in filters(),
        seed: u64,
        extreme: bool,
    ) {
        let pixels = bytes(3 * size.area() as usize, seed, extreme);
        let image = RgbView::new(size, &pixels).unwrap();
        let two = table(seed);
        for elements in [Elements::Raw, Elements::Two(&two)] {
            for resampler in [Resampler::Torch(filter), Resampler::Pillow(filter)] {
                let expected = match resampler {
                    Resampler::Torch(filter) => {
                        reference::<i16>(image, filter, false, &layer, elements)
                    }
                    Resampler::Pillow(filter) => {
                        let columns_first = resampler.starts_with_columns(&layer);
                        reference::<i32>(image, filter, columns_first, &layer, elements)
                    }
                };
                for kernels in Implementation::available() {
                    for parallelism in [Parallelism::Single, Parallelism::Pool(&POOL)] {
                        // Two layers, to check that each writes only its own elements.
                        let mut out = vec![0xA5; 2 * expected.len()];
                        Job { kernels, image, resampler, elements, parallelism }
                            .write(&[layer; 2], &mut out);
                        let (first, second) = out.split_at(expected.len());
                        prop_assert!(
                            first == expected && second == expected,
                            "{kernels:?} {resampler:?} {parallelism:?}"
                        );
                    }
                }
            }
        }
    }
}
