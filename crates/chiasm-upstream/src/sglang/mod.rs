//! SGLang's own server, driven by `/generate`: it is given the prompt's tokens with one marker for
//! each image, the images as the client sent them under our identities, and answers with tokens.
//!
//! | module | is |
//! |---|---|
//! | `found` | what a server says of itself, as capabilities |
//! | `request` | a job as the bodies of requests, one for each continuation |
//! | `answer` | what one event of an answer says, and what it adds to a continuation |
//! | `running` | one job that runs |

mod answer;
mod found;
mod request;
mod running;

pub(crate) use found::{Found, Manner};
pub(crate) use running::begin;

/// Where a server generates.
pub(crate) const GENERATE: &str = "generate";
