//! The endpoints: parse, prepare, generate, and put the answer into the API's shape.
//!
//! | module | is |
//! |---|---|
//! | `completions` | OpenAI's chat completions and completions |
//! | `responses` | OpenAI's Responses API |
//! | `messages` | Anthropic's Messages API |
//! | `tokenize` | prompts as tokens, and back |
//! | `lora` | LoRA adapters that are loaded and unloaded |

pub(crate) mod completions;
pub(crate) mod lora;
pub(crate) mod messages;
mod model;
pub(crate) mod responses;
pub(crate) mod tokenize;

pub(crate) use model::find_model;
