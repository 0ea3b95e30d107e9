//! Constraints on an answer that make it a call.

use chiasm_backend::Constraint;
use chiasm_parse::Function;
use chiasm_request::{ToolChoice, ToolUse};
use serde_json::{Map, Value, json};

use super::parameters;
use crate::model::ServedModel;

/// Returns a structural tag in the model's own format, if vLLM has one for that format.
///
/// A model that need not call is constrained only for strict functions, for a single call, or if
/// some functions are not allowed.
pub(super) fn structural_tag(model: &ServedModel, tools: &ToolUse) -> Option<Constraint> {
    let is_auto = tools.choice == ToolChoice::Auto;
    if is_auto && tools.in_parallel && tools.allowed.is_none() && !has_strict(tools) {
        return None;
    }
    let tag = build_tag(model, tools, !is_auto)?;
    Some(Constraint::StructuralTag(tag.to_string().into()))
}

/// Returns a constraint that allows either calls in the model's own format, or an answer that meets
/// `own`, for a model that may call.
///
/// Returns `None` if calls are not constrained, or if no tag has their format; `own` applies alone
/// then. As in vLLM (`adjust_request`, `vllm/parser/abstract_parser.py`), the limit to a single
/// call is no constraint here.
pub(crate) fn combine_with_calls(
    model: &ServedModel,
    tools: &ToolUse,
    own: &Constraint,
) -> Option<Constraint> {
    if tools.allowed.is_none() && !has_strict(tools) {
        return None;
    }
    let calls = build_tag(model, tools, true)?;
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

/// Returns `true` if an allowed function is strict.
pub(super) fn has_strict(tools: &ToolUse) -> bool {
    allowed(tools).any(is_strict)
}

fn is_strict(tool: &Value) -> bool {
    tool["function"]["strict"] == true
}

/// Builds the structural tag for calls in the model's own format. Returns `None` if no tag has that
/// format.
fn build_tag(model: &ServedModel, tools: &ToolUse, must_call: bool) -> Option<Value> {
    let format = &model.answers.whole;
    let lacks_token = |token| model.tokenizer.token_to_id(token).is_none();
    if format.tag_token().is_some_and(lacks_token) {
        return None;
    }
    // As in vLLM: functions that are not strict may have schemas that engines do not support.
    let any = json!({"type": "object"});
    let is_enforced = |tool: &Value| is_strict(tool) || tools.enforced.contains(name(tool));
    let schemas: Vec<Value> = allowed(tools)
        .map(|tool| if is_enforced(tool) { parameters(tool) } else { any.clone() })
        .collect();
    let functions = allowed(tools)
        .zip(&schemas)
        .map(|(tool, arguments)| Function { name: name(tool), arguments });
    let functions: Vec<Function<'_>> = functions.collect();
    format.structural_tag(&functions, must_call, is_single(tools))
}

/// Returns the schema of a JSON list of calls (`get_json_schema_from_tools`,
/// `vllm/tool_parsers/utils.py`).
pub(super) fn json_list(tools: &ToolUse) -> Constraint {
    let mut definitions = Map::new();
    let calls: Vec<Value> =
        allowed(tools).map(|tool| call_schema(tool, &mut definitions)).collect();
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

/// Returns the schema of one call. Moves the `$defs` of the function's schema to `definitions`,
/// because references to them start at the root.
fn call_schema(tool: &Value, definitions: &mut Map<String, Value>) -> Value {
    let mut parameters = parameters(tool);
    if let Some(Value::Object(own)) =
        parameters.as_object_mut().and_then(|schema| schema.shift_remove("$defs"))
    {
        definitions.extend(own);
    }
    let name = json!({"type": "string", "enum": [name(tool)]});
    json!({
        "properties": {"name": name, "parameters": parameters},
        "required": ["name", "parameters"],
    })
}

fn name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

/// Returns `true` if an answer may have at most one call.
pub(super) fn is_single(tools: &ToolUse) -> bool {
    !tools.in_parallel || matches!(tools.choice, ToolChoice::Named(_))
}

/// Returns the functions that may be called.
fn allowed(tools: &ToolUse) -> impl Iterator<Item = &Value> {
    let is_allowed = |tool: &&Value| match (&tools.choice, &tools.allowed) {
        (ToolChoice::Named(named), _) => name(tool) == named,
        (_, Some(allowed)) => allowed.contains(name(tool)),
        (_, None) => true,
    };
    tools.tools.as_array().into_iter().flatten().filter(is_allowed)
}

#[cfg(test)]
mod tests;
