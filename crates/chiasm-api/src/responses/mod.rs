//! OpenAI's Responses API, translated to the types of chat completions. No state is kept between
//! requests.
//!
//! | module | is |
//! |---|---|
//! | `request` | a body to a [`GenerateRequest`](chiasm_request::GenerateRequest) |
//! | `content` | the content of an item of `input` |
//! | `input` | the items of `input` to messages |
//! | `tools` | functions in their flat form, and other tools as functions |
//! | `custom_input` | the input of custom tools |
//! | `response` | the response object |
//! | `item` | the items of the output |
//! | `output` | the model's answer to output items, and the order of the events |
//! | `events` | the form and the numbers of a stream's events |
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
