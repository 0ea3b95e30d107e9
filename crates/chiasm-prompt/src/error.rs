//! What can go wrong between a conversation and its token ids, and whose fault it is.

use std::path::PathBuf;

use chiasm_types::Modality;

/// An error of this crate. [`PromptError::is_request_fault`] tells a bad request from a bad model
/// directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PromptError {
    /// A file of the model directory can't be read.
    #[error("cannot read {path}: {source}; check the model directory")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A chat template that somebody gave is no file, and no template either.
    #[error(
        "cannot open the chat template {given}: {source}; give a file, or a template, which has a brace or a line break"
    )]
    NoTemplate {
        /// What was given.
        given: PathBuf,
        /// Why it can't be opened.
        source: std::io::Error,
    },
    /// A JSON file of the model directory doesn't hold what it should.
    #[error("{path} is not usable: {reason}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There are several chat templates and none of them is named `default`.
    #[error(
        "the chat templates of {path} ({names}) have no default; choose one by a template file of its own"
    )]
    NoDefaultTemplate {
        /// The file that has them.
        path: PathBuf,
        /// Their names, comma-separated.
        names: String,
    },
    /// The chat template can't be compiled.
    #[error("the chat template of {origin} does not compile: {reason}")]
    TemplateSyntax {
        /// The file that has the template.
        origin: String,
        /// The compiler's words, with the line.
        reason: String,
    },
    /// The chat template refused the conversation by `raise_exception`.
    #[error("the chat template refused the messages: {message}")]
    TemplateRefused {
        /// The template's own words.
        message: String,
    },
    /// The chat template failed on this conversation.
    #[error("the chat template failed on the messages: {reason}")]
    TemplateFailed {
        /// The engine's words, with the line.
        reason: String,
    },
    /// Rendering took more steps than allowed.
    #[error("rendering the messages takes more than {fuel} template steps; send fewer messages")]
    TemplateTooSlow {
        /// The allowed steps, [`RenderLimits::fuel`](crate::RenderLimits::fuel).
        fuel: u64,
    },
    /// The rendered prompt is longer than allowed.
    #[error("the rendered prompt is longer than {limit} bytes; send less text")]
    TooLong {
        /// The allowed length, [`RenderLimits::bytes`](crate::RenderLimits::bytes).
        limit: usize,
    },
    /// There is no message.
    #[error("the conversation is empty; send at least one message")]
    NoMessages,
    /// A message's `tool_calls` aren't what the API defines.
    #[error(
        "tool_calls of message {index} must be a list of objects with id, type function and a function with name and arguments as text"
    )]
    BadToolCalls {
        /// The message's position, from 0.
        index: usize,
    },
    /// A name in `chat_template_kwargs` that would replace an argument of the renderer itself.
    #[error("chat_template_kwargs may not set {name}; remove it")]
    ReservedKwarg {
        /// The name.
        name: String,
    },
    /// Both `add_generation_prompt` and `continue_final_message`.
    #[error(
        "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
    )]
    ContinueAndGenerate,
    /// `continue_final_message` with a conversation whose end can't be continued.
    #[error("continue_final_message is set, but {reason}")]
    CannotContinue {
        /// Why not.
        reason: &'static str,
    },
    /// A message's text holds more image placeholders than the message has images.
    #[error(
        "the text of message {index} holds more image placeholders ({placeholder}) than it has images; remove them from the text"
    )]
    PlaceholderInText {
        /// The message's position, from 0.
        index: usize,
        /// The placeholder's text.
        placeholder: String,
    },
    /// The prompt has another number of image markers than images.
    #[error(
        "the prompt holds {markers} {modality} markers for {items} {modality} items; {modality} tokens written into the text are not allowed, and the chat template must place each item once"
    )]
    MarkerCount {
        /// What kind of items.
        modality: Modality,
        /// Markers in the prompt.
        markers: usize,
        /// Items in the request.
        items: usize,
    },
    /// An item that expands to no token.
    #[error("media item {index} expands to no token; its plan is wrong")]
    EmptyItem {
        /// The item's position, from 0.
        index: usize,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed on the prompt: {reason}")]
    Encode {
        /// The tokenizer's words.
        reason: String,
    },
}

impl PromptError {
    /// Whether the request is to blame (HTTP 400) rather than the model directory or this server
    /// (HTTP 500).
    pub fn is_request_fault(&self) -> bool {
        match self {
            Self::Unreadable { .. }
            | Self::NoTemplate { .. }
            | Self::BadFile { .. }
            | Self::NoDefaultTemplate { .. }
            | Self::TemplateSyntax { .. }
            | Self::EmptyItem { .. } => false,
            Self::TemplateRefused { .. }
            | Self::TemplateFailed { .. }
            | Self::TemplateTooSlow { .. }
            | Self::TooLong { .. }
            | Self::NoMessages
            | Self::BadToolCalls { .. }
            | Self::ReservedKwarg { .. }
            | Self::ContinueAndGenerate
            | Self::CannotContinue { .. }
            | Self::PlaceholderInText { .. }
            | Self::MarkerCount { .. }
            | Self::Encode { .. } => true,
        }
    }

    /// The request field to name in the answer, where one is to blame.
    pub fn parameter(&self) -> Option<&'static str> {
        match self {
            Self::ReservedKwarg { .. } => Some("chat_template_kwargs"),
            Self::ContinueAndGenerate | Self::CannotContinue { .. } => {
                Some("continue_final_message")
            }
            Self::BadToolCalls { .. } => Some("tool_calls"),
            Self::TemplateRefused { .. }
            | Self::TemplateFailed { .. }
            | Self::TemplateTooSlow { .. }
            | Self::TooLong { .. }
            | Self::NoMessages
            | Self::PlaceholderInText { .. }
            | Self::MarkerCount { .. } => Some("messages"),
            _ => None,
        }
    }
}
