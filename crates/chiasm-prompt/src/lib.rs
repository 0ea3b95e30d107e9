//! Turns a conversation into token ids, and token ids back into text.
//!
//! | step | item |
//! |---|---|
//! | messages → prompt text | [`ChatTemplate`]: renders the model's Jinja template |
//! | text → token ids | [`Tokenizer`] |
//! | one marker per media item → the tokens of its placeholder | [`expand`] |
//! | the answer's tokens → text in whole characters | [`Detokenizer`] |
//! | text → text that ends at a stop string | [`StopStrings`] |
//!
//! The reference is vLLM 0.33 with `transformers` 5.20: the same request must become the same token
//! ids. Everything here is synchronous CPU work, without I/O after loading.
//!
//! ```no_run
//! use chiasm_prompt::{
//!     ChatContent, ChatMessage, ChatTemplate, Detokenizer, RenderOptions, Tokenizer,
//! };
//!
//! # fn main() -> Result<(), chiasm_prompt::PromptError> {
//! let dir = std::path::Path::new("models/qwen2-vl");
//! let tokenizer = Tokenizer::from_model_dir(dir)?;
//! let Some(template) = ChatTemplate::from_model_dir(dir, None)? else { return Ok(()) };
//!
//! let hello = ChatMessage {
//!     role: "user".into(),
//!     content: Some(ChatContent::Text("Hello!".into())),
//!     ..ChatMessage::default()
//! };
//! let text = template.render(&[hello], &[], &RenderOptions::default())?;
//! let prompt = tokenizer.encode(&text, false)?;
//!
//! let mut answer = Detokenizer::new(tokenizer.clone(), &prompt, true);
//! for token in tokenizer.encode("Hi there.", false)? {
//!     print!("{}", answer.push(token));
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod detokenize;
mod error;
mod expand;
mod message;
mod model_file;
mod special_tokens;
mod stop;
mod template;
mod tokenizer;

pub use detokenize::Detokenizer;
pub use error::PromptError;
pub use expand::{Expanded, Item, Marker, Markers, expand};
pub use message::{ChatContent, ChatMessage, ChatPart, ExtendedPart};
pub use stop::{StopStep, StopStrings};
pub use template::{
    ChatTemplate, ContentFormat, MarkerText, RenderLimits, RenderOptions, check_template_kwargs,
};
pub use tokenizer::{TokenCacheCounts, Tokenizer};
