//! What an answer is held to, so that it is a call.

use chiasm_backend::Constraint;
use chiasm_parse::Function;
use chiasm_request::{ToolChoice, ToolUse};
use serde_json::{Map, Value, json};

use super::parameters;
use crate::model::ServedModel;

/// A structural tag in the model's own format, where vLLM has one. A model that calls if it likes
/// is held to one only for functions that are strict, for a single call, or where it may not call
/// all of them.
pub(super) fn tag(model: &ServedModel, tools: &ToolUse) -> Option<Constraint> {
    let is_auto = tools.choice == ToolChoice::Auto;
    if is_auto && tools.in_parallel && tools.allowed.is_none() && !has_strict(tools) {
        return None;
    }
    let tag = structural_tag(model, tools, !is_auto)?;
    Some(Constraint::StructuralTag(tag.to_string().into()))
}

/// Returns a constraint that allows calls in the model's own format or an answer that meets `own`,
/// for a model that may call. `None` if calls are held to nothing, or no tag has their format: then
/// `own` alone holds. As in vLLM (`adjust_request`, `vllm/parser/abstract_parser.py`), the limit to
/// a single call does not hold calls to anything here.
pub(crate) fn calls_or(
    model: &ServedModel,
    tools: &ToolUse,
    own: &Constraint,
) -> Option<Constraint> {
    if tools.allowed.is_none() && !has_strict(tools) {
        return None;
    }
    let calls = structural_tag(model, tools, true)?;
    let own = match own {
        Constraint::JsonSchema(schema) => {
            let schema: Value = serde_json::from_str(schema).ok()?;
            json!({"type": "json_schema", "json_schema": schema})
        }
        Constraint::JsonObject => json!({"type": "json_schema", "json_schema": {"type": "object"}}),
        Constraint::Regex(pattern) => json!({"type": "regex", "pattern": pattern.as_ref()}),
        Constraint::Grammar(grammar) => json!({"type": "grammar", "grammar": grammar.as_ref()}),
        Constraint::StructuralTag(tag) => {
            let tag: Value = serde_json::from_str(tag).ok()?;
            tag.get("format")?.clone()
        }
    };
    let either = json!({"type": "or", "elements": [calls["format"], own]});
    let tag = json!({"type": "structural_tag", "format": either});
    Some(Constraint::StructuralTag(tag.to_string().into()))
}

/// Returns `true` if a function that may be called is strict.
pub(super) fn has_strict(tools: &ToolUse) -> bool {
    chosen(tools).any(is_strict)
}

fn is_strict(tool: &Value) -> bool {
    tool["function"]["strict"] == true
}

/// Returns the structural tag for calls in the model's own format. `None` if no tag has that
/// format.
fn structural_tag(model: &ServedModel, tools: &ToolUse, has_to_call: bool) -> Option<Value> {
    let format = &model.answers.whole;
    let lacks_token = |token| model.tokenizer.token_to_id(token).is_none();
    if format.tag_token().is_some_and(lacks_token) {
        return None;
    }
    // As in vLLM: others than strict ones may have schemas that engines do not take.
    let any = json!({"type": "object"});
    let is_held = |tool: &Value| is_strict(tool) || tools.held.contains(name(tool));
    let schemas: Vec<Value> = chosen(tools)
        .map(|tool| if is_held(tool) { parameters(tool) } else { any.clone() })
        .collect();
    let functions = chosen(tools)
        .zip(&schemas)
        .map(|(tool, arguments)| Function { name: name(tool), arguments });
    let functions: Vec<Function<'_>> = functions.collect();
    format.structural_tag(&functions, has_to_call, is_single(tools))
}

/// A JSON list of calls (`get_json_schema_from_tools`, `vllm/tool_parsers/utils.py`).
pub(super) fn list(tools: &ToolUse) -> Constraint {
    let mut definitions = Map::new();
    let calls: Vec<Value> = chosen(tools).map(|tool| call(tool, &mut definitions)).collect();
    let mut schema =
        json!({"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}});
    if is_single(tools) {
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
    if let Some(Value::Object(own)) =
        parameters.as_object_mut().and_then(|schema| schema.shift_remove("$defs"))
    {
        definitions.extend(own);
    }
    let name = json!({"type": "string", "enum": [name(tool)]});
    json!({"properties": {"name": name, "parameters": parameters}, "required": ["name", "parameters"]})
}

fn name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

/// Returns `true` if an answer has one call at most.
pub(super) fn is_single(tools: &ToolUse) -> bool {
    !tools.in_parallel || matches!(tools.choice, ToolChoice::Named(_))
}

/// The functions that may be called.
fn chosen(tools: &ToolUse) -> impl Iterator<Item = &Value> {
    let is_chosen = |tool: &&Value| match (&tools.choice, &tools.allowed) {
        (ToolChoice::Named(chosen), _) => name(tool) == chosen,
        (_, Some(allowed)) => allowed.contains(name(tool)),
        (_, None) => true,
    };
    tools.tools.as_array().into_iter().flatten().filter(is_chosen)
}

#[cfg(test)]
mod tests;
