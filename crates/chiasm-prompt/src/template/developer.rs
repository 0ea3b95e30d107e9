//! The `developer` role for templates that do not know it. As in vLLM, developer messages become
//! system messages, and all system messages are merged into one.

use serde_json::{Value, json};

/// Rewrites the messages if one has the role `developer` and the template does not name that role
/// (`_convert_developer_to_system` and `_consolidate_system_messages`, `vllm/renderers/hf.py`).
pub(super) fn adapt(messages: Vec<Value>, template: &str) -> Vec<Value> {
    let knows_role = template.contains("\"developer\"") || template.contains("'developer'");
    if knows_role || !messages.iter().any(|message| message["role"] == "developer") {
        return messages;
    }
    let messages: Vec<Value> = messages.into_iter().map(into_system).collect();
    let is_system = |message: &Value| message["role"] == "system";
    if messages.iter().skip(1).any(is_system) {
        merge_system(messages, is_system)
    } else {
        messages
    }
}

/// Changes the role of a developer message.
fn into_system(mut message: Value) -> Value {
    if message["role"] == "developer"
        && let Some(dict) = message.as_object_mut()
    {
        dict.insert("role".into(), json!("system"));
        dict.shift_remove("tools");
    }
    message
}

/// Merges all system messages into one at the head.
fn merge_system(messages: Vec<Value>, is_system: impl Fn(&Value) -> bool) -> Vec<Value> {
    let (system, others): (Vec<Value>, Vec<Value>) =
        messages.into_iter().partition(|message| is_system(message));
    let texts: Vec<String> =
        system.iter().map(|message| content_text(&message["content"])).collect();
    let texts: Vec<&str> =
        texts.iter().map(String::as_str).filter(|text| !text.is_empty()).collect();
    let merged = json!({"role": "system", "content": texts.join("\n\n")});
    std::iter::once(merged).chain(others).collect()
}

/// Returns the text of a content, a string or a list of parts.
fn content_text(content: &Value) -> String {
    match content {
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join("\n")
        }
        content => content.as_str().unwrap_or_default().to_owned(),
    }
}
