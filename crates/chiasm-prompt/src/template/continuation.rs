//! `continue_final_message`: the prompt ends within the last message, and the model continues it.
//!
//! A tag after the last text reveals the text's position in the prompt, and the prompt is cut
//! there. `render_jinja_template` of `transformers` does the same.

use serde_json::Value;

use super::python_text::is_python_space;
use crate::PromptError;

/// The tag. Its trailing space reveals whether the template trims the text.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Appends the tag to the last text of the last message. Returns the text without the tag.
pub(super) fn mark(messages: &mut [Value], template: &str) -> Result<String, PromptError> {
    let cannot = |reason| PromptError::CannotContinue { reason };
    if !template.contains("content") {
        return Err(cannot("the chat template has no content to continue"));
    }
    let content = messages.last_mut().and_then(|message| message.get_mut("content"));
    let text = match content {
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
        other => other,
    };
    let Some(Value::String(text)) = text else {
        return Err(cannot("the final message has no text to continue"));
    };
    let open_end = text.clone();
    text.push_str(TAG);
    Ok(open_end)
}

/// Cuts the rendered text at the tag.
pub(super) fn cut(mut rendered: String, open_end: &str) -> Result<String, PromptError> {
    let lost = PromptError::CannotContinue {
        reason: "the final message does not appear in the prompt; \
                 the chat template leaves it out or changes it",
    };
    if !rendered.contains(open_end.trim_matches(is_python_space)) {
        return Err(lost);
    }
    let Some(at) = rendered.rfind(TAG.trim_end()) else { return Err(lost) };
    let keeps_space = rendered[at..].starts_with(TAG);
    rendered.truncate(at);
    if !keeps_space {
        rendered.truncate(rendered.trim_end_matches(is_python_space).len());
    }
    Ok(rendered)
}
