//! OpenAI's Responses API as a translation to what chat completions use. Nothing is kept between
//! requests.
//!
//! | module | is |
//! |---|---|
//! | `request` | a body to a [`GenerateRequest`](chiasm_request::GenerateRequest) |
//! | `content` | what an item of `input` says |
//! | `input` | the items of `input` to messages |
//! | `tools` | functions in their flat form, and other tools as functions |
//! | `custom_input` | what custom tools are given |
//! | `response` | the response object |
//! | `item` | the items of the output |
//! | `output` | what the model says to output items |
//! | `events` | what a stream tells of them |
//! | `logprobs` | the log probabilities of the text |

mod content;
mod custom_input;
mod events;
#[cfg(test)]
pub(crate) mod in_tests;
mod input;
mod item;
mod logprobs;
mod output;
mod request;
mod response;
mod tools;

pub use self::logprobs::LogprobWriter;
pub use self::output::Answer;
pub use self::request::ResponsesRequest;
pub use self::response::Head;
