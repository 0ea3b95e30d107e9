//! A conversation and its media items.

use std::sync::Arc;

use chiasm_media::MediaInput;
use chiasm_prompt::ChatMessage;
use chiasm_types::Modality;
use serde_json::{Map, Value};

use crate::ChatDefaults;

/// A conversation whose media items are stored separately, in order of appearance.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// The messages. Each media part refers to the next item of `media`.
    pub messages: Vec<ChatMessage>,
    /// The media items.
    pub media: Vec<MediaRef>,
    /// Ends the prompt with the opening of an assistant message.
    pub add_generation_prompt: bool,
    /// Leaves the last message open, so that the model continues it.
    pub continue_final_message: bool,
    /// Additional variables of the template.
    pub template_kwargs: Map<String, Value>,
    /// The reasoning effort.
    pub reasoning_effort: Option<String>,
    /// The functions that the template writes into the prompt.
    pub tools: Option<Arc<Value>>,
    /// The request's settings for media processing. Boxed, because few requests have any.
    pub media_kwargs: Box<MediaKwargs>,
}

impl Chat {
    /// Takes the variables of the chat template.
    ///
    /// Later sources override earlier ones, as in vLLM (`ChatCompletionRequest.build_chat_params`):
    /// the server's defaults, `enable_thinking` from the effort, the request's own variables, and
    /// `reasoning_effort`.
    pub fn take_template_variables(&mut self, defaults: &ChatDefaults) -> Map<String, Value> {
        let mut variables = defaults.template_kwargs.clone();
        if let Some(effort) = &self.reasoning_effort {
            variables.insert("enable_thinking".to_owned(), Value::from(effort != "none"));
        }
        variables.append(&mut self.template_kwargs);
        if let Some(effort) = &self.reasoning_effort {
            variables.insert("reasoning_effort".to_owned(), Value::from(effort.as_str()));
        }
        variables
    }

    /// Returns `true` if a variable of the chat template enables thinking: `thinking` or
    /// `enable_thinking`. `None` if neither is set. Some of vLLM's parsers depend on this.
    pub fn thinking_enabled(&self, defaults: &ChatDefaults) -> Option<bool> {
        self.thinking_variables(defaults)
            .into_iter()
            .map(|(_, value)| value)
            .reduce(|one, other| one || other)
    }

    /// Returns the values of `thinking` and `enable_thinking`, if they are set.
    pub fn thinking_variables(&self, defaults: &ChatDefaults) -> Vec<(&'static str, bool)> {
        // vLLM treats both values as "not set".
        let is_set = |value: &&Value| !value.is_null() && *value != "auto";
        let value_in = |variables: &'_ Map<String, Value>, name: &str| {
            variables.get(name).filter(is_set).map(is_true)
        };
        let from_effort = self.reasoning_effort.as_ref().map(|effort| effort != "none");
        let variable = |name: &'static str, from_effort: Option<bool>| {
            let own = value_in(&self.template_kwargs, name).or(from_effort);
            own.or_else(|| value_in(&defaults.template_kwargs, name)).map(|value| (name, value))
        };
        [variable("thinking", None), variable("enable_thinking", from_effort)]
            .into_iter()
            .flatten()
            .collect()
    }
}

/// Returns `true` if a value is truthy in Python.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

/// A request's settings for media processing.
#[derive(Clone, Debug, Default)]
pub struct MediaKwargs {
    /// `mm_processor_kwargs`: settings for the model's media processors.
    pub processor: Map<String, Value>,
    /// `media_io_kwargs`: settings for reading files, by modality.
    pub io: Map<String, Value>,
}

/// A reference to a media item in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaRef {
    /// The kind of the item, by the part's type.
    pub modality: Modality,
    /// The URL or the item itself, as a text that may be a part of the body; `None` for an item
    /// that an earlier request has named.
    pub source: Option<MediaInput>,
    /// The client's name of the item.
    pub uuid: Option<String>,
    /// The request field of the item, such as `messages[0].content[1].image_url`.
    pub field: String,
}
