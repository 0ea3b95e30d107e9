//! The pixel loops, and the one place that chooses among their implementations.
//!
//! One folder per operation, in it one file per instruction set; `scalar` is the reference that the
//! others must equal bit for bit. Everything here is about bytes and extents: no settings, no model
//! families.
//!
//! | module | holds |
//! |---|---|
//! | `dispatch` | [`Implementation`]: what this CPU runs, and the calls through it |
//! | `layer` | what is written: a part of the image, resized, laid onto a canvas, in a layout |
//! | `parallelism` | [`Parallelism`]: whose threads do it |
//! | `alone` | a stage by itself, for measurements |
//! | `bands` | the whole way from an image to its tensor, a few lines at a time |
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
pub(crate) use dispatch::{Elements, VARIABLE};
pub(crate) use layer::{Layer, Layout, Region};
pub(crate) use normalize::{ChannelTable, MeanStd, Normalization};
pub use parallelism::Parallelism;
pub(crate) use patchify::PatchGrid;
pub(crate) use resize::Filter;
pub(crate) use tiles::TileGrid;

#[cfg(test)]
mod tests;
