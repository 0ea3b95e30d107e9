//! Parts that several of the measuring programs have: how they are called, how they end, and how
//! they ask frontends over HTTP.
//!
//! | module | is |
//! |---|---|
//! | [`arguments`] | the flags of a command |
//! | [`numbers`] | medians, quantiles, Zipf's law |
//! | [`ending`] | programs that end what they have started |
//! | [`programs`] | ports and logs of programs that are started |
//! | [`http`] | a connection to a frontend |
//! | [`body`], [`picture`] | a request's body; JPEG files, no two alike |

#![forbid(unsafe_code)]

pub mod arguments;
#[cfg(any(feature = "door", feature = "serve"))]
pub mod body;
pub mod ending;
#[cfg(any(feature = "door", feature = "serve"))]
pub mod http;
pub mod numbers;
#[cfg(any(feature = "door", feature = "serve"))]
pub mod picture;
#[cfg(any(feature = "door", feature = "serve"))]
pub mod programs;
