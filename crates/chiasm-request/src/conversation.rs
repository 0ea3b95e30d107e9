//! A conversation and its media items.

use std::sync::Arc;

use chiasm_media::MediaInput;
use chiasm_prompt::ChatMessage;
use chiasm_types::Modality;
use serde_json::{Map, Value};

use crate::ChatDefaults;

/// A conversation with its media items taken out, in order of appearance.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// The messages; each media part stands for the next of `media`.
    pub messages: Vec<ChatMessage>,
    /// The media items.
    pub media: Vec<MediaRef>,
    /// Ends the prompt with the opening of an assistant message.
    pub add_generation_prompt: bool,
    /// Leaves the last message open, to be continued.
    pub continue_final_message: bool,
    /// Extra variables of the template.
    pub template_kwargs: Map<String, Value>,
    /// How much the model is to think.
    pub reasoning_effort: Option<String>,
    /// The functions that the template writes.
    pub tools: Option<Arc<Value>>,
    /// Changes of how media are made; in a box, as few requests have any.
    pub media_kwargs: Box<MediaKwargs>,
}

impl Chat {
    /// Takes the variables of a chat template. Of the same name the later counts, as in vLLM
    /// (`ChatCompletionRequest.build_chat_params`): those of all conversations, `enable_thinking`
    /// from the effort, the request's own, and `reasoning_effort`.
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

    /// What the variables of the chat template say of thinking, for those of vLLM's parsers that
    /// ask them: `thinking` or `enable_thinking`. `None` if neither is set.
    pub fn thinks(&self, defaults: &ChatDefaults) -> Option<bool> {
        self.thinking_variables(defaults)
            .into_iter()
            .map(|(_, value)| value)
            .reduce(|one, other| one || other)
    }

    /// Those of the two variables that are set.
    pub fn thinking_variables(&self, defaults: &ChatDefaults) -> Vec<(&'static str, bool)> {
        // vLLM takes both for "not set".
        let is_set = |value: &&Value| !value.is_null() && *value != "auto";
        let of = |variables: &'_ Map<String, Value>, name: &str| {
            variables.get(name).filter(is_set).map(is_true)
        };
        let of_effort = self.reasoning_effort.as_ref().map(|effort| effort != "none");
        let variable = |name: &'static str, of_effort: Option<bool>| {
            let own = of(&self.template_kwargs, name).or(of_effort);
            own.or_else(|| of(&defaults.template_kwargs, name)).map(|value| (name, value))
        };
        [variable("thinking", None), variable("enable_thinking", of_effort)]
            .into_iter()
            .flatten()
            .collect()
    }
}

/// Whether Python takes a value for true.
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

/// What a request changes of how media are made.
#[derive(Clone, Debug, Default)]
pub struct MediaKwargs {
    /// `mm_processor_kwargs`: settings of the model's media processors.
    pub processor: Map<String, Value>,
    /// `media_io_kwargs`: by modality, how files are read.
    pub io: Map<String, Value>,
}

/// Where a media item comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaRef {
    /// What kind of thing it is, as the part's type says.
    pub modality: Modality,
    /// The text of a URL or of the item itself, which may be a part of the body; `None` for an item
    /// that was seen before.
    pub source: Option<MediaInput>,
    /// What the client calls it.
    pub uuid: Option<String>,
    /// The request field that holds it, such as `messages[0].content[1].image_url`.
    pub field: String,
}
