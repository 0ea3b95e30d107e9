//! SGLang's own server, driven through `/generate`. A request has the prompt's tokens with one
//! marker for each image, and the images as the client sent them, under our identities. The server
//! answers with tokens.
//!
//! | module | contents |
//! |---|---|
//! | `info` | the description of a server, as capabilities |
//! | `request` | conversion of a job to the bodies of requests, one for each choice |
//! | `answer` | one event of an answer, and the part of a choice that it adds |
//! | `running` | a running job |

mod answer;
mod info;
mod request;
mod running;

pub(crate) use info::{RequestRules, SglangInfo};
pub(crate) use running::begin;

/// The path for generating.
pub(crate) const GENERATE: &str = "generate";
