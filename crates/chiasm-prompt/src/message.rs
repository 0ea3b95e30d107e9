//! The conversation passed to a chat template: parsed, with media items reduced to their positions.

use chiasm_types::Modality;
use serde_json::{Map, Value};

/// One message of a conversation.
///
/// ```
/// use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
/// use chiasm_types::Modality;
///
/// let message = ChatMessage {
///     role: "user".into(),
///     content: Some(ChatContent::Parts(vec![
///         ChatPart::Media(Modality::Image),
///         ChatPart::Text("What is this?".into()),
///     ])),
///     ..ChatMessage::default()
/// };
/// assert_eq!(message.text_bytes(), 13);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool` or another role that the template knows.
    pub role: String,
    /// The text and media items. `None` in an assistant message that only calls tools.
    pub content: Option<ChatContent>,
    /// The speaker's name, if the client set one.
    pub name: Option<String>,
    /// The id of the call that a `tool` message answers. Ignored for other roles.
    pub tool_call_id: Option<String>,
    /// The calls of an `assistant` message: a list of `{"id", "type": "function", "function":
    /// {"name", "arguments"}}` with `arguments` as JSON text. Ignored for other roles.
    pub tool_calls: Option<Value>,
    /// The model's reasoning before an `assistant` message. Ignored for other roles.
    pub reasoning: Option<String>,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatContent {
    /// The `content` was a string.
    Text(String),
    /// The `content` was a list of parts.
    Parts(Vec<ChatPart>),
}

/// One part of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatPart {
    /// A text.
    Text(String),
    /// The position of the next media item of this modality.
    Media(Modality),
    /// A text or media item with extra fields that the template reads, such as the language of a
    /// text to translate.
    Extended(Box<ExtendedPart>),
}

/// A part with fields that no API defines and the template reads.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtendedPart {
    /// The text or media item. Never [`ChatPart::Extended`].
    pub part: ChatPart,
    /// The extra fields. They follow the part's own keys in its dict, and are dropped if the
    /// template takes content as a string.
    pub fields: Map<String, Value>,
}

impl ChatPart {
    /// Returns the part's text; `None` for a media item.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Media(_) => None,
            Self::Extended(extended) => extended.part.text(),
        }
    }
}

impl ChatMessage {
    /// Returns the bytes of text in the content and the reasoning. Media items are not counted.
    pub fn text_bytes(&self) -> usize {
        let content = match &self.content {
            None => 0,
            Some(ChatContent::Text(text)) => text.len(),
            Some(ChatContent::Parts(parts)) => {
                parts.iter().filter_map(ChatPart::text).map(str::len).sum()
            }
        };
        content + self.reasoning.as_ref().map_or(0, String::len)
    }
}
