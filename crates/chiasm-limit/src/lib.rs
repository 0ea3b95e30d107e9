//! Owners of requests, and limits that hold for each of many keys.
//!
//! | part | is |
//! |---|---|
//! | [`Owner`] | the party that a connection or a request belongs to |
//! | [`KeyedLimiter`] | a number of permits for each key, such as one for each media item |
#![forbid(unsafe_code)]

mod keyed;
mod owner;

pub use keyed::{KeyedLimiter, KeyedPermit};
pub use owner::Owner;
