//! A conversation as the chat template's user hands it over: parsed, with media items reduced to
//! their places.

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
///     content: Some(ChatContent::Parts(vec![ChatPart::Media(Modality::Image), ChatPart::Text("What is this?".into())])),
///     ..ChatMessage::default()
/// };
/// assert_eq!(message.text_bytes(), 13);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool` or whatever else the template knows.
    pub role: String,
    /// The words and images. `None` as in an assistant message that only calls tools.
    pub content: Option<ChatContent>,
    /// The speaker's name, if the client gives one.
    pub name: Option<String>,
    /// The id of the call that a `tool` message answers. Ignored for other roles.
    pub tool_call_id: Option<String>,
    /// The calls of an `assistant` message: a list of `{"id", "type": "function", "function":
    /// {"name", "arguments"}}` with `arguments` as JSON text. Ignored for other roles.
    pub tool_calls: Option<Value>,
    /// What the model thought before an `assistant` message. Ignored for other roles.
    pub reasoning: Option<String>,
}

/// What a message says.
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
    /// Some text.
    Text(String),
    /// The place of the next media item of this modality.
    Media(Modality),
    /// One of the others, with what only this template asks of a part: the language of a text that
    /// is to be translated, say.
    Extended(Box<ExtendedPart>),
}

/// A part with fields that it has in no API: the template reads them.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtendedPart {
    /// The part without them, which is not extended.
    pub part: ChatPart,
    /// They are in the part's dict behind what it says, and nowhere where the template wants its
    /// content as a string.
    pub fields: Map<String, Value>,
}

impl ChatPart {
    /// Its text, if it is one.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Media(_) => None,
            Self::Extended(extended) => extended.part.text(),
        }
    }
}

impl ChatMessage {
    /// Bytes of text in the content and of reasoning, media items not counted.
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
