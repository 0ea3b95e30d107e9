//! Errors between a conversation and its token ids.

use std::path::PathBuf;

use chiasm_types::Modality;

/// An error of this crate.
///
/// [`PromptError::is_request_fault`] separates a bad request from a bad model directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PromptError {
    /// A file of the model directory cannot be read.
    #[error("cannot read {path}: {source}; check the model directory")]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The configured chat template is neither a readable file nor template text.
    #[error(
        "cannot open the chat template {given}: {source}; \
         give the path of a file; text counts as a template only if it has a brace or a line break"
    )]
    NoTemplate {
        /// The configured value.
        given: PathBuf,
        /// The error of opening it as a file.
        source: std::io::Error,
    },
    /// A JSON file of the model directory has unexpected contents.
    #[error("{path} is not usable: {reason}")]
    BadFile {
        /// The path of the file.
        path: PathBuf,
        /// The defect.
        reason: String,
    },
    /// A model has several chat templates, and none of them is named `default`.
    #[error(
        "none of the chat templates of {path} ({names}) is named default; \
         give one of them with --chat-template FILE"
    )]
    NoDefaultTemplate {
        /// The path of the file with the templates.
        path: PathBuf,
        /// The names of the templates, comma-separated.
        names: String,
    },
    /// The chat template does not compile.
    #[error("the chat template of {origin} does not compile: {reason}")]
    TemplateSyntax {
        /// The file with the template.
        origin: String,
        /// The compiler's message, with the line.
        reason: String,
    },
    /// The chat template refused the conversation with `raise_exception`.
    #[error("the chat template refused the messages: {message}")]
    TemplateRefused {
        /// The template's message.
        message: String,
    },
    /// The chat template failed on this conversation.
    #[error("the chat template failed on the messages: {reason}")]
    TemplateFailed {
        /// The template engine's message, with the line.
        reason: String,
    },
    /// Rendering took more steps than allowed.
    #[error("rendering the messages takes more than {fuel} template steps; send fewer messages")]
    TemplateTooSlow {
        /// The maximum number of steps, [`RenderLimits::fuel`](crate::RenderLimits::fuel).
        fuel: u64,
    },
    /// The rendered prompt is longer than allowed.
    #[error("the rendered prompt is longer than {limit} bytes; send less text")]
    TooLong {
        /// The maximum length in bytes, [`RenderLimits::bytes`](crate::RenderLimits::bytes).
        limit: usize,
    },
    /// The conversation has no messages.
    #[error("the conversation is empty; send at least one message")]
    NoMessages,
    /// A message's `tool_calls` do not match the API's definition.
    #[error(
        "tool_calls of message {index} must be a list of objects with an id, type \"function\", \
         and a function whose name and arguments are strings"
    )]
    BadToolCalls {
        /// The index of the message, from 0.
        index: usize,
    },
    /// `chat_template_kwargs` sets an argument of the renderer itself.
    #[error("chat_template_kwargs may not set {name}; remove it")]
    ReservedKwarg {
        /// The name of the argument.
        name: String,
    },
    /// Both `add_generation_prompt` and `continue_final_message` are set.
    #[error(
        "add_generation_prompt and continue_final_message cannot both be true; \
         set one of them to false"
    )]
    ContinueAndGenerate,
    /// `continue_final_message` is set, but the conversation's end cannot be continued.
    #[error("continue_final_message is set, but {reason}")]
    CannotContinue {
        /// The reason.
        reason: &'static str,
    },
    /// A message's text holds more image placeholders than the message has images.
    #[error(
        "the text of message {index} has more image placeholders ({placeholder}) \
         than the message has images; remove them from the text"
    )]
    PlaceholderInText {
        /// The index of the message, from 0.
        index: usize,
        /// The placeholder's text.
        placeholder: String,
    },
    /// The numbers of markers and items of a modality differ.
    #[error(
        "the prompt has {markers} {modality} markers for {items} {modality} items; \
         special {modality} tokens in the text are not allowed, \
         and the chat template must place each item once"
    )]
    MarkerCount {
        /// The modality.
        modality: Modality,
        /// The number of its markers in the prompt.
        markers: usize,
        /// The number of its items in the request.
        items: usize,
    },
    /// A media item expands to no token.
    #[error("media item {index} expands to no token; its plan is wrong")]
    EmptyItem {
        /// The index of the item, from 0.
        index: usize,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed on the prompt: {reason}")]
    Encode {
        /// The tokenizer's message.
        reason: String,
    },
}

impl PromptError {
    /// Returns `true` if the request caused the error (HTTP 400), `false` if the model directory or
    /// this server did (HTTP 500).
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

    /// Returns the request field that caused the error, if there is one.
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
