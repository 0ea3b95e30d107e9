//! The pipeline from an image to its tensor, band by band: a few rows are resized, then written in
//! their layout while they are still in the CPU's cache. It needs no image-sized buffer.

use std::cell::RefCell;
use std::ops::Range;

use super::dispatch::Resize;
use super::layer::{Layer, Layout};
use super::resize::{Filter, Weights};
use super::{Elements, Implementation, Parallelism};
use crate::RgbView;

/// The library whose resize is reproduced, and its filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Resampler {
    /// PyTorch's arithmetic.
    Torch(Filter),
    /// Pillow 13's arithmetic.
    Pillow(Filter),
}

impl Resampler {
    /// Returns `true` if columns are resized before rows, where both are resized.
    ///
    /// Pillow 13 starts with the columns if they shrink by more than twice as many pixels as the
    /// rows do. (Found by comparing both orders with it, for 7,000 random sizes.)
    pub(super) fn starts_with_columns(self, layer: &Layer) -> bool {
        match self {
            Self::Torch(_) => false,
            Self::Pillow(_) => {
                let shrinkage = |from: usize, to| from.saturating_sub(to);
                shrinkage(layer.source.height, layer.height)
                    > 2 * shrinkage(layer.source.width, layer.width)
            }
        }
    }
}

/// The buffers that a thread keeps between images, to avoid allocating and clearing them each time.
#[derive(Default)]
struct Scratch {
    /// Rows of the image after the horizontal pass, kept as long as later bands need them.
    narrowed: Vec<u8>,
    /// One band of the canvas.
    band: Vec<u8>,
    /// The rows of one band after the vertical pass, if that pass comes first.
    flattened: Vec<u8>,
}

/// The scratch size above which a thread frees its scratch after an image. Bands of images of usual
/// sizes need a tenth of it.
const MAX_KEPT_SCRATCH_BYTES: usize = 16 << 20;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The image to write, and the settings for writing it.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) kernels: Implementation,
    pub(crate) image: RgbView<'a>,
    pub(crate) resampler: Resampler,
    pub(crate) elements: Elements<'a>,
    pub(crate) parallelism: Parallelism<'a>,
}

impl Job<'_> {
    /// Writes the layers one after the other to `out`, which has exactly their total length.
    ///
    /// A dimension that keeps its length is not filtered.
    pub(crate) fn write(&self, layers: &[Layer], out: &mut [u8]) {
        match self.resampler {
            Resampler::Torch(filter) => self.write_layers::<i16>(filter, layers, out),
            Resampler::Pillow(filter) => self.write_layers::<i32>(filter, layers, out),
        }
    }

    fn write_layers<T: Resize>(&self, filter: Filter, layers: &[Layer], out: &mut [u8]) {
        let max_sections = match self.parallelism {
            Parallelism::Single => 1,
            // More sections than threads, because some threads may be busy with other work.
            Parallelism::Pool(pool) => 2 * pool.current_num_threads(),
        };
        let passes: Vec<_> = layers.iter().map(|layer| Passes::<T>::new(filter, layer)).collect();
        let mut tasks = Vec::new();
        let mut rest = out;
        for (layer, passes) in layers.iter().zip(&passes) {
            let strip_count = layer.layout.strip_count();
            let sections = max_sections.min(strip_count);
            for index in 0..sections {
                let strips = index * strip_count / sections..(index + 1) * strip_count / sections;
                let elements = strips.len() * layer.layout.strip_elements();
                let (out, others) = rest.split_at_mut(self.elements.size() * elements);
                rest = others;
                tasks.push((Section { job: self, layer, passes, strips }, out));
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

/// A run of consecutive strips of a layer, written by one thread.
struct Section<'a, T> {
    job: &'a Job<'a>,
    layer: &'a Layer,
    passes: &'a Passes<T>,
    strips: Range<usize>,
}

impl<T: Resize> Section<'_, T> {
    /// Writes the section with the thread's scratch buffers.
    fn write(&self, out: &mut [u8]) {
        SCRATCH.with_borrow_mut(|scratch| {
            self.write_bands(scratch, out);
            let kept = scratch.narrowed.len() + scratch.band.len() + scratch.flattened.len();
            if kept > MAX_KEPT_SCRATCH_BYTES {
                *scratch = Scratch::default();
            }
        });
    }

    fn write_bands(&self, scratch: &mut Scratch, out: &mut [u8]) {
        let Scratch { narrowed, band, flattened } = scratch;
        let &Job { kernels, resampler, elements, .. } = self.job;
        let columns_first = resampler.starts_with_columns(self.layer);
        let layout = self.layer.layout;
        let strip_height = layout.strip_height();
        let band_height = layout.band_height();
        // The source rows that are in `narrowed`.
        let mut cached = 0..0;
        let outs = out.chunks_exact_mut(elements.size() * layout.strip_elements());
        for (strip, out) in self.strips.clone().zip(outs) {
            let end = (strip + 1) * strip_height;
            for start in (strip * strip_height..end).step_by(band_height) {
                let rows = start..(start + band_height).min(end);
                let pixels = match (&self.passes.horizontal, &self.passes.vertical) {
                    (Some(horizontal), Some(vertical)) if columns_first => self
                        .render_band_columns_first(
                            horizontal, vertical, rows, narrowed, flattened, band,
                        ),
                    _ => self.render_band(rows, narrowed, &mut cached, band),
                };
                match layout {
                    Layout::Patches(grid) => {
                        kernels.patchify(pixels, &grid.group_row(), elements, out);
                    }
                    Layout::Tiles(grid) => kernels.tiles(pixels, start, &grid, elements, out),
                }
            }
        }
    }

    /// Renders these rows of the canvas, with the vertical pass first.
    fn render_band_columns_first<'b>(
        &self,
        horizontal: &Weights<T>,
        vertical: &Weights<T>,
        rows: Range<usize>,
        narrowed: &mut Vec<u8>,
        flattened: &mut Vec<u8>,
        band: &'b mut Vec<u8>,
    ) -> &'b [u8] {
        let layer = self.layer;
        let source = layer.source;
        let canvas_row = 3 * layer.layout.width();
        let covered_row = 3 * layer.columns().len();
        let source_row = 3 * source.width;
        let left = 3 * layer.left.max(0).unsigned_abs();
        let top = layer.top.max(0).unsigned_abs();
        let covered = rows.start.max(top)..rows.end.min(top + layer.rows().len());
        let image_row = 3 * self.job.image.size().width as usize;
        let origin = source.top * image_row + 3 * source.left;
        let flattened = first_bytes(flattened, source_row * covered.len());
        for (y, out) in covered.clone().zip(flattened.chunks_exact_mut(source_row)) {
            let inputs = &self.job.image.pixels()
                [origin + image_row * vertical.window(y - top).range.start..];
            self.job.kernels.vertical(inputs, image_row, vertical, y - top, out);
        }
        let band = first_bytes(band, canvas_row * rows.len());
        if covered_row == canvas_row && covered == rows {
            self.job.kernels.horizontal(flattened, source_row, horizontal, band);
            return band;
        }
        let narrowed = first_bytes(narrowed, covered_row * covered.len());
        self.job.kernels.horizontal(flattened, source_row, horizontal, narrowed);
        for out in band.chunks_exact_mut(canvas_row) {
            fill(out, layer.fill);
        }
        for (y, narrowed) in covered.zip(narrowed.chunks_exact(covered_row)) {
            band[canvas_row * (y - rows.start) + left..][..covered_row].copy_from_slice(narrowed);
        }
        band
    }

    /// Renders these rows of the canvas, with the horizontal pass first.
    fn render_band<'b>(
        &'b self,
        rows: Range<usize>,
        narrowed: &'b mut Vec<u8>,
        cached: &mut Range<usize>,
        band: &'b mut Vec<u8>,
    ) -> &'b [u8] {
        let layer = self.layer;
        let canvas_row = 3 * layer.layout.width();
        let visible_columns = layer.columns();
        let visible_rows = layer.rows();
        let covered_row = 3 * visible_columns.len();
        // The byte of a canvas row, and the canvas row, at which the visible part begins.
        let left = 3 * layer.left.max(0).unsigned_abs();
        let top = layer.top.max(0).unsigned_abs();
        // The canvas rows of the band that are covered.
        let covered = rows.start.max(top)..rows.end.min(top + visible_rows.len());
        // The same rows, counted from the first visible row.
        let outputs = covered.start.saturating_sub(top)..covered.end.saturating_sub(top);
        let is_full = covered_row == canvas_row && covered == rows;
        let (source, first) = if outputs.is_empty() || covered_row == 0 {
            (&[][..], 0)
        } else {
            let needed = match &self.passes.vertical {
                Some(weights) => weights.inputs(outputs.clone()),
                None => outputs.start + visible_rows.start..outputs.end + visible_rows.start,
            };
            self.source_rows(visible_columns, needed, narrowed, cached)
        };
        if is_full && self.passes.vertical.is_none() {
            let start = covered_row * (outputs.start + visible_rows.start - first);
            return &source[start..start + covered_row * rows.len()];
        }
        let band = first_bytes(band, canvas_row * rows.len());
        for (y, out) in rows.zip(band.chunks_exact_mut(canvas_row)) {
            if !covered.contains(&y) || covered_row == 0 {
                fill(out, layer.fill);
                continue;
            }
            fill(&mut out[..left], layer.fill);
            fill(&mut out[left + covered_row..], layer.fill);
            let out = &mut out[left..left + covered_row];
            match &self.passes.vertical {
                Some(weights) => {
                    let range = weights.window(y - top).range;
                    let inputs = &source
                        [covered_row * (range.start - first)..covered_row * (range.end - first)];
                    self.job.kernels.vertical(inputs, covered_row, weights, y - top, out);
                }
                None => {
                    let start = covered_row * (y - top + visible_rows.start - first);
                    out.copy_from_slice(&source[start..][..covered_row]);
                }
            }
        }
        band
    }

    /// Returns source rows after the horizontal pass, and the number of the first row.
    ///
    /// They have the width of the visible `columns`, and contain at least the `needed` rows.
    fn source_rows<'b>(
        &'b self,
        columns: Range<usize>,
        needed: Range<usize>,
        narrowed: &'b mut Vec<u8>,
        cached: &mut Range<usize>,
    ) -> (&'b [u8], usize) {
        let source = self.layer.source;
        let image_row = 3 * self.job.image.size().width as usize;
        let origin = source.top * image_row + 3 * source.left;
        if self.passes.horizontal.is_none() && 3 * columns.len() == image_row {
            return (&self.job.image.pixels()[origin..], 0);
        }
        // Needed rows that are already in `narrowed` are moved to its start instead of recomputed.
        let row = 3 * columns.len();
        let first_new =
            if cached.contains(&needed.start) { cached.end.min(needed.end) } else { needed.start };
        let reused_bytes = row * (first_new - needed.start);
        let lines = first_bytes(narrowed, row * needed.len().max(cached.len()));
        if reused_bytes > 0 {
            let from = row * (needed.start - cached.start);
            lines.copy_within(from..from + reused_bytes, 0);
        }
        let new = &mut lines[reused_bytes..row * needed.len()];
        let pixels = &self.job.image.pixels()
            [(origin + image_row * first_new).min(self.job.image.pixels().len())..];
        match &self.passes.horizontal {
            Some(weights) => self.job.kernels.horizontal(pixels, image_row, weights, new),
            None => {
                for (line, new) in pixels.chunks(image_row).zip(new.chunks_exact_mut(row)) {
                    new.copy_from_slice(&line[3 * columns.start..3 * columns.end]);
                }
            }
        }
        *cached = needed;
        (lines, cached.start)
    }
}

/// The two passes of a resize, for the visible columns and rows. `None` for a dimension that keeps
/// its length.
struct Passes<T> {
    horizontal: Option<Weights<T>>,
    vertical: Option<Weights<T>>,
}

impl<T: Resize> Passes<T> {
    fn new(filter: Filter, layer: &Layer) -> Self {
        let weights = |from, to, visible: Range<usize>| {
            (from != to && !visible.is_empty()).then(|| Weights::new(filter, from, to, visible))
        };
        Self {
            horizontal: weights(layer.source.width, layer.width, layer.columns()),
            vertical: weights(layer.source.height, layer.height, layer.rows()),
        }
    }
}

/// Returns the first `length` bytes of a buffer, which grows if it is shorter.
fn first_bytes(bytes: &mut Vec<u8>, length: usize) -> &mut [u8] {
    if bytes.len() < length {
        bytes.resize(length, 0);
    }
    &mut bytes[..length]
}

/// Fills pixels with a colour.
fn fill(pixels: &mut [u8], colour: [u8; 3]) {
    for pixel in pixels.chunks_exact_mut(3) {
        pixel.copy_from_slice(&colour);
    }
}
