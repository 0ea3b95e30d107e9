//! The response object.

use chiasm_backend::RequestId;
use chiasm_media::Charge;
use chiasm_request::GenerationConfig;
use chiasm_request::Sampling;
use serde::{Serialize, Serializer};
use serde_json::json;
use serde_json::value::{RawValue, Value, to_raw_value};

use super::item::{Item, Status};
use crate::error::ApiError;
use crate::openai::fields::Fields;
use crate::openai::{Usage, unix_seconds};

/// The fields of a request that its response repeats, as JSON. They may be as large as the request.
#[derive(Debug)]
pub struct Echo(Vec<(&'static str, Box<RawValue>)>);

impl Echo {
    /// Fields as they are in the request, or their defaults, and what is the same for all requests.
    pub fn of(fields: &Fields) -> Result<Self, ApiError> {
        let mut echo = Self(Vec::new());
        for (name, default) in [
            ("instructions", Value::Null),
            ("max_output_tokens", Value::Null),
            ("max_tool_calls", Value::Null),
            ("metadata", json!({})),
            ("parallel_tool_calls", json!(true)),
            ("prompt_cache_key", Value::Null),
            ("safety_identifier", Value::Null),
            ("tool_choice", json!("auto")),
            ("top_logprobs", json!(0)),
            ("user", Value::Null),
        ] {
            echo.put(name, fields.get(name).unwrap_or(&default))?;
        }
        // OpenAI's clients and Open Responses expect all parts of these fields in every response.
        let mut parts = ["reasoning", "text", "tools"]
            .map(|name| fields.get(name).cloned().unwrap_or_default());
        let [reasoning, text, tools] = &mut parts;
        complete_reasoning(reasoning);
        complete_text(text);
        complete_tools(tools);
        echo.put("reasoning", reasoning)?;
        echo.put("text", text)?;
        echo.put("tools", tools)?;
        for (name, value) in [
            ("background", json!(false)),
            ("previous_response_id", Value::Null),
            ("service_tier", json!("default")),
            ("store", json!(false)),
            ("truncation", json!("disabled")),
        ] {
            echo.put(name, &value)?;
        }
        Ok(echo)
    }

    /// The bytes of its JSON.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, value)| value.get().len() as u64).sum()
    }

    fn put(&mut self, name: &'static str, value: &Value) -> Result<(), ApiError> {
        let value = to_raw_value(value).map_err(|error| ApiError::internal(error.to_string()))?;
        self.0.push((name, value));
        Ok(())
    }
}

fn complete_reasoning(reasoning: &mut Value) {
    add_missing(reasoning, &[("effort", Value::Null), ("summary", Value::Null)]);
}

fn complete_text(text: &mut Value) {
    add_missing(text, &[("format", json!({"type": "text"}))]);
    if let Some(format) = text.get_mut("format").filter(|format| format["type"] == "json_schema") {
        let strict = ("strict", json!(false));
        add_missing(format, &[("name", json!("response")), ("description", Value::Null), strict]);
    }
}

fn complete_tools(tools: &mut Value) {
    if tools.is_null() {
        *tools = json!([]);
    }
    let functions =
        tools.as_array_mut().into_iter().flatten().filter(|tool| tool["type"] == "function");
    for function in functions {
        let parts = ["description", "parameters", "strict"].map(|part| (part, Value::Null));
        add_missing(function, &parts);
    }
}

/// Adds the parts that an object lacks. A value that is null becomes an object.
fn add_missing(value: &mut Value, parts: &[(&str, Value)]) {
    if value.is_null() {
        *value = json!({});
    }
    let Value::Object(object) = value else { return };
    for (name, default) in parts {
        let part = object.entry(*name).or_insert(Value::Null);
        if part.is_null() {
            part.clone_from(default);
        }
    }
}

impl Serialize for Echo {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// The fields that are the same in all events of one response.
pub struct Head {
    id: String,
    created_at: u64,
    model: String,
    echo: Echo,
    /// The charge for the memory of the echo.
    _charge: Charge,
}

impl Head {
    /// The head of the response to a request, whose `charge` counts from now on what is kept of it.
    pub fn new(
        request: &RequestId,
        model: &str,
        defaults: &GenerationConfig,
        sampling: &Sampling,
        mut echo: Echo,
        mut charge: Charge,
    ) -> Result<Self, ApiError> {
        for (name, given, default, neutral) in [
            ("temperature", sampling.temperature, defaults.temperature, 1.0),
            ("top_p", sampling.top_p, defaults.top_p, 1.0),
            ("presence_penalty", sampling.presence_penalty, defaults.presence_penalty, 0.0),
            ("frequency_penalty", sampling.frequency_penalty, defaults.frequency_penalty, 0.0),
        ] {
            echo.put(name, &given.or(default).unwrap_or(neutral).into())?;
        }
        // Beside itself there is an event with it that waits to be read.
        charge.shrink_to(2 * echo.bytes());
        let id = format!("resp_{request}");
        Ok(Self { id, created_at: unix_seconds(), model: model.to_owned(), echo, _charge: charge })
    }

    /// The response with what was said so far.
    pub fn response<'a>(&'a self, output: &'a [Item], status: Status) -> Response<'a> {
        Response {
            id: &self.id,
            object: "response",
            created_at: self.created_at,
            completed_at: (status == Status::Completed).then(unix_seconds),
            status,
            error: None,
            incomplete_details: None,
            model: &self.model,
            output,
            usage: None,
            echo: &self.echo,
        }
    }
}

impl<'a> Response<'a> {
    /// With the tokens of it all.
    pub fn with_usage(self, usage: Usage) -> Self {
        Self { usage: Some(usage.into()), ..self }
    }

    /// Sets the reason why the response is incomplete.
    pub fn with_incomplete_reason(self, reason: Option<IncompleteReason>) -> Self {
        Self { incomplete_details: reason.map(|reason| Incomplete { reason }), ..self }
    }

    /// With what went wrong.
    pub fn with_error(self, message: &'a str) -> Self {
        // Clients know some codes only; this one is for faults of servers.
        Self { error: Some(Fault { code: "server_error", message }), ..self }
    }
}

/// OpenAI's response object.
#[derive(Serialize)]
pub struct Response<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    status: Status,
    error: Option<Fault<'a>>,
    incomplete_details: Option<Incomplete>,
    model: &'a str,
    output: &'a [Item],
    usage: Option<ResponseUsage>,
    #[serde(flatten)]
    echo: &'a Echo,
}

#[derive(Serialize)]
struct Fault<'a> {
    code: &'static str,
    message: &'a str,
}

#[derive(Serialize)]
struct Incomplete {
    reason: IncompleteReason,
}

/// The reason for an incomplete response. OpenAI has none for an answer that the model ends within
/// a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IncompleteReason {
    MaxOutputTokens,
}

#[derive(Serialize)]
struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: InputDetails,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    total_tokens: usize,
}

#[derive(Serialize)]
struct InputDetails {
    cached_tokens: usize,
    /// The type of OpenAI's clients has it always.
    cache_write_tokens: usize,
}

#[derive(Serialize)]
struct OutputDetails {
    reasoning_tokens: usize,
}

impl From<Usage> for ResponseUsage {
    fn from(usage: Usage) -> Self {
        let Usage {
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            created_tokens,
            reasoning_tokens,
            ..
        } = usage;
        Self {
            input_tokens: prompt_tokens,
            input_tokens_details: InputDetails {
                cached_tokens,
                cache_write_tokens: created_tokens.unwrap_or(0),
            },
            output_tokens: completion_tokens,
            output_tokens_details: OutputDetails {
                reasoning_tokens: reasoning_tokens.unwrap_or(0),
            },
            total_tokens: prompt_tokens + completion_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn echoed(body: Value) -> Value {
        serde_json::to_value(Echo::of(&Fields::new(body, "").unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn missing_parts_of_fields_are_added() {
        let function = json!({"type": "function", "name": "f", "description": null, "parameters": null,
            "strict": null});
        let schema = json!({"type": "json_schema", "schema": {}, "name": "response", "description": null,
            "strict": false});
        for (field, sent, expected) in [
            ("reasoning", Value::Null, json!({"effort": null, "summary": null})),
            ("reasoning", json!({"effort": "low"}), json!({"effort": "low", "summary": null})),
            ("text", Value::Null, json!({"format": {"type": "text"}})),
            (
                "text",
                json!({"verbosity": "medium"}),
                json!({"verbosity": "medium", "format": {"type": "text"}}),
            ),
            (
                "text",
                json!({"format": {"type": "json_schema", "schema": {}}}),
                json!({"format": schema}),
            ),
            ("tools", Value::Null, json!([])),
            ("tools", json!([{"type": "function", "name": "f"}]), json!([function])),
            ("top_logprobs", Value::Null, json!(0)),
        ] {
            assert_eq!(echoed(json!({field: sent}))[field], expected, "{field} {sent}");
        }
    }

    /// The request is refused later, by the field's name.
    #[test]
    fn field_of_wrong_type_is_echoed_as_it_is() {
        for wrong in [json!("plain"), json!([]), json!(1), json!({"format": "json"})] {
            assert_eq!(echoed(json!({"text": wrong}))["text"], wrong);
        }
        assert_eq!(echoed(json!({"reasoning": "high"}))["reasoning"], json!("high"));
        assert_eq!(echoed(json!({"tools": ["f"]}))["tools"], json!(["f"]));
    }

    #[test]
    fn given_parts_of_fields_stay() {
        let tool = json!({"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": true});
        let custom = json!({"type": "custom", "name": "c"});
        let body = json!({
            "reasoning": {"effort": "low", "summary": "auto"}, "tools": [tool, custom], "top_logprobs": 3,
            "text": {"format": {"type": "json_schema", "name": "n", "description": "d", "schema": {}, "strict": true}},
        });
        let echoed = echoed(body.clone());
        for (field, sent) in body.as_object().unwrap() {
            assert_eq!(&echoed[field], sent, "{field}");
        }
    }
}
