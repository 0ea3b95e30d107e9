//! Run-time selection of the implementation of the pixel loops.

use std::fmt;
use std::sync::LazyLock;

use super::ChannelTable;
use super::patchify::{self, PatchGrid};
use super::resize::{self, FixedPoint, Weights};
use super::tiles::{self, TileGrid};

/// The environment variable that forces an [`Implementation`], for debugging.
pub(crate) const KERNELS_ENV: &str = "CHIASM_KERNELS";

/// An implementation of the pixel loops that this CPU can run. All of them write the same bits.
///
/// A [`crate::VisionModel`] uses the fastest one by default. The environment variable
/// `CHIASM_KERNELS`, read once per process, or [`crate::VisionModel::with_implementation`] selects
/// another one.
///
/// | name | requires |
/// |---|---|
/// | `scalar` | nothing |
/// | `avx2` | x86-64 with AVX2 |
/// | `avx512` | x86-64 with AVX-512 F, BW, VBMI and VNNI: Intel since Ice Lake, AMD since Zen 4 |
/// | `neon` | 64-bit ARM |
#[derive(Clone, Copy)]
pub struct Implementation(&'static Table);

/// The functions of one implementation. All of them take packed RGB.
///
/// The functions may require CPU features. Only [`supported`] hands out tables, and only those
/// whose features the CPU has.
struct Table {
    name: &'static str,
    resize_i16: Passes<i16>,
    resize_i32: Passes<i32>,
    patchify: unsafe fn(&[u8], &PatchGrid, &mut [u8]),
    patchify_2: unsafe fn(&[u8], &PatchGrid, &ChannelTable<2>, &mut [u8]),
    patchify_4: unsafe fn(&[u8], &PatchGrid, &ChannelTable<4>, &mut [u8]),
    tiles: unsafe fn(&[u8], usize, &TileGrid, &mut [u8]),
    tiles_2: unsafe fn(&[u8], usize, &TileGrid, &ChannelTable<2>, &mut [u8]),
    tiles_4: unsafe fn(&[u8], usize, &TileGrid, &ChannelTable<4>, &mut [u8]),
}

static SCALAR: Table = Table {
    name: "scalar",
    resize_i16: Passes {
        horizontal: resize::scalar::horizontal,
        vertical: resize::scalar::vertical,
    },
    resize_i32: Passes {
        horizontal: resize::scalar::horizontal,
        vertical: resize::scalar::vertical,
    },
    patchify: patchify::scalar::copy,
    patchify_2: patchify::scalar::map,
    patchify_4: patchify::scalar::map,
    tiles: tiles::scalar::copy,
    tiles_2: tiles::scalar::map,
    tiles_4: tiles::scalar::map,
};

#[cfg(target_arch = "x86_64")]
static AVX2: Table = Table {
    name: "avx2",
    resize_i16: Passes { horizontal: resize::avx2::horizontal, vertical: resize::avx2::vertical },
    resize_i32: Passes { horizontal: resize::avx2::horizontal, vertical: resize::avx2::vertical },
    patchify: patchify::avx2::copy,
    // Without instructions for lookups in 256-byte tables, vectors gain nothing here (measured).
    patchify_2: patchify::scalar::map,
    patchify_4: patchify::scalar::map,
    tiles: tiles::avx2::copy,
    tiles_2: tiles::scalar::map,
    tiles_4: tiles::scalar::map,
};

#[cfg(target_arch = "x86_64")]
static AVX512: Table = Table {
    name: "avx512",
    resize_i16: Passes {
        horizontal: resize::avx512::horizontal,
        vertical: resize::avx512::vertical,
    },
    resize_i32: Passes {
        horizontal: resize::avx512::horizontal,
        vertical: resize::avx512::vertical,
    },
    patchify: patchify::avx512::copy,
    patchify_2: patchify::avx512::map,
    patchify_4: patchify::avx512::map,
    tiles: tiles::avx512::copy,
    tiles_2: tiles::avx512::map,
    tiles_4: tiles::avx512::map,
};

#[cfg(target_arch = "aarch64")]
static NEON: Table = Table {
    name: "neon",
    resize_i16: Passes { horizontal: resize::neon::horizontal, vertical: resize::neon::vertical },
    resize_i32: Passes { horizontal: resize::neon::horizontal, vertical: resize::neon::vertical },
    patchify: patchify::neon::copy,
    // Without instructions for lookups in 256-byte tables, vectors should gain little here (not
    // measured).
    patchify_2: patchify::scalar::map,
    patchify_4: patchify::scalar::map,
    tiles: tiles::neon::copy,
    tiles_2: tiles::scalar::map,
    tiles_4: tiles::scalar::map,
};

/// Detects the implementations that this CPU can run, from the slowest to the fastest.
fn supported() -> Vec<Implementation> {
    #[allow(unused_mut, reason = "other architectures add nothing")]
    let mut supported = vec![Implementation(&SCALAR)];
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("neon") {
        supported.push(Implementation(&NEON));
    }
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") {
            supported.push(Implementation(&AVX2));
            if has!("avx512f") && has!("avx512bw") && has!("avx512vbmi") && has!("avx512vnni") {
                supported.push(Implementation(&AVX512));
            }
        }
    }
    supported
}

static SUPPORTED: LazyLock<Vec<Implementation>> = LazyLock::new(supported);

/// The implementation that [`KERNELS_ENV`] selects, read once per process.
static SELECTED: LazyLock<Result<Implementation, UnknownName>> = LazyLock::new(|| {
    let name = std::env::var_os(KERNELS_ENV);
    select(name.as_deref().unwrap_or_default().to_string_lossy().as_ref())
});

/// The error for a name that is not an implementation that this CPU can run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("this CPU can run no implementation {0:?}")]
pub(crate) struct UnknownName(pub(crate) String);

/// Returns the implementation with this name; the fastest one for an empty name.
fn select(name: &str) -> Result<Implementation, UnknownName> {
    let mut available = Implementation::available();
    if name.is_empty() {
        return Ok(available.last().unwrap_or(Implementation(&SCALAR)));
    }
    available
        .find(|implementation| implementation.name() == name)
        .ok_or_else(|| UnknownName(name.to_owned()))
}

impl Implementation {
    /// Returns the implementations that this CPU can run, from the slowest to the fastest; never
    /// empty.
    pub fn available() -> impl Iterator<Item = Self> {
        SUPPORTED.iter().copied()
    }

    /// Returns the name, for instance `avx2`.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Returns the implementation to use by default.
    ///
    /// # Errors
    /// Fails if this CPU has no implementation with the name in [`KERNELS_ENV`].
    pub(crate) fn selected() -> Result<Self, &'static UnknownName> {
        SELECTED.as_ref().copied()
    }

    /// Runs the horizontal pass of the resize. See [`resize::scalar::horizontal`].
    pub(super) fn horizontal<T: Resize>(
        self,
        pixels: &[u8],
        row_stride: usize,
        weights: &Weights<T>,
        out: &mut [u8],
    ) {
        // SAFETY: a table is only handed out where the CPU has its features.
        unsafe { (T::passes(self).horizontal)(pixels, row_stride, weights, out) }
    }

    /// Runs the vertical pass of the resize. See [`resize::scalar::vertical`].
    pub(super) fn vertical<T: Resize>(
        self,
        rows: &[u8],
        row_stride: usize,
        weights: &Weights<T>,
        output: usize,
        out: &mut [u8],
    ) {
        // SAFETY: as above.
        unsafe { (T::passes(self).vertical)(rows, row_stride, weights, output, out) }
    }

    /// Cuts an image into rows of patches. See [`patchify::scalar::copy`].
    pub(super) fn patchify(
        self,
        pixels: &[u8],
        grid: &PatchGrid,
        elements: Elements<'_>,
        out: &mut [u8],
    ) {
        // SAFETY: a table is only handed out where the CPU has its features.
        unsafe {
            match elements {
                Elements::Raw => (self.0.patchify)(pixels, grid, out),
                Elements::Two(table) => (self.0.patchify_2)(pixels, grid, table, out),
                Elements::Four(table) => (self.0.patchify_4)(pixels, grid, table, out),
            }
        }
    }

    /// Copies rows of an image, starting at row `y`, into the tiles. See [`tiles::scalar::copy`].
    pub(super) fn tiles(
        self,
        lines: &[u8],
        y: usize,
        grid: &TileGrid,
        elements: Elements<'_>,
        out: &mut [u8],
    ) {
        // SAFETY: as above.
        unsafe {
            match elements {
                Elements::Raw => (self.0.tiles)(lines, y, grid, out),
                Elements::Two(table) => (self.0.tiles_2)(lines, y, grid, table, out),
                Elements::Four(table) => (self.0.tiles_4)(lines, y, grid, table, out),
            }
        }
    }
}

impl fmt::Debug for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Implementation({})", self.0.name)
    }
}

/// The two passes of a resize with weights of one precision.
pub(super) struct Passes<T: 'static> {
    horizontal: unsafe fn(&[u8], usize, &Weights<T>, &mut [u8]),
    vertical: unsafe fn(&[u8], usize, &Weights<T>, usize, &mut [u8]),
}

/// A precision of weights that the resizing loops support.
pub(super) trait Resize: FixedPoint {
    /// Returns the passes of an implementation for this precision.
    fn passes(kernels: Implementation) -> &'static Passes<Self>;
}

impl Resize for i16 {
    fn passes(kernels: Implementation) -> &'static Passes<Self> {
        &kernels.0.resize_i16
    }
}

impl Resize for i32 {
    fn passes(kernels: Implementation) -> &'static Passes<Self> {
        &kernels.0.resize_i32
    }
}

/// The conversion of an 8-bit channel value to an output element.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a> {
    /// The value itself, as an element of 1 byte.
    Raw,
    /// An element of 2 bytes, from the table.
    Two(&'a ChannelTable<2>),
    /// An element of 4 bytes, from the table.
    Four(&'a ChannelTable<4>),
}

impl Elements<'_> {
    /// Returns the size of an element in bytes.
    pub(super) const fn size(self) -> usize {
        match self {
            Self::Raw => 1,
            Self::Two(_) => 2,
            Self::Four(_) => 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_name_selects_its_implementation() {
        for implementation in Implementation::available() {
            assert_eq!(select(implementation.name()).unwrap().name(), implementation.name());
        }
        assert_eq!(select("").unwrap().name(), Implementation::available().last().unwrap().name());
        for unknown in ["neon2", "Scalar", " avx2"] {
            assert_eq!(select(unknown).unwrap_err(), UnknownName(unknown.to_owned()));
        }
    }
}
