//! What an answer is held to, so that it is a call.

use chiasm_backend::Constraint;
use serde_json::{Map, Value, json};

use super::parameters;
use crate::model::ServedModel;
use crate::pipeline::{ToolChoice, ToolUse};

/// A structural tag in the model's own format, where vLLM has one. In `auto` only functions that are strict are held to it.
pub(super) fn tag(model: &ServedModel, tools: &ToolUse) -> Option<Constraint> {
    let _ = (model, tools);
    None
}

/// A JSON list of calls (`get_json_schema_from_tools`, `vllm/tool_parsers/utils.py`).
pub(super) fn list(tools: &ToolUse) -> Constraint {
    let mut definitions = Map::new();
    let calls: Vec<Value> = chosen(tools).map(|tool| call(tool, &mut definitions)).collect();
    let is_one = !tools.in_parallel || matches!(tools.choice, ToolChoice::Named(_));
    let mut schema = json!({"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}});
    if is_one {
        schema["maxItems"] = json!(1);
    }
    if !definitions.is_empty() {
        schema["$defs"] = Value::Object(definitions);
    }
    Constraint::JsonSchema(schema.to_string().into())
}

/// One call. Definitions of a function's schema are found from the root, and so move there.
fn call(tool: &Value, definitions: &mut Map<String, Value>) -> Value {
    let mut parameters = parameters(tool);
    if let Some(Value::Object(own)) = parameters.as_object_mut().and_then(|schema| schema.shift_remove("$defs")) {
        definitions.extend(own);
    }
    let name = json!({"type": "string", "enum": [tool["function"]["name"]]});
    json!({"properties": {"name": name, "parameters": parameters}, "required": ["name", "parameters"]})
}

/// The functions that may be called.
fn chosen(tools: &ToolUse) -> impl Iterator<Item = &Value> {
    let is_chosen = |tool: &&Value| match &tools.choice {
        ToolChoice::Named(name) => tool["function"]["name"] == name.as_str(),
        _ => true,
    };
    tools.tools.as_array().into_iter().flatten().filter(is_chosen)
}
