//! `tools`, `tool_choice` and `parallel_tool_calls` of a chat request.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::fields::{Fields, kind};
use crate::error::ApiError;
use crate::pipeline::{ToolChoice, ToolUse};

/// Most functions of a request. All of them are in the prompt.
const MAX_TOOLS: usize = 1024;
const MAX_NAME_BYTES: usize = 256;

/// Takes the three fields. `None` if there are no functions.
pub(super) fn take(fields: &mut Fields) -> Result<Option<ToolUse>, ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let choice = fields.take::<Value>("tool_choice")?;
    let in_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    let tools = read_all(tools, read_tool)?;
    let choice = read_choice(choice, read_named, "tool_choice.function.name", &tools)?;
    Ok((!tools.is_empty()).then(|| ToolUse { tools: Arc::new(Value::Array(tools)), choice, in_parallel }))
}

/// Reads all tools, each by its path.
pub(crate) fn read_all(
    tools: Vec<Value>,
    read: impl Fn(Value, &str) -> Result<Value, ApiError>,
) -> Result<Vec<Value>, ApiError> {
    if tools.len() > MAX_TOOLS {
        let message = format!("'tools' has {} functions, at most {MAX_TOOLS} are allowed", tools.len());
        return Err(ApiError::invalid("tools", message));
    }
    tools.into_iter().enumerate().map(|(i, tool)| read(tool, &format!("tools[{i}]"))).collect()
}

fn read_tool(tool: Value, path: &str) -> Result<Value, ApiError> {
    let mut fields = Fields::new(tool, path)?;
    let kind: String = fields.take("type")?.unwrap_or_else(|| "function".to_owned());
    if kind != "function" {
        return Err(ApiError::invalid(fields.name("type"), format!("tools must be functions, got '{kind}'")));
    }
    let function = fields.take("function")?.ok_or_else(|| ApiError::missing(&fields.name("function")))?;
    fields.finish()?;
    read_function(Fields::new(function, format!("{path}.function"))?)
}

/// Reads a function with OpenAI's names of its fields.
pub(crate) fn read_function(mut fields: Fields) -> Result<Value, ApiError> {
    let name = take_name(&mut fields)?;
    let description: Option<String> = fields.take("description")?;
    let parameters: Option<Map<String, Value>> = fields.take("parameters")?;
    let strict: Option<bool> = fields.take("strict")?;
    fields.finish()?;
    Ok(written(name, description, parameters, strict))
}

/// Takes a function's name.
pub(crate) fn take_name(fields: &mut Fields) -> Result<String, ApiError> {
    let name: String = fields.take("name")?.ok_or_else(|| ApiError::missing(&fields.name("name")))?;
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        let message = format!("a function's name must have 1 to {MAX_NAME_BYTES} bytes");
        return Err(ApiError::invalid(fields.name("name"), message));
    }
    Ok(name)
}

/// A function as chat templates are given it: with the fields and in the order of vLLM's own class (`FunctionDefinition`,
/// `vllm/entrypoints/generate/base/protocol.py`).
pub(crate) fn written(
    name: String,
    description: Option<String>,
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
) -> Value {
    let mut function = json!({"name": name, "description": description, "parameters": parameters});
    if let Some(strict) = strict {
        function["strict"] = Value::Bool(strict);
    }
    json!({"type": "function", "function": function})
}

/// Reads `tool_choice`. An object is one of the functions, by its name, which `read_named` finds in the field `name_field`.
pub(crate) fn read_choice(
    choice: Option<Value>,
    read_named: impl Fn(Value) -> Result<String, ApiError>,
    name_field: &str,
    tools: &[Value],
) -> Result<ToolChoice, ApiError> {
    const FIELD: &str = "tool_choice";
    let choice = match choice {
        None => ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            other => {
                let message = format!("'tool_choice' must be none, auto, required or a function, got '{other}'");
                return Err(ApiError::invalid(FIELD, message));
            }
        },
        Some(named @ Value::Object(_)) => ToolChoice::Named(read_named(named)?),
        Some(other) => {
            let message = format!("'tool_choice' must be a word or a function, got {}", kind(&other));
            return Err(ApiError::invalid(FIELD, message));
        }
    };
    if matches!(choice, ToolChoice::Required | ToolChoice::Named(_)) && tools.is_empty() {
        return Err(ApiError::invalid(FIELD, "'tool_choice' needs 'tools'"));
    }
    if let ToolChoice::Named(name) = &choice
        && !tools.iter().any(|tool| tool["function"]["name"] == name.as_str())
    {
        let message = format!("there is no function '{name}' in 'tools'");
        return Err(ApiError::invalid(name_field, message));
    }
    Ok(choice)
}

fn read_named(choice: Value) -> Result<String, ApiError> {
    let mut fields = Fields::new(choice, "tool_choice")?;
    let kind: Option<String> = fields.take("type")?;
    if kind.as_deref() != Some("function") {
        return Err(ApiError::invalid("tool_choice.type", "it must be 'function'"));
    }
    let function = fields.take("function")?.ok_or_else(|| ApiError::missing("tool_choice.function"))?;
    fields.finish()?;
    let mut function = Fields::new(function, "tool_choice.function")?;
    let name = function.take("name")?.ok_or_else(|| ApiError::missing("tool_choice.function.name"))?;
    function.finish()?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(body: Value) -> Result<Option<ToolUse>, ApiError> {
        Fields::all_taken(body, take)
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn functions_come_out_as_templates_want_them() {
        let body =
            json!({"tools": [{"function": {"strict": true, "name": "f"}}, tool("g")], "parallel_tool_calls": false});
        let ToolUse { tools, choice, in_parallel } = taken(body).unwrap().unwrap();
        let written =
            r#"[{"type":"function","function":{"name":"f","description":null,"parameters":null,"strict":true}},"#;
        assert!(tools.to_string().starts_with(written), "{tools}");
        assert_eq!((choice, in_parallel), (ToolChoice::Auto, false));
        assert!(taken(json!({"tools": [], "tool_choice": "auto"})).unwrap().is_none());
    }

    #[test]
    fn a_choice_is_a_word_or_one_of_the_functions() {
        let choice = |choice: Value| {
            let taken = taken(json!({"tools": [tool("f")], "tool_choice": choice}));
            taken.map(|taken| taken.unwrap().choice).map_err(|error| error.param.unwrap())
        };
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        assert_eq!(choice(json!("none")), Ok(ToolChoice::None));
        assert_eq!(choice(json!("required")), Ok(ToolChoice::Required));
        assert_eq!(choice(named("f")), Ok(ToolChoice::Named("f".to_owned())));
        assert_eq!(choice(named("g")), Err("tool_choice.function.name".to_owned()));
        assert_eq!(choice(json!("any")), Err("tool_choice".to_owned()));
        assert_eq!(choice(json!(3)), Err("tool_choice".to_owned()));
        assert_eq!(choice(json!({"type": "allowed_tools"})), Err("tool_choice.type".to_owned()));
        assert_eq!(choice(json!({"type": "function"})), Err("tool_choice.function".to_owned()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, field) in [
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [tool("f"), {"type": "function"}]}), "tools[1].function"),
            (json!({"tools": [{"function": {}}]}), "tools[0].function.name"),
            (json!({"tools": [tool("")]}), "tools[0].function.name"),
            (json!({"tools": [{"function": {"name": "f", "parameters": []}}]}), "tools[0].function.parameters"),
            (json!({"tools": [{"function": {"name": "f", "code": 1}}]}), "tools[0].function.code"),
            (json!({"tools": 3}), "tools"),
            (json!({"tools": vec![tool("f"); MAX_TOOLS + 1]}), "tools"),
            (json!({"tool_choice": "required"}), "tool_choice"),
        ] {
            assert_eq!(taken(body).err().unwrap().param.as_deref(), Some(field));
        }
    }
}
