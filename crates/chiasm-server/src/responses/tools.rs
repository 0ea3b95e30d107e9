//! `tools`, `tool_choice` and `parallel_tool_calls`: as in chat completions, but functions are flat.

use std::sync::Arc;

use serde_json::Value;

use crate::error::ApiError;
use crate::openai::fields::Fields;
use crate::openai::tools::{read_all, read_choice, read_function};
use crate::pipeline::ToolUse;

/// Takes the three fields. `None` if there are no functions.
pub(super) fn take(fields: &mut Fields) -> Result<Option<ToolUse>, ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let choice = fields.take("tool_choice")?;
    let in_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    let tools = read_all(tools, read_tool)?;
    let choice = read_choice(choice, read_named, "tool_choice.name", &tools)?;
    Ok((!tools.is_empty()).then(|| ToolUse { tools: Arc::new(Value::Array(tools)), choice, in_parallel }))
}

fn read_tool(tool: Value, path: &str) -> Result<Value, ApiError> {
    let mut fields = Fields::new(tool, path)?;
    let kind: String = fields.take("type")?.ok_or_else(|| ApiError::missing(&fields.name("type")))?;
    if kind != "function" {
        let message = format!("this server has no tools of its own, such as '{kind}'; tools must be functions");
        return Err(ApiError { code: "unsupported_tool", ..ApiError::invalid(fields.name("type"), message) });
    }
    read_function(fields)
}

fn read_named(choice: Value) -> Result<String, ApiError> {
    let mut fields = Fields::new(choice, "tool_choice")?;
    let kind: Option<String> = fields.take("type")?;
    if kind.as_deref() != Some("function") {
        return Err(ApiError::invalid("tool_choice.type", "it must be 'function'"));
    }
    let name = fields.take("name")?.ok_or_else(|| ApiError::missing("tool_choice.name"))?;
    fields.finish()?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pipeline::ToolChoice;

    fn taken(body: Value) -> Result<Option<ToolUse>, String> {
        take(&mut Fields::new(body, "").unwrap()).map_err(|error| error.param.unwrap())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "name": name, "parameters": {"type": "object"}, "strict": true})
    }

    #[test]
    fn flat_functions_come_out_as_templates_want_them() {
        let taken = taken(json!({"tools": [tool("f")], "parallel_tool_calls": false})).unwrap().unwrap();
        let function = r#"{"name":"f","description":null,"parameters":{"type":"object"},"strict":true}"#;
        let written = format!(r#"[{{"type":"function","function":{function}}}]"#);
        assert_eq!(taken.tools.to_string(), written);
        assert_eq!((taken.choice, taken.in_parallel), (ToolChoice::Auto, false));
    }

    #[test]
    fn a_choice_is_a_word_or_one_of_the_functions() {
        let choice = |choice: Value| {
            taken(json!({"tools": [tool("f")], "tool_choice": choice})).map(|taken| taken.unwrap().choice)
        };
        assert_eq!(choice(json!("required")), Ok(ToolChoice::Required));
        assert_eq!(choice(json!("none")), Ok(ToolChoice::None));
        assert_eq!(choice(json!({"type": "function", "name": "f"})), Ok(ToolChoice::Named("f".to_owned())));
        assert_eq!(choice(json!({"type": "function", "name": "g"})), Err("tool_choice.name".to_owned()));
        assert_eq!(choice(json!({"type": "function"})), Err("tool_choice.name".to_owned()));
        assert_eq!(choice(json!({"type": "web_search"})), Err("tool_choice.type".to_owned()));
        assert_eq!(choice(json!("any")), Err("tool_choice".to_owned()));
        assert_eq!(taken(json!({"tool_choice": "required"})).unwrap_err(), "tool_choice");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, field) in [
            (json!({"tools": [tool("f"), {"type": "web_search"}]}), "tools[1].type"),
            (json!({"tools": [{"name": "f"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
            (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "tools[0].name"),
            (json!({"tools": [{"type": "function", "name": "f", "code": 1}]}), "tools[0].code"),
        ] {
            assert_eq!(taken(body).unwrap_err(), field);
        }
    }
}
