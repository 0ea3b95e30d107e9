//! `tools` and `tool_choice`.

use chiasm_request::{ToolChoice, ToolUse};
use serde_json::{Map, Value, json};

use crate::error::{ApiError, excerpt};
use crate::openai::fields::Fields;
use crate::openai::tools::{function_json, read_all, take_name, tool_use};

/// Takes both fields; `None` if there are no functions.
pub(super) fn take(fields: &mut Fields) -> Result<Option<ToolUse>, ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let tools = read_all(tools, read_tool)?;
    let (choice, in_parallel) = match fields.take::<Value>("tool_choice")? {
        Some(choice) => read_choice(choice, &tools)?,
        None => (ToolChoice::Auto, true),
    };
    Ok(tool_use(tools, choice, None, in_parallel))
}

fn read_tool(tool: Value, path: &str) -> Result<Value, ApiError> {
    let mut fields = Fields::new(tool, path)?;
    let kind: Option<String> = fields.take("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "custom") {
        let kind = excerpt(&kind);
        let message = format!(
            "tools of type '{kind}' are not supported; use 'custom', a tool that the client runs"
        );
        return Err(ApiError::invalid(fields.name("type"), message));
    }
    let name = take_name(&mut fields)?;
    let description = fields.take("description")?;
    let schema: Option<Map<String, Value>> = fields.take("input_schema")?;
    let mut schema = schema.ok_or_else(|| ApiError::missing(&fields.name("input_schema")))?;
    schema.entry("type").or_insert_with(|| json!("object"));
    let examples: Vec<Map<String, Value>> = fields.take("input_examples")?.unwrap_or_default();
    if !examples.is_empty() {
        // Templates only show the schema to the model, so the examples become a part of it.
        let listed = schema.entry("examples").or_insert_with(|| json!([]));
        let name = fields.name("input_schema.examples");
        let listed = listed.as_array_mut().ok_or_else(|| {
            let message = format!("'{name}' must be a list");
            ApiError::invalid(name, message)
        })?;
        listed.extend(examples.into_iter().map(Value::Object));
    }
    let strict = fields.take("strict")?;
    fields.refuse_unless("defer_loading", |value| value == false)?;
    fields.refuse_unless("allowed_callers", |value| value == &json!(["direct"]))?;
    fields.ignore(&["cache_control", "eager_input_streaming"]);
    fields.finish()?;
    Ok(function_json(name, description, Some(schema), strict))
}

/// Reads the tool choice. The second value is `true` if parallel calls are allowed.
fn read_choice(choice: Value, tools: &[Value]) -> Result<(ToolChoice, bool), ApiError> {
    let mut fields = Fields::new(choice, "tool_choice")?;
    let kind: String = fields.take("type")?.ok_or_else(|| ApiError::missing("tool_choice.type"))?;
    let is_single = fields.take("disable_parallel_tool_use")?.unwrap_or(false);
    let choice = match kind.as_str() {
        "auto" => ToolChoice::Auto,
        "none" => ToolChoice::None,
        "any" if tools.is_empty() => {
            return Err(ApiError::invalid("tool_choice", "'tool_choice' requires 'tools'"));
        }
        "any" => ToolChoice::Required,
        "tool" => {
            let name: String =
                fields.take("name")?.ok_or_else(|| ApiError::missing("tool_choice.name"))?;
            if !tools.iter().any(|tool| tool["function"]["name"] == name.as_str()) {
                let name = excerpt(&name);
                let message = format!("'tools' has no tool '{name}'");
                return Err(ApiError::invalid("tool_choice.name", message));
            }
            ToolChoice::Named(name)
        }
        other => {
            let other = excerpt(other);
            let message =
                format!("'tool_choice.type' must be auto, any, tool or none, got '{other}'");
            return Err(ApiError::invalid("tool_choice.type", message));
        }
    };
    fields.finish()?;
    Ok((choice, !is_single))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(body: Value) -> Result<Option<ToolUse>, ApiError> {
        Fields::take_all(body, take)
    }

    fn tool(name: &str) -> Value {
        json!({
            "name": name,
            "input_schema": {"properties": {}},
            "cache_control": {"type": "ephemeral"},
        })
    }

    #[test]
    fn tools_have_template_format() {
        let ToolUse { tools, choice, in_parallel, .. } =
            taken(json!({"tools": [tool("f")]})).unwrap().unwrap();
        let function =
            r#"{"name":"f","description":null,"parameters":{"properties":{},"type":"object"}}"#;
        assert_eq!(tools.to_string(), format!(r#"[{{"type":"function","function":{function}}}]"#));
        assert_eq!((choice, in_parallel), (ToolChoice::Auto, true));
        assert!(taken(json!({"tools": [], "tool_choice": {"type": "auto"}})).unwrap().is_none());
    }

    #[test]
    fn examples_become_part_of_schema() {
        let schema = |extra: Value| {
            let mut tool = json!({"name": "f", "input_schema": {"type": "object"}});
            tool.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let taken = taken(json!({"tools": [tool]})).map_err(|error| error.param.unwrap())?;
            Ok(taken.unwrap().tools[0]["function"]["parameters"].clone())
        };
        let examples = json!([{"a": 1}, {"b": 2}]);
        assert_eq!(
            schema(json!({"input_examples": examples})),
            Ok(json!({"type": "object", "examples": examples}))
        );
        let both =
            schema(json!({"input_schema": {"examples": [{}]}, "input_examples": [{"a": 1}]}))
                .unwrap();
        assert_eq!(both["examples"], json!([{}, {"a": 1}]));
        assert_eq!(schema(json!({"input_examples": []})), Ok(json!({"type": "object"})));
        assert_eq!(
            schema(json!({"input_examples": ["x"]})),
            Err("tools[0].input_examples".to_owned())
        );
        let wrong = json!({"input_schema": {"examples": 1}, "input_examples": [{}]});
        assert_eq!(schema(wrong), Err("tools[0].input_schema.examples".to_owned()));
    }

    #[test]
    fn choices_map_to_tool_choices() {
        for (choice, expected) in [
            (json!({"type": "auto", "disable_parallel_tool_use": true}), (ToolChoice::Auto, false)),
            (json!({"type": "any"}), (ToolChoice::Required, true)),
            (json!({"type": "none"}), (ToolChoice::None, true)),
            (json!({"type": "tool", "name": "f"}), (ToolChoice::Named("f".to_owned()), true)),
        ] {
            let taken =
                taken(json!({"tools": [tool("f")], "tool_choice": choice})).unwrap().unwrap();
            assert_eq!((taken.choice, taken.in_parallel), expected);
        }
    }

    #[test]
    fn invalid_tool_names_field() {
        for (body, field) in [
            (
                json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
                "tools[0].type",
            ),
            (json!({"tools": [{"input_schema": {}}]}), "tools[0].name"),
            (json!({"tools": [tool("f"), {"name": "g"}]}), "tools[1].input_schema"),
            (json!({"tools": [{"name": "f", "input_schema": []}]}), "tools[0].input_schema"),
            (
                json!({"tools": [{"name": "f", "input_schema": {}, "defer_loading": true}]}),
                "tools[0].defer_loading",
            ),
            (
                json!({"tools": [{"name": "f", "input_schema": {}, "parameters": {}}]}),
                "tools[0].parameters",
            ),
            (json!({"tools": vec![tool("f"); 1025]}), "tools"),
            (json!({"tools": [tool("f")], "tool_choice": "auto"}), "tool_choice"),
            (
                json!({"tools": [tool("f")], "tool_choice": {"type": "required"}}),
                "tool_choice.type",
            ),
            (json!({"tools": [tool("f")], "tool_choice": {"type": "tool"}}), "tool_choice.name"),
            (
                json!({"tools": [tool("f")], "tool_choice": {"type": "tool", "name": "g"}}),
                "tool_choice.name",
            ),
            (
                json!({"tools": [tool("f")], "tool_choice": {"type": "any", "x": 1}}),
                "tool_choice.x",
            ),
            (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        ] {
            assert_eq!(taken(body).err().unwrap().param.as_deref(), Some(field));
        }
    }
}
