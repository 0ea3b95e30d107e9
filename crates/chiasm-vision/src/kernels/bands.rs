//! From an image to its tensor in bands: the lines of one row of groups are resized, then cut into patches while
//! they are still in the CPU's cache. No image-sized buffer lies in between.

use std::cell::RefCell;
use std::ops::Range;

use super::resize::Weights;
use super::{Elements, Implementation, PatchGrid};
use crate::{ImageSize, RgbView};

/// What a thread keeps between images, so that it neither asks for memory nor clears it each time.
#[derive(Default)]
struct Scratch {
    /// Lines of the image after the horizontal pass, as long as later bands need them.
    narrowed: Vec<u8>,
    /// One band after both passes.
    band: Vec<u8>,
}

/// A thread gives back scratch beyond this many bytes. Bands of images of usual sizes need a tenth of it.
const KEPT: usize = 16 << 20;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Resizes the image to the grid's size, antialiased and bicubic, and writes its patches to `out`, which is
/// `grid.rows() * grid.row_len()` elements long. A side that keeps its length is not filtered.
pub(crate) fn write(
    kernels: Implementation,
    image: RgbView<'_>,
    grid: &PatchGrid,
    elements: Elements<'_>,
    out: &mut [u8],
) {
    let ImageSize { width, height } = image.size();
    let weights = |from: u32, to| (from as usize != to).then(|| Weights::bicubic(from as usize, to));
    let horizontal = weights(width, grid.image_width());
    let vertical = weights(height, grid.image_height());
    if horizontal.is_none() && vertical.is_none() {
        return kernels.patchify(image.pixels(), grid, elements, out);
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let resize = Resize { kernels, image, horizontal, vertical };
        resize.write(scratch, grid, elements, out);
        if scratch.narrowed.len() + scratch.band.len() > KEPT {
            *scratch = Scratch::default();
        }
    });
}

struct Resize<'a> {
    kernels: Implementation,
    image: RgbView<'a>,
    /// `None` where a side keeps its length.
    horizontal: Option<Weights>,
    vertical: Option<Weights>,
}

impl Resize<'_> {
    fn write(&self, scratch: &mut Scratch, grid: &PatchGrid, elements: Elements<'_>, out: &mut [u8]) {
        let Scratch { narrowed, band } = scratch;
        let part = grid.band();
        let row = 3 * grid.image_width();
        let lines_per_band = part.image_height();
        // Lines of the image that `narrowed` holds.
        let mut held = 0..0;
        let parts = out.chunks_exact_mut(elements.size() * part.rows() * part.row_len());
        for (index, out) in parts.enumerate() {
            let lines = index * lines_per_band..(index + 1) * lines_per_band;
            let needed = self.vertical.as_ref().map_or(lines.clone(), |weights| weights.inputs(lines.clone()));
            let (source, first) = match &self.horizontal {
                Some(weights) => {
                    self.narrow(weights, needed.clone(), &mut held, narrowed);
                    (narrowed.as_slice(), held.start)
                }
                None => (self.image.pixels(), 0),
            };
            let Some(weights) = &self.vertical else {
                self.kernels.patchify(&source[..row * lines.len()], &part, elements, out);
                continue;
            };
            let band = at_least(band, row * lines.len());
            for (line, out) in lines.zip(band.chunks_exact_mut(row)) {
                let window = weights.window(line);
                let inputs = &source[row * (window.range.start - first)..row * (window.range.end - first)];
                self.kernels.vertical(inputs, &window, out);
            }
            self.kernels.patchify(band, &part, elements, out);
        }
    }

    /// Makes `narrowed` hold the `needed` lines, from the first on. What it holds of them already is moved, not made
    /// again.
    fn narrow(&self, weights: &Weights, needed: Range<usize>, held: &mut Range<usize>, narrowed: &mut Vec<u8>) {
        let width = self.image.size().width as usize;
        let row = 3 * weights.len();
        let made = if held.contains(&needed.start) { held.end.min(needed.end) } else { needed.start };
        let kept = row * (made - needed.start);
        let lines = at_least(narrowed, row * needed.len().max(held.len()));
        if kept > 0 {
            let from = row * (needed.start - held.start);
            lines.copy_within(from..from + kept, 0);
        }
        let pixels = &self.image.pixels()[3 * width * made..];
        self.kernels.horizontal(pixels, width, weights, &mut lines[kept..row * needed.len()]);
        *held = needed;
    }
}

/// The first `length` bytes, of which there may have been fewer.
fn at_least(bytes: &mut Vec<u8>, length: usize) -> &mut [u8] {
    if bytes.len() < length {
        bytes.resize(length, 0);
    }
    &mut bytes[..length]
}
