//! Owners of requests, and limits per key.
//!
//! | item | purpose |
//! |---|---|
//! | [`Owner`] | the client that a connection or a request is accounted to |
//! | [`KeyedLimiter`] | a fixed number of permits per key, such as one per media item |
#![forbid(unsafe_code)]

mod keyed;
mod owner;

pub use keyed::{KeyedLimiter, KeyedPermit};
pub use owner::Owner;
