//! The endpoints: parse, prepare, generate, and format the answer for the API.
//!
//! | module | is |
//! |---|---|
//! | `completions` | OpenAI's chat completions and completions |
//! | `responses` | OpenAI's Responses API |
//! | `messages` | Anthropic's Messages API |
//! | `tokenize` | prompts as tokens, and back |
//! | `lora` | loading and unloading LoRA adapters |

pub(crate) mod completions;
pub(crate) mod lora;
pub(crate) mod messages;
mod model;
pub(crate) mod responses;
pub(crate) mod tokenize;

pub(crate) use model::find_model;
