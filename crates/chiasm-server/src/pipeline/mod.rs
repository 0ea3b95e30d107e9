//! The way of a request, from parsed fields to tokens: the only place that sees media, prompt, vision, KV, router and
//! engine together.
//!
//! [`prepare`](prepare::prepare) needs no pixel: it ends with the expanded prompt, the identity of its media items and
//! its block keys. [`Generation`] picks a worker, hands over the pixels and yields the answer.

mod choice;
mod generation;
mod pixels;
mod prepare;
mod request;
mod sampling;

pub use choice::{ChoiceDelta, Finish, FinishedChoice, TokenLogprob};
pub use generation::{Attempted, Generation, Transfer, collect};
pub use prepare::{MediaItem, Prepared, prepare};
pub use request::{Chat, GenerateRequest, MediaRef, Prompt, Sampling};
