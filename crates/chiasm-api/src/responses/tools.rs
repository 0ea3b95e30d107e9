//! `tools`, `tool_choice` and `parallel_tool_calls`.
//!
//! Unlike in chat completions, functions are flat. Custom tools and the tools of namespaces become
//! functions for the model, as in vLLM (`get_function_tools`, `vllm/tool_parsers/utils.py`).

use std::collections::HashMap;

use chiasm_request::ToolUse;
use serde_json::{Value, json};

use super::custom_input;
use crate::error::{ApiError, excerpt};
use crate::openai::fields::Fields;
use crate::openai::tools::{
    self, NamedFunction, check_count, read_all, read_choice, read_function, tool_use,
};

/// The types of a choice that names a tool, and of allowed tools.
const NAMED_TYPES: [&str; 2] = ["function", "custom"];

/// A tool as the client knows it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ClientTool {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    /// `true` if the tool's input is text.
    pub(super) is_custom: bool,
}

/// The tools that the client and the model know differently, by the model's names.
#[derive(Debug, Default)]
pub struct ToolNames(HashMap<String, ClientTool>);

impl ToolNames {
    /// Returns the client's tool for the model's name of a function.
    pub(super) fn client_tool(&self, name: String) -> ClientTool {
        let known = self.0.get(&name).cloned();
        known.unwrap_or(ClientTool { namespace: None, name, is_custom: false })
    }

    /// Returns the model's names of custom tools.
    fn custom_names(&self) -> impl Iterator<Item = String> {
        self.0.iter().filter(|(_, tool)| tool.is_custom).map(|(name, _)| name.clone())
    }

    /// Returns the model's name of a tool that a choice names without its namespace.
    ///
    /// The name stays if there is no such tool, or if several namespaces have one.
    fn resolve(&self, name: String) -> String {
        let mut matches =
            self.0.iter().filter(|(_, tool)| tool.namespace.is_some() && tool.name == name);
        match (matches.next(), matches.next()) {
            (Some((flat_name, _)), None) => flat_name.clone(),
            _ => name,
        }
    }
}

/// Returns the model's name of a tool in a namespace.
pub(super) fn flat_name(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// Takes the three fields; the tool use is `None` if there are no functions.
pub(super) fn take(fields: &mut Fields) -> Result<(Option<ToolUse>, ToolNames), ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let choice = fields.take("tool_choice")?;
    let in_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    let tools: Vec<Tool> = read_all(tools, read_tool)?.into_iter().flatten().collect();
    check_count(tools.len())?;
    let names = collect_names(&tools)?;
    let functions: Vec<Value> = tools.into_iter().map(|tool| tool.function).collect();
    let read_named = |choice, path: &str| {
        let NamedFunction { name, field } = read_named(choice, path)?;
        let is_known =
            functions.iter().any(|function| function["function"]["name"] == name.as_str());
        Ok(NamedFunction { name: if is_known { name } else { names.resolve(name) }, field })
    };
    let (choice, allowed) = read_choice(choice, None, read_named, &functions)?;
    let mut tool_use = tool_use(functions, choice, allowed, in_parallel);
    if let Some(tool_use) = &mut tool_use {
        tool_use.enforced = names.custom_names().collect();
    }
    Ok((tool_use, names))
}

/// A tool as a function for the model.
struct Tool {
    function: Value,
    /// The client's tool, if it differs from the function.
    client_tool: Option<ClientTool>,
    /// The path of the name in the request.
    field: String,
}

/// Collects the tools that differ from their functions.
///
/// # Errors
/// Fails if such a tool shares its name for the model with another tool, because calls would be
/// ambiguous.
fn collect_names(tools: &[Tool]) -> Result<ToolNames, ApiError> {
    let mut known: HashMap<&str, bool> = HashMap::new();
    let mut names = ToolNames::default();
    for Tool { function, client_tool, field } in tools {
        let name = function["function"]["name"].as_str().unwrap_or_default();
        let earlier_differs = known.insert(name, client_tool.is_some());
        if earlier_differs.is_some_and(|differs| differs || client_tool.is_some()) {
            return Err(ApiError::invalid(
                field,
                format!("two tools have the same name for the model: '{name}'"),
            ));
        }
        if let Some(client_tool) = client_tool {
            names.0.insert(name.to_owned(), client_tool.clone());
        }
    }
    Ok(names)
}

/// Reads a tool, or all tools of a namespace.
fn read_tool(tool: Value, path: &str) -> Result<Vec<Tool>, ApiError> {
    let mut fields = Fields::new(tool, path)?;
    let kind: String =
        fields.take("type")?.ok_or_else(|| ApiError::missing(&fields.name("type")))?;
    if kind != "namespace" {
        return Ok(vec![read_client_tool(fields, &kind, None)?]);
    }
    let namespace = tools::take_name(&mut fields)?;
    // As in vLLM, the model only sees the functions.
    fields.take::<String>("description")?;
    let field = fields.name("tools");
    let within: Vec<Value> = fields.take("tools")?.ok_or_else(|| ApiError::missing(&field))?;
    fields.finish()?;
    check_count(within.len())?;
    let read = |(i, tool)| {
        let mut fields = Fields::new(tool, format!("{field}[{i}]"))?;
        let kind: String =
            fields.take("type")?.ok_or_else(|| ApiError::missing(&fields.name("type")))?;
        read_client_tool(fields, &kind, Some(&namespace))
    };
    within.into_iter().enumerate().map(read).collect()
}

/// Reads a tool that the client runs: a function, or a custom tool.
fn read_client_tool(
    mut fields: Fields,
    kind: &str,
    namespace: Option<&String>,
) -> Result<Tool, ApiError> {
    let is_custom = kind == "custom";
    if kind != "function" && !is_custom {
        let kind = excerpt(kind);
        let message =
            format!("tools of type '{kind}' are not supported; use 'function' or 'custom'");
        return Err(ApiError {
            code: "unsupported_tool",
            ..ApiError::invalid(fields.name("type"), message)
        });
    }
    fields.refuse_unless("defer_loading", |value| value == false)?;
    fields.refuse_unless("allowed_callers", |value| value == &json!(["direct"]))?;
    fields.refuse_unless("async", |value| value == false)?;
    let field = fields.name("name");
    let mut function = if is_custom { read_custom(fields)? } else { read_function(fields)? };
    let name = function["function"]["name"].as_str().unwrap_or_default().to_owned();
    if let Some(namespace) = namespace {
        function["function"]["name"] = flat_name(namespace, &name).into();
    }
    let differs = is_custom || namespace.is_some();
    let client_tool =
        differs.then(|| ClientTool { namespace: namespace.cloned(), name, is_custom });
    Ok(Tool { function, client_tool, field })
}

/// Reads a custom tool. Its input may be any text, because engines support no grammars within
/// calls.
fn read_custom(mut fields: Fields) -> Result<Value, ApiError> {
    let name = tools::take_name(&mut fields)?;
    let description = fields.take("description")?;
    if let Some(format) = fields.take("format")? {
        let mut format = Fields::new(format, fields.name("format"))?;
        let kind: String =
            format.take("type")?.ok_or_else(|| ApiError::missing(&format.name("type")))?;
        if kind != "text" {
            let name = format.name("type");
            let message = format!(
                "'{name}' must be text, got '{kind}': grammars of custom tools are not supported"
            );
            return Err(ApiError { code: "unsupported_tool", ..ApiError::invalid(name, message) });
        }
        format.finish()?;
    }
    fields.finish()?;
    Ok(tools::function_json(name, description, Some(custom_input::parameters()), None))
}

fn read_named(choice: Value, path: &str) -> Result<NamedFunction, ApiError> {
    let mut fields = Fields::new(choice, path)?;
    let kind: Option<String> = fields.take("type")?;
    if !kind.is_some_and(|kind| NAMED_TYPES.contains(&kind.as_str())) {
        let name = fields.name("type");
        let message = format!("'{name}' must be 'function' or 'custom'");
        return Err(ApiError::invalid(name, message));
    }
    let field = fields.name("name");
    let name = fields.take("name")?.ok_or_else(|| ApiError::missing(&field))?;
    fields.finish()?;
    Ok(NamedFunction { name, field })
}

#[cfg(test)]
mod tests {
    use chiasm_request::ToolChoice;

    use super::*;

    fn take_with_names(body: Value) -> Result<(Option<ToolUse>, ToolNames), String> {
        Fields::take_all(body, take).map_err(|error| error.param.unwrap())
    }

    fn taken(body: Value) -> Result<Option<ToolUse>, String> {
        take_with_names(body).map(|(taken, _)| taken)
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "name": name, "parameters": {"type": "object"}, "strict": true})
    }

    #[test]
    fn flat_functions_have_template_format() {
        let taken =
            taken(json!({"tools": [tool("f")], "parallel_tool_calls": false})).unwrap().unwrap();
        let function =
            r#"{"name":"f","description":null,"parameters":{"type":"object"},"strict":true}"#;
        let written = format!(r#"[{{"type":"function","function":{function}}}]"#);
        assert_eq!(taken.tools.to_string(), written);
        assert_eq!((taken.choice, taken.in_parallel), (ToolChoice::Auto, false));
    }

    #[test]
    fn choice_is_keyword_or_function() {
        let choice = |choice: Value| {
            taken(json!({"tools": [tool("f")], "tool_choice": choice}))
                .map(|taken| taken.unwrap().choice)
        };
        assert_eq!(choice(json!("required")), Ok(ToolChoice::Required));
        assert_eq!(choice(json!("none")), Ok(ToolChoice::None));
        assert_eq!(
            choice(json!({"type": "function", "name": "f"})),
            Ok(ToolChoice::Named("f".to_owned()))
        );
        assert_eq!(
            choice(json!({"type": "function", "name": "g"})),
            Err("tool_choice.name".to_owned())
        );
        assert_eq!(choice(json!({"type": "function"})), Err("tool_choice.name".to_owned()));
        assert_eq!(choice(json!({"type": "web_search"})), Err("tool_choice.type".to_owned()));
        assert_eq!(
            choice(json!({"type": "custom", "name": "f"})),
            Ok(ToolChoice::Named("f".to_owned()))
        );
        assert_eq!(choice(json!("any")), Err("tool_choice".to_owned()));
        assert_eq!(taken(json!({"tool_choice": "required"})).unwrap_err(), "tool_choice");
    }

    fn custom(name: &str, format: Value) -> Value {
        json!({"type": "custom", "name": name, "description": "runs it", "format": format})
    }

    fn namespace(name: &str, tools: Value) -> Value {
        json!({"type": "namespace", "name": name, "description": "d", "tools": tools})
    }

    #[test]
    fn custom_tools_become_functions() {
        let tools = json!([
            custom("sh", json!({"type": "text"})),
            namespace("n", json!([tool("f"), custom("sh", Value::Null)])),
            {
                "type": "function",
                "name": "g",
                "defer_loading": false,
                "allowed_callers": ["direct"],
                "async": false,
            },
        ]);
        let (taken, names) = take_with_names(json!({"tools": tools})).unwrap();
        let ToolUse { tools, enforced, .. } = taken.unwrap();
        assert_eq!(enforced, ["sh", "n__sh"].map(str::to_owned).into());
        let input = r#"{"type":"string","description":"The freeform text payload for this tool."}"#;
        let properties = format!(r#""type":"object","properties":{{"input":{input}}}"#);
        let parameters =
            format!(r#"{{{properties},"required":["input"],"additionalProperties":false}}"#);
        let function =
            format!(r#"{{"name":"sh","description":"runs it","parameters":{parameters}}}"#);
        assert_eq!(tools[0]["function"].to_string(), function);
        let model_names: Vec<_> = tools
            .as_array()
            .unwrap()
            .iter()
            .map(|tool| tool["function"]["name"].as_str())
            .collect();
        assert_eq!(model_names, ["sh", "n__f", "n__sh", "g"].map(Some));
        let client_tool = |name: &str| {
            let ClientTool { namespace, name, is_custom } = names.client_tool(name.to_owned());
            (namespace.unwrap_or_default(), name, is_custom)
        };
        let expected = |namespace: &str, name: &str, is_custom| {
            (namespace.to_owned(), name.to_owned(), is_custom)
        };
        assert_eq!(client_tool("sh"), expected("", "sh", true));
        assert_eq!(client_tool("n__f"), expected("n", "f", false));
        assert_eq!(client_tool("n__sh"), expected("n", "sh", true));
        assert_eq!(client_tool("other"), expected("", "other", false));
    }

    #[test]
    fn choice_may_omit_namespace() {
        let tools = json!([
            custom("c", Value::Null),
            namespace("n", json!([tool("f"), tool("c"), tool("x")])),
            namespace("m", json!([tool("x")])),
        ]);
        let choice = |name: &str| {
            let choice = json!({"type": "function", "name": name});
            taken(json!({"tools": tools, "tool_choice": choice})).map(|taken| taken.unwrap().choice)
        };
        for (name, flat) in [("f", "n__f"), ("n__f", "n__f"), ("c", "c"), ("m__x", "m__x")] {
            assert_eq!(choice(name), Ok(ToolChoice::Named(flat.to_owned())));
        }
        assert_eq!(choice("x"), Err("tool_choice.name".to_owned()));
        let allowed = |listed: Value| {
            let choice = json!({"type": "allowed_tools", "mode": "required", "tools": listed});
            taken(json!({"tools": tools, "tool_choice": choice})).map(Option::unwrap)
        };
        let listed = json!([{"type": "custom", "name": "c"}, {"type": "function", "name": "f"}]);
        let ToolUse { choice, allowed: names, .. } = allowed(listed).unwrap();
        assert_eq!(
            (choice, names),
            (ToolChoice::Required, Some(["c", "n__f"].map(str::to_owned).into()))
        );
        assert_eq!(
            allowed(json!([{"type": "mcp", "server_label": "s"}])).unwrap_err(),
            "tool_choice.tools[0].type"
        );
        assert_eq!(
            allowed(json!([{"type": "custom", "name": "y"}])).unwrap_err(),
            "tool_choice.tools[0].name"
        );
    }

    #[test]
    fn invalid_tool_names_field() {
        for (body, field) in [
            (json!({"tools": [tool("f"), {"type": "web_search"}]}), "tools[1].type"),
            (json!({"tools": [{"name": "f"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
            (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "tools[0].name"),
            (json!({"tools": [{"type": "function", "name": "f", "code": 1}]}), "tools[0].code"),
            (
                json!({"tools": [{"type": "function", "name": "f", "defer_loading": true}]}),
                "tools[0].defer_loading",
            ),
            (
                json!({"tools": [{"type": "function", "name": "f", "async": true}]}),
                "tools[0].async",
            ),
            (
                json!({"tools": [{"type": "function", "name": "f", "output_schema": {}}]}),
                "tools[0].output_schema",
            ),
            (json!({"tools": [{"type": "custom", "name": ""}]}), "tools[0].name"),
            (
                json!({"tools": [custom("c", json!({"type": "grammar", "syntax": "lark"}))]}),
                "tools[0].format.type",
            ),
            (
                json!({"tools": [{"type": "custom", "name": "c", "parameters": {}}]}),
                "tools[0].parameters",
            ),
            (
                json!({"tools": [namespace("n", json!([{"type": "mcp"}]))]}),
                "tools[0].tools[0].type",
            ),
            (
                json!({"tools": [namespace("n", json!([namespace("m", json!([]))]))]}),
                "tools[0].tools[0].type",
            ),
            (json!({"tools": [namespace("n", Value::Null)]}), "tools[0].tools"),
            (json!({"tools": vec![namespace("n", json!(vec![tool("f"); 600])); 2]}), "tools"),
            (
                json!({"tools": [tool("n__f"), namespace("n", json!([tool("f")]))]}),
                "tools[1].tools[0].name",
            ),
            (json!({"tools": [custom("c", Value::Null), tool("c")]}), "tools[1].name"),
        ] {
            assert_eq!(taken(body).unwrap_err(), field);
        }
    }
}
