//! Turns an image into its tensor in bands: a few lines are resized, then written in their layout
//! while they are still in the CPU's cache. No image-sized buffer lies in between.

use std::cell::RefCell;
use std::ops::Range;

use super::dispatch::Resize;
use super::layer::{Layer, Layout};
use super::resize::{Filter, Weights};
use super::{Elements, Implementation, Parallelism};
use crate::RgbView;

/// How an image is resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Resampler {
    /// PyTorch's arithmetic.
    Torch(Filter),
    /// Pillow 13's arithmetic.
    Pillow(Filter),
}

impl Resampler {
    /// Whether columns are resized before rows, where both are. Pillow 13 starts with the columns
    /// if they shrink by more than twice as many pixels as the rows do. (Found by comparing both
    /// orders with it, for 7,000 random sizes.)
    pub(super) fn starts_with_columns(self, layer: &Layer) -> bool {
        match self {
            Self::Torch(_) => false,
            Self::Pillow(_) => {
                let shrinks = |from: usize, to| from.saturating_sub(to);
                shrinks(layer.source.height, layer.height)
                    > 2 * shrinks(layer.source.width, layer.width)
            }
        }
    }
}

/// What a thread keeps between images, so that it neither asks for memory nor clears it each time.
#[derive(Default)]
struct Scratch {
    /// Lines of the image after the horizontal pass, as long as later bands need them.
    narrowed: Vec<u8>,
    /// One band of the canvas.
    band: Vec<u8>,
    /// The lines of one band after the vertical pass, where that comes first.
    flattened: Vec<u8>,
}

/// A thread gives back scratch beyond this many bytes. Bands of images of usual sizes need a tenth
/// of it.
const KEPT: usize = 16 << 20;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The image that is written, and how.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) kernels: Implementation,
    pub(crate) image: RgbView<'a>,
    pub(crate) resampler: Resampler,
    pub(crate) elements: Elements<'a>,
    pub(crate) parallelism: Parallelism<'a>,
}

impl Job<'_> {
    /// Writes the layers one after the other to `out`, which is as long as all of them. A side that
    /// keeps its length is not filtered.
    pub(crate) fn write(&self, layers: &[Layer], out: &mut [u8]) {
        match self.resampler {
            Resampler::Torch(filter) => self.write_layers::<i16>(filter, layers, out),
            Resampler::Pillow(filter) => self.write_layers::<i32>(filter, layers, out),
        }
    }

    fn write_layers<T: Resize>(&self, filter: Filter, layers: &[Layer], out: &mut [u8]) {
        let most = match self.parallelism {
            Parallelism::Single => 1,
            // More than there are threads, as some have other things to do.
            Parallelism::Pool(pool) => 2 * pool.current_num_threads(),
        };
        let passes: Vec<_> = layers.iter().map(|layer| Passes::<T>::new(filter, layer)).collect();
        let mut tasks = Vec::new();
        let mut rest = out;
        for (layer, passes) in layers.iter().zip(&passes) {
            let parts = layer.layout.parts();
            let sections = most.min(parts);
            for index in 0..sections {
                let parts = index * parts / sections..(index + 1) * parts / sections;
                let elements = parts.len() * layer.layout.part_elements();
                let (out, others) = rest.split_at_mut(self.elements.size() * elements);
                rest = others;
                tasks.push((Section { job: self, layer, passes, parts }, out));
            }
        }
        match self.parallelism {
            Parallelism::Single => tasks.into_iter().for_each(|(section, out)| section.write(out)),
            Parallelism::Pool(pool) => pool.scope(|scope| {
                for (section, out) in tasks {
                    scope.spawn(move |_| section.write(out));
                }
            }),
        }
    }
}

/// Some parts of a layer, which follow one another.
struct Section<'a, T> {
    job: &'a Job<'a>,
    layer: &'a Layer,
    passes: &'a Passes<T>,
    parts: Range<usize>,
}

impl<T: Resize> Section<'_, T> {
    fn write(&self, out: &mut [u8]) {
        SCRATCH.with_borrow_mut(|scratch| {
            self.write_bands(scratch, out);
            if scratch.narrowed.len() + scratch.band.len() + scratch.flattened.len() > KEPT {
                *scratch = Scratch::default();
            }
        });
    }

    fn write_bands(&self, scratch: &mut Scratch, out: &mut [u8]) {
        let Scratch { narrowed, band, flattened } = scratch;
        let &Job { kernels, resampler, elements, .. } = self.job;
        let columns_first = resampler.starts_with_columns(self.layer);
        let layout = self.layer.layout;
        let (part_height, band_height) = (layout.part_height(), layout.band_height());
        // Lines of the source that `narrowed` holds.
        let mut held = 0..0;
        let outs = out.chunks_exact_mut(elements.size() * layout.part_elements());
        for (part, out) in self.parts.clone().zip(outs) {
            let end = (part + 1) * part_height;
            for start in (part * part_height..end).step_by(band_height) {
                let lines = start..(start + band_height).min(end);
                let pixels = match (&self.passes.horizontal, &self.passes.vertical) {
                    (Some(horizontal), Some(vertical)) if columns_first => self
                        .band_columns_first(horizontal, vertical, lines, narrowed, flattened, band),
                    _ => self.band(lines, narrowed, &mut held, band),
                };
                match layout {
                    Layout::Patches(grid) => kernels.patchify(pixels, &grid.band(), elements, out),
                    Layout::Tiles(grid) => kernels.tiles(pixels, start, &grid, elements, out),
                }
            }
        }
    }

    /// These lines of the canvas, the vertical pass first.
    fn band_columns_first<'b>(
        &self,
        horizontal: &Weights<T>,
        vertical: &Weights<T>,
        lines: Range<usize>,
        narrowed: &mut Vec<u8>,
        flattened: &mut Vec<u8>,
        band: &'b mut Vec<u8>,
    ) -> &'b [u8] {
        let (layer, source) = (self.layer, self.layer.source);
        let (width, row, source_row) =
            (3 * layer.layout.width(), 3 * layer.columns().len(), 3 * source.width);
        let left = 3 * layer.left.max(0).unsigned_abs();
        let top = layer.top.max(0).unsigned_abs();
        let covered = lines.start.max(top)..lines.end.min(top + layer.rows().len());
        let image_row = 3 * self.job.image.size().width as usize;
        let origin = source.top * image_row + 3 * source.left;
        let flattened = at_least(flattened, source_row * covered.len());
        for (y, out) in covered.clone().zip(flattened.chunks_exact_mut(source_row)) {
            let inputs = &self.job.image.pixels()
                [origin + image_row * vertical.window(y - top).range.start..];
            self.job.kernels.vertical(inputs, image_row, vertical, y - top, out);
        }
        let band = at_least(band, width * lines.len());
        if row == width && covered == lines {
            self.job.kernels.horizontal(flattened, source_row, horizontal, band);
            return band;
        }
        let narrowed = at_least(narrowed, row * covered.len());
        self.job.kernels.horizontal(flattened, source_row, horizontal, narrowed);
        for out in band.chunks_exact_mut(width) {
            fill(out, layer.fill);
        }
        for (y, narrowed) in covered.zip(narrowed.chunks_exact(row)) {
            band[width * (y - lines.start) + left..][..row].copy_from_slice(narrowed);
        }
        band
    }

    /// These lines of the canvas.
    fn band<'b>(
        &'b self,
        lines: Range<usize>,
        narrowed: &'b mut Vec<u8>,
        held: &mut Range<usize>,
        band: &'b mut Vec<u8>,
    ) -> &'b [u8] {
        let (layer, width) = (self.layer, 3 * self.layer.layout.width());
        let (columns, rows) = (layer.columns(), layer.rows());
        // Where the columns and rows that can be seen begin on the canvas.
        let left = 3 * layer.left.max(0).unsigned_abs();
        let top = layer.top.max(0).unsigned_abs();
        // The lines that are covered, counted from the first row that can be seen.
        let covered = lines.start.max(top)..lines.end.min(top + rows.len());
        let covered_rows = covered.start.saturating_sub(top)..covered.end.saturating_sub(top);
        let row = 3 * columns.len();
        let full = row == width && covered == lines;
        let (source, first) = if covered_rows.is_empty() || row == 0 {
            (&[][..], 0)
        } else {
            let needed = match &self.passes.vertical {
                Some(weights) => weights.inputs(covered_rows.clone()),
                None => covered_rows.start + rows.start..covered_rows.end + rows.start,
            };
            self.source(columns, needed, narrowed, held)
        };
        if full && self.passes.vertical.is_none() {
            let start = row * (covered_rows.start + rows.start - first);
            return &source[start..start + row * lines.len()];
        }
        let band = at_least(band, width * lines.len());
        for (y, out) in lines.zip(band.chunks_exact_mut(width)) {
            if !covered.contains(&y) || row == 0 {
                fill(out, layer.fill);
                continue;
            }
            fill(&mut out[..left], layer.fill);
            fill(&mut out[left + row..], layer.fill);
            let out = &mut out[left..left + row];
            match &self.passes.vertical {
                Some(weights) => {
                    let range = weights.window(y - top).range;
                    let inputs = &source[row * (range.start - first)..row * (range.end - first)];
                    self.job.kernels.vertical(inputs, row, weights, y - top, out);
                }
                None => out.copy_from_slice(&source[row * (y - top + rows.start - first)..][..row]),
            }
        }
        band
    }

    /// Lines of the source in the width of the columns that can be seen, at least the `needed`
    /// ones, and the number of the first.
    fn source<'b>(
        &'b self,
        columns: Range<usize>,
        needed: Range<usize>,
        narrowed: &'b mut Vec<u8>,
        held: &mut Range<usize>,
    ) -> (&'b [u8], usize) {
        let source = self.layer.source;
        let image_row = 3 * self.job.image.size().width as usize;
        let origin = source.top * image_row + 3 * source.left;
        if self.passes.horizontal.is_none() && 3 * columns.len() == image_row {
            return (&self.job.image.pixels()[origin..], 0);
        }
        // What `narrowed` holds of the needed lines is moved, not made again.
        let row = 3 * columns.len();
        let made =
            if held.contains(&needed.start) { held.end.min(needed.end) } else { needed.start };
        let kept = row * (made - needed.start);
        let lines = at_least(narrowed, row * needed.len().max(held.len()));
        if kept > 0 {
            let from = row * (needed.start - held.start);
            lines.copy_within(from..from + kept, 0);
        }
        let new = &mut lines[kept..row * needed.len()];
        let pixels = &self.job.image.pixels()
            [(origin + image_row * made).min(self.job.image.pixels().len())..];
        match &self.passes.horizontal {
            Some(weights) => self.job.kernels.horizontal(pixels, image_row, weights, new),
            None => {
                for (line, new) in pixels.chunks(image_row).zip(new.chunks_exact_mut(row)) {
                    new.copy_from_slice(&line[3 * columns.start..3 * columns.end]);
                }
            }
        }
        *held = needed;
        (lines, held.start)
    }
}

/// The two passes of a resize, for the columns and rows that can be seen. `None` for a side that
/// keeps its length.
struct Passes<T> {
    horizontal: Option<Weights<T>>,
    vertical: Option<Weights<T>>,
}

impl<T: Resize> Passes<T> {
    fn new(filter: Filter, layer: &Layer) -> Self {
        let weights = |from, to, kept: Range<usize>| {
            (from != to && !kept.is_empty()).then(|| Weights::new(filter, from, to, kept))
        };
        Self {
            horizontal: weights(layer.source.width, layer.width, layer.columns()),
            vertical: weights(layer.source.height, layer.height, layer.rows()),
        }
    }
}

/// The first `length` bytes, of which there may have been fewer.
fn at_least(bytes: &mut Vec<u8>, length: usize) -> &mut [u8] {
    if bytes.len() < length {
        bytes.resize(length, 0);
    }
    &mut bytes[..length]
}

fn fill(pixels: &mut [u8], colour: [u8; 3]) {
    for pixel in pixels.chunks_exact_mut(3) {
        pixel.copy_from_slice(&colour);
    }
}
