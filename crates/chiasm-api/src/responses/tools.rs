//! `tools`, `tool_choice` and `parallel_tool_calls`: as in chat completions, but functions are
//! flat; and custom tools and namespaces, which are functions to the model, as in vLLM
//! (`get_function_tools`, `vllm/tool_parsers/utils.py`).

use std::collections::HashMap;

use chiasm_request::ToolUse;
use serde_json::{Value, json};

use super::custom_input;
use crate::error::ApiError;
use crate::openai::fields::Fields;
use crate::openai::tools::{
    self, Named, check_count, read_all, read_choice, read_function, tool_use,
};

/// The types of a choice that names a tool, and of those that may be allowed.
const NAMED: [&str; 2] = ["function", "custom"];

/// A tool as its client knows it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Called {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    /// It is given text.
    pub(super) is_custom: bool,
}

/// Tools that the model knows otherwise than their client, by the names that it knows.
#[derive(Debug, Default)]
pub struct Names(HashMap<String, Called>);

impl Names {
    /// What the client knows the function as that the model knows by this name.
    pub(super) fn called(&self, name: String) -> Called {
        let known = self.0.get(&name).cloned();
        known.unwrap_or(Called { namespace: None, name, is_custom: false })
    }

    /// The model's names of custom tools.
    fn of_custom(&self) -> impl Iterator<Item = String> {
        self.0.iter().filter(|(_, called)| called.is_custom).map(|(name, _)| name.clone())
    }

    /// The model's name of a tool that a choice may name without its namespace, where no other has
    /// the same name.
    fn resolved(&self, name: String) -> String {
        let mut same =
            self.0.iter().filter(|(_, called)| called.namespace.is_some() && called.name == name);
        match (same.next(), same.next()) {
            (Some((flat, _)), None) => flat.clone(),
            _ => name,
        }
    }
}

/// The name that the model has for a tool of a namespace.
pub(super) fn flat_name(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// Takes the three fields. `None` if there are no functions.
pub(super) fn take(fields: &mut Fields) -> Result<(Option<ToolUse>, Names), ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let choice = fields.take("tool_choice")?;
    let in_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    let tools: Vec<Tool> = read_all(tools, read_tool)?.into_iter().flatten().collect();
    check_count(tools.len())?;
    let names = names(&tools)?;
    let functions: Vec<Value> = tools.into_iter().map(|tool| tool.function).collect();
    let read_named = |choice, path: &str| {
        let Named { name, field } = read_named(choice, path)?;
        let is_known =
            functions.iter().any(|function| function["function"]["name"] == name.as_str());
        Ok(Named { name: if is_known { name } else { names.resolved(name) }, field })
    };
    let (choice, allowed) = read_choice(choice, None, read_named, &functions)?;
    let mut used = tool_use(functions, choice, allowed, in_parallel);
    if let Some(used) = &mut used {
        used.held = names.of_custom().collect();
    }
    Ok((used, names))
}

/// A tool as the model is told of it.
struct Tool {
    function: Value,
    /// What its client knows it as, if that is something else.
    called: Option<Called>,
    /// Where its name is in the request.
    field: String,
}

/// Those that the model knows otherwise. Each of these needs a name of its own, or nobody could
/// tell which one was called.
fn names(tools: &[Tool]) -> Result<Names, ApiError> {
    let mut known: HashMap<&str, bool> = HashMap::new();
    let mut names = Names::default();
    for Tool { function, called, field } in tools {
        let name = function["function"]["name"].as_str().unwrap_or_default();
        let was_special = known.insert(name, called.is_some());
        if was_special.is_some_and(|was_special| was_special || called.is_some()) {
            return Err(ApiError::invalid(
                field,
                format!("there are two tools that the model would know as '{name}'"),
            ));
        }
        if let Some(called) = called {
            names.0.insert(name.to_owned(), called.clone());
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
        return Ok(vec![read_called(fields, &kind, None)?]);
    }
    let namespace = tools::take_name(&mut fields)?;
    // As in vLLM, the model is told of the functions alone.
    fields.take::<String>("description")?;
    let field = fields.name("tools");
    let within: Vec<Value> = fields.take("tools")?.ok_or_else(|| ApiError::missing(&field))?;
    fields.finish()?;
    check_count(within.len())?;
    let read = |(i, tool)| {
        let mut fields = Fields::new(tool, format!("{field}[{i}]"))?;
        let kind: String =
            fields.take("type")?.ok_or_else(|| ApiError::missing(&fields.name("type")))?;
        read_called(fields, &kind, Some(&namespace))
    };
    within.into_iter().enumerate().map(read).collect()
}

/// Reads what a client runs: a function, or a custom tool.
fn read_called(
    mut fields: Fields,
    kind: &str,
    namespace: Option<&String>,
) -> Result<Tool, ApiError> {
    let is_custom = kind == "custom";
    if kind != "function" && !is_custom {
        let message = format!(
            "this server has no tools of its own, such as '{kind}'; tools must be functions or custom"
        );
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
    let is_other = is_custom || namespace.is_some();
    let called = is_other.then(|| Called { namespace: namespace.cloned(), name, is_custom });
    Ok(Tool { function, called, field })
}

/// Reads a custom tool. What it is given is any text: engines know no grammars within a call.
fn read_custom(mut fields: Fields) -> Result<Value, ApiError> {
    let name = tools::take_name(&mut fields)?;
    let description = fields.take("description")?;
    if let Some(format) = fields.take("format")? {
        let mut format = Fields::new(format, fields.name("format"))?;
        let kind: String =
            format.take("type")?.ok_or_else(|| ApiError::missing(&format.name("type")))?;
        if kind != "text" {
            let message = format!("custom tools are given any text; it must be text, got '{kind}'");
            return Err(ApiError {
                code: "unsupported_tool",
                ..ApiError::invalid(format.name("type"), message)
            });
        }
        format.finish()?;
    }
    fields.finish()?;
    Ok(tools::written(name, description, Some(custom_input::parameters()), None))
}

fn read_named(choice: Value, path: &str) -> Result<Named, ApiError> {
    let mut fields = Fields::new(choice, path)?;
    let kind: Option<String> = fields.take("type")?;
    if !kind.is_some_and(|kind| NAMED.contains(&kind.as_str())) {
        return Err(ApiError::invalid(fields.name("type"), "it must be 'function' or 'custom'"));
    }
    let field = fields.name("name");
    let name = fields.take("name")?.ok_or_else(|| ApiError::missing(&field))?;
    fields.finish()?;
    Ok(Named { name, field })
}

#[cfg(test)]
mod tests {
    use chiasm_request::ToolChoice;

    use super::*;

    fn both(body: Value) -> Result<(Option<ToolUse>, Names), String> {
        Fields::all_taken(body, take).map_err(|error| error.param.unwrap())
    }

    fn taken(body: Value) -> Result<Option<ToolUse>, String> {
        both(body).map(|(taken, _)| taken)
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "name": name, "parameters": {"type": "object"}, "strict": true})
    }

    #[test]
    fn flat_functions_come_out_as_templates_want_them() {
        let taken =
            taken(json!({"tools": [tool("f")], "parallel_tool_calls": false})).unwrap().unwrap();
        let function =
            r#"{"name":"f","description":null,"parameters":{"type":"object"},"strict":true}"#;
        let written = format!(r#"[{{"type":"function","function":{function}}}]"#);
        assert_eq!(taken.tools.to_string(), written);
        assert_eq!((taken.choice, taken.in_parallel), (ToolChoice::Auto, false));
    }

    #[test]
    fn a_choice_is_a_word_or_one_of_the_functions() {
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
    fn custom_tools_and_namespaces_are_functions_to_the_model() {
        let tools = json!([
            custom("sh", json!({"type": "text"})),
            namespace("n", json!([tool("f"), custom("sh", Value::Null)])),
            {"type": "function", "name": "g", "defer_loading": false, "allowed_callers": ["direct"], "async": false},
        ]);
        let (taken, names) = both(json!({"tools": tools})).unwrap();
        let ToolUse { tools, held, .. } = taken.unwrap();
        assert_eq!(held, ["sh", "n__sh"].map(str::to_owned).into());
        let parameters = r#"{"type":"object","properties":{"input":{"type":"string","description":"The freeform text payload for this tool."}},"required":["input"],"additionalProperties":false}"#;
        let function =
            format!(r#"{{"name":"sh","description":"runs it","parameters":{parameters}}}"#);
        assert_eq!(tools[0]["function"].to_string(), function);
        let told: Vec<_> = tools
            .as_array()
            .unwrap()
            .iter()
            .map(|tool| tool["function"]["name"].as_str())
            .collect();
        assert_eq!(told, ["sh", "n__f", "n__sh", "g"].map(Some));
        let called = |name: &str| {
            let Called { namespace, name, is_custom } = names.called(name.to_owned());
            (namespace.unwrap_or_default(), name, is_custom)
        };
        let of = |namespace: &str, name: &str, is_custom| {
            (namespace.to_owned(), name.to_owned(), is_custom)
        };
        assert_eq!(called("sh"), of("", "sh", true));
        assert_eq!(called("n__f"), of("n", "f", false));
        assert_eq!(called("n__sh"), of("n", "sh", true));
        assert_eq!(called("other"), of("", "other", false));
    }

    #[test]
    fn a_choice_may_leave_out_the_namespace() {
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
        let ToolUse { choice, allowed: some, .. } = allowed(listed).unwrap();
        assert_eq!(
            (choice, some),
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
    fn what_is_wrong_is_named() {
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
