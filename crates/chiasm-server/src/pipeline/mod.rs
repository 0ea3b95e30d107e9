//! The way of a request, from parsed fields to tokens: the only place that sees media, prompt, vision, KV, router and
//! engine together.
//!
//! [`prepare`](prepare::prepare) needs no pixel: it ends with the expanded prompt, the identity of its media items and
//! its block keys. [`Generation`] picks a worker, hands over the pixels and yields the answer.

mod choice;
mod generation;
mod pixels;
mod plans;
mod prepare;
mod processed;
mod request;
mod sampling;
mod turns;

pub use choice::{ChoiceDelta, Finish, FinishedChoice, TokenLogprob};
pub use generation::{Attempted, Generation, Transfer, collect};
pub use plans::Plans;
pub use prepare::{MediaItem, Prepared, prepare};
pub use processed::ProcessedImages;
pub use request::{Caller, Chat, GenerateRequest, MediaRef, Prompt, Sampling};
