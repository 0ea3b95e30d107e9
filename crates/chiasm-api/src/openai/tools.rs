//! `tools`, `tool_choice` and `parallel_tool_calls` of a chat request.

use std::collections::HashSet;
use std::sync::Arc;

use chiasm_request::{ToolChoice, ToolUse};
use serde_json::{Map, Value, json};

use super::fields::{Fields, kind};
use crate::error::{ApiError, excerpt};

/// The maximum number of functions in a request. All of them are part of the prompt.
const MAX_TOOLS: usize = 1024;
const MAX_NAME_BYTES: usize = 256;
const CHOICE: &str = "tool_choice";
const REQUIRES_TOOLS: &str = "'tool_choice' requires 'tools'";

/// Takes the three fields; `None` if there are no functions.
pub(super) fn take(fields: &mut Fields) -> Result<Option<ToolUse>, ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let choice = fields.take::<Value>("tool_choice")?;
    let in_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    let tools = read_all(tools, read_tool)?;
    let (choice, allowed) = read_choice(choice, Some("allowed_tools"), read_named, &tools)?;
    Ok(tool_use(tools, choice, allowed, in_parallel))
}

/// Returns the tool use of a request; `None` if there are no functions.
pub fn tool_use(
    tools: Vec<Value>,
    choice: ToolChoice,
    allowed: Option<HashSet<String>>,
    in_parallel: bool,
) -> Option<ToolUse> {
    let tools = (!tools.is_empty()).then(|| Arc::new(Value::Array(tools)))?;
    Some(ToolUse { tools, choice, allowed, enforced: HashSet::new(), in_parallel })
}

/// Reads all tools. `read` gets each tool and its path.
pub fn read_all<T>(
    tools: Vec<Value>,
    read: impl Fn(Value, &str) -> Result<T, ApiError>,
) -> Result<Vec<T>, ApiError> {
    check_count(tools.len())?;
    tools.into_iter().enumerate().map(|(i, tool)| read(tool, &format!("tools[{i}]"))).collect()
}

/// Checks the number of functions.
///
/// # Errors
/// Fails if there are more than 1,024.
pub fn check_count(count: usize) -> Result<(), ApiError> {
    if count > MAX_TOOLS {
        let message = format!("'tools' has {count} functions, at most {MAX_TOOLS} are allowed");
        return Err(ApiError::invalid("tools", message));
    }
    Ok(())
}

fn read_tool(tool: Value, path: &str) -> Result<Value, ApiError> {
    let mut fields = Fields::new(tool, path)?;
    let kind: String = fields.take("type")?.unwrap_or_else(|| "function".to_owned());
    if kind != "function" {
        let kind = excerpt(&kind);
        let message = format!("tools must have type 'function', got '{kind}'");
        return Err(ApiError::invalid(fields.name("type"), message));
    }
    let function =
        fields.take("function")?.ok_or_else(|| ApiError::missing(&fields.name("function")))?;
    fields.finish()?;
    read_function(Fields::new(function, format!("{path}.function"))?)
}

/// Reads a function in OpenAI's format.
pub fn read_function(mut fields: Fields) -> Result<Value, ApiError> {
    let name = take_name(&mut fields)?;
    let description: Option<String> = fields.take("description")?;
    let parameters: Option<Map<String, Value>> = fields.take("parameters")?;
    let strict: Option<bool> = fields.take("strict")?;
    fields.finish()?;
    Ok(function_json(name, description, parameters, strict))
}

/// Takes a function's name.
pub fn take_name(fields: &mut Fields) -> Result<String, ApiError> {
    let name: String =
        fields.take("name")?.ok_or_else(|| ApiError::missing(&fields.name("name")))?;
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        let message = format!("a function's name must have 1 to {MAX_NAME_BYTES} bytes");
        return Err(ApiError::invalid(fields.name("name"), message));
    }
    Ok(name)
}

/// Returns a function in the format for chat templates.
///
/// The fields and their order are those of vLLM's own class (`FunctionDefinition`,
/// `vllm/entrypoints/generate/base/protocol.py`).
pub fn function_json(
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

/// A function that a tool choice names.
pub(crate) struct NamedFunction {
    pub name: String,
    /// The path of the name in the request.
    pub field: String,
}

impl NamedFunction {
    /// Returns the name.
    ///
    /// # Errors
    /// Fails if `tools` has no function of this name.
    fn find_in(self, tools: &[Value]) -> Result<String, ApiError> {
        let Self { name, field } = self;
        if tools.is_empty() {
            return Err(ApiError::invalid(CHOICE, REQUIRES_TOOLS));
        }
        if !tools.iter().any(|tool| tool["function"]["name"] == name.as_str()) {
            let message = format!("'tools' has no function '{}'", excerpt(&name));
            return Err(ApiError::invalid(field, message));
        }
        Ok(name)
    }
}

/// Reads `tool_choice`: a keyword, one of the functions, or the allowed functions.
///
/// The allowed functions are in the field `nested` of the choice, if `nested` is given.
/// `read_named` reads a function from the object at a path.
pub(crate) fn read_choice(
    choice: Option<Value>,
    nested: Option<&'static str>,
    read_named: impl Fn(Value, &str) -> Result<NamedFunction, ApiError>,
    tools: &[Value],
) -> Result<(ToolChoice, Option<HashSet<String>>), ApiError> {
    let (choice, allowed) = match choice {
        None => (ToolChoice::Auto, None),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => (ToolChoice::Auto, None),
            "none" => (ToolChoice::None, None),
            "required" => (ToolChoice::Required, None),
            other => {
                let other = excerpt(other);
                let message = format!(
                    "'tool_choice' must be none, auto, required, a function or allowed tools, \
                     got '{other}'"
                );
                return Err(ApiError::invalid(CHOICE, message));
            }
        },
        Some(Value::Object(allowed))
            if allowed.get("type").is_some_and(|kind| kind == "allowed_tools") =>
        {
            let (choice, allowed) =
                read_allowed(Value::Object(allowed), nested, read_named, tools)?;
            (choice, Some(allowed))
        }
        Some(named @ Value::Object(_)) => {
            (ToolChoice::Named(read_named(named, CHOICE)?.find_in(tools)?), None)
        }
        Some(other) => {
            let message =
                format!("'tool_choice' must be a string or an object, got {}", kind(&other));
            return Err(ApiError::invalid(CHOICE, message));
        }
    };
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(ApiError::invalid(CHOICE, REQUIRES_TOOLS));
    }
    Ok((choice, allowed))
}

/// Reads the allowed functions. The choice is [`ToolChoice::Required`] if one of them must be
/// called.
fn read_allowed(
    choice: Value,
    nested: Option<&'static str>,
    read_named: impl Fn(Value, &str) -> Result<NamedFunction, ApiError>,
    tools: &[Value],
) -> Result<(ToolChoice, HashSet<String>), ApiError> {
    let mut fields = Fields::new(choice, CHOICE)?;
    fields.ignore(&["type"]);
    if let Some(nested) = nested {
        let name = fields.name(nested);
        let inner = fields.take(nested)?.ok_or_else(|| ApiError::missing(&name))?;
        fields.finish()?;
        fields = Fields::new(inner, name)?;
    }
    let mode: String =
        fields.take("mode")?.ok_or_else(|| ApiError::missing(&fields.name("mode")))?;
    let choice = match mode.as_str() {
        "auto" => ToolChoice::Auto,
        "required" => ToolChoice::Required,
        other => {
            let name = fields.name("mode");
            let other = excerpt(other);
            let message = format!("'{name}' must be auto or required, got '{other}'");
            return Err(ApiError::invalid(name, message));
        }
    };
    let field = fields.name("tools");
    let listed: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    fields.finish()?;
    if listed.is_empty() || listed.len() > MAX_TOOLS {
        let given = listed.len();
        let message = format!("'{field}' must have 1 to {MAX_TOOLS} tools, got {given}");
        return Err(ApiError::invalid(field, message));
    }
    let named = |(i, tool)| read_named(tool, &format!("{field}[{i}]"))?.find_in(tools);
    let allowed = listed.into_iter().enumerate().map(named).collect::<Result<_, _>>()?;
    Ok((choice, allowed))
}

fn read_named(choice: Value, path: &str) -> Result<NamedFunction, ApiError> {
    let mut fields = Fields::new(choice, path)?;
    let kind: Option<String> = fields.take("type")?;
    if kind.as_deref() != Some("function") {
        let name = fields.name("type");
        let message = format!("'{name}' must be 'function'");
        return Err(ApiError::invalid(name, message));
    }
    let path = fields.name("function");
    let function = fields.take("function")?.ok_or_else(|| ApiError::missing(&path))?;
    fields.finish()?;
    let mut function = Fields::new(function, path)?;
    let field = function.name("name");
    let name = function.take("name")?.ok_or_else(|| ApiError::missing(&field))?;
    function.finish()?;
    Ok(NamedFunction { name, field })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(body: Value) -> Result<Option<ToolUse>, ApiError> {
        Fields::take_all(body, take)
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn functions_have_template_format() {
        let strict = json!({"function": {"strict": true, "name": "f"}});
        let body = json!({"tools": [strict, tool("g")], "parallel_tool_calls": false});
        let ToolUse { tools, choice, in_parallel, .. } = taken(body).unwrap().unwrap();
        let function = r#"{"name":"f","description":null,"parameters":null,"strict":true}"#;
        let expected = format!(r#"[{{"type":"function","function":{function}}},"#);
        assert!(tools.to_string().starts_with(&expected), "{tools}");
        assert_eq!((choice, in_parallel), (ToolChoice::Auto, false));
        assert!(taken(json!({"tools": [], "tool_choice": "auto"})).unwrap().is_none());
    }

    #[test]
    fn choice_is_keyword_or_function() {
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
        assert_eq!(choice(json!({"type": "custom"})), Err("tool_choice.type".to_owned()));
        assert_eq!(choice(json!({"type": "function"})), Err("tool_choice.function".to_owned()));
    }

    #[test]
    fn allowed_tools_restrict_functions() {
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let taken = |allowed: Value| {
            let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
            let taken =
                taken(json!({"tools": [tool("f"), tool("g"), tool("h")], "tool_choice": choice}));
            taken.map(Option::unwrap).map_err(|error| error.param.unwrap())
        };
        let ToolUse { tools, choice, allowed, .. } =
            taken(json!({"mode": "auto", "tools": [named("f"), named("h")]})).unwrap();
        // The model sees all functions.
        assert_eq!(tools.as_array().unwrap().len(), 3);
        assert_eq!(
            (choice, allowed),
            (ToolChoice::Auto, Some(["f", "h"].map(str::to_owned).into()))
        );
        let required = taken(json!({"mode": "required", "tools": [named("g")]})).unwrap();
        assert_eq!((required.choice, required.allowed.unwrap().len()), (ToolChoice::Required, 1));
        for (wrong, field) in [
            (Value::Null, ""),
            (json!({"tools": [named("f")]}), ".mode"),
            (json!({"mode": "none", "tools": [named("f")]}), ".mode"),
            (json!({"mode": "auto"}), ".tools"),
            (json!({"mode": "auto", "tools": []}), ".tools"),
            (json!({"mode": "auto", "tools": vec![named("f"); MAX_TOOLS + 1]}), ".tools"),
            (json!({"mode": "auto", "tools": [named("f"), named("x")]}), ".tools[1].function.name"),
            (json!({"mode": "auto", "tools": [{"type": "custom"}]}), ".tools[0].type"),
            (json!({"mode": "auto", "tools": [named("f")], "x": 1}), ".x"),
        ] {
            assert_eq!(taken(wrong).unwrap_err(), format!("tool_choice.allowed_tools{field}"));
        }
    }

    #[test]
    fn invalid_tool_names_field() {
        for (body, field) in [
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [tool("f"), {"type": "function"}]}), "tools[1].function"),
            (json!({"tools": [{"function": {}}]}), "tools[0].function.name"),
            (json!({"tools": [tool("")]}), "tools[0].function.name"),
            (
                json!({"tools": [{"function": {"name": "f", "parameters": []}}]}),
                "tools[0].function.parameters",
            ),
            (json!({"tools": [{"function": {"name": "f", "code": 1}}]}), "tools[0].function.code"),
            (json!({"tools": 3}), "tools"),
            (json!({"tools": vec![tool("f"); MAX_TOOLS + 1]}), "tools"),
            (json!({"tool_choice": "required"}), "tool_choice"),
        ] {
            assert_eq!(taken(body).err().unwrap().param.as_deref(), Some(field));
        }
    }
}
