//! The pixel loops, and the run-time dispatch among their implementations.
//!
//! Each operation has a folder with one file per instruction set. `scalar` is the reference that
//! the others must equal bit for bit. This module knows bytes and extents, but no settings and no
//! model families.
//!
//! | module | contents |
//! |---|---|
//! | `dispatch` | [`Implementation`]: the implementations that this CPU can run, and calls into them |
//! | `layer` | the geometry of one output layer: source region, resize, canvas and layout |
//! | `parallelism` | [`Parallelism`]: the threads to use |
//! | `alone` | the resize stage by itself, for benchmarks |
//! | `bands` | the pipeline from an image to its tensor, a few rows at a time |
//! | `resize/`, `patchify/`, `tiles/`, `normalize/` | one operation each |

#[cfg(feature = "bench")]
mod alone;
mod bands;
#[allow(unsafe_code, reason = "calls of functions that need CPU features")]
mod dispatch;
mod layer;
mod normalize;
mod parallelism;
mod patchify;
mod resize;
mod tiles;

#[cfg(feature = "bench")]
pub use alone::resize_bicubic;
pub(crate) use bands::{Job, Resampler};
pub use dispatch::Implementation;
pub(crate) use dispatch::{Elements, KERNELS_ENV};
pub(crate) use layer::{Layer, Layout, Region};
pub(crate) use normalize::{ChannelTable, MeanStd, Normalization};
pub use parallelism::Parallelism;
pub(crate) use patchify::PatchGrid;
pub(crate) use resize::Filter;
pub(crate) use tiles::TileGrid;

#[cfg(test)]
mod tests;
