//! The response object.

use chiasm_backend::RequestId;
use chiasm_media::Charge;
use chiasm_request::ClientSampling;
use chiasm_request::GenerationConfig;
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
    /// Collects the fields as they are in the request, or their defaults, and the fields that are
    /// the same for all requests.
    pub fn from_fields(fields: &Fields) -> Result<Self, ApiError> {
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
            echo.insert(name, fields.get(name).unwrap_or(&default))?;
        }
        // OpenAI's clients and Open Responses expect all parts of these fields in every response.
        let mut parts = ["reasoning", "text", "tools"]
            .map(|name| fields.get(name).cloned().unwrap_or_default());
        let [reasoning, text, tools] = &mut parts;
        complete_reasoning(reasoning);
        complete_text(text);
        complete_tools(tools);
        echo.insert("reasoning", reasoning)?;
        echo.insert("text", text)?;
        echo.insert("tools", tools)?;
        for (name, value) in [
            ("background", json!(false)),
            ("previous_response_id", Value::Null),
            ("service_tier", json!("default")),
            ("store", json!(false)),
            ("truncation", json!("disabled")),
        ] {
            echo.insert(name, &value)?;
        }
        Ok(echo)
    }

    /// Returns the size of the JSON in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, value)| value.get().len() as u64).sum()
    }

    fn insert(&mut self, name: &'static str, value: &Value) -> Result<(), ApiError> {
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

/// Adds the parts that an object lacks. Null becomes an object.
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
    /// Creates the head of the response to a request. The request's `charge` shrinks to the memory
    /// of the echoed fields.
    pub fn new(
        request: &RequestId,
        model: &str,
        defaults: &GenerationConfig,
        sampling: &ClientSampling,
        mut echo: Echo,
        mut charge: Charge,
    ) -> Result<Self, ApiError> {
        for (name, given, default, neutral) in [
            ("temperature", sampling.temperature, defaults.temperature, 1.0),
            ("top_p", sampling.top_p, defaults.top_p, 1.0),
            ("presence_penalty", sampling.presence_penalty, defaults.presence_penalty, 0.0),
            ("frequency_penalty", sampling.frequency_penalty, defaults.frequency_penalty, 0.0),
        ] {
            echo.insert(name, &given.or(default).unwrap_or(neutral).into())?;
        }
        // The echo is in memory twice: here, and in an event that waits to be sent.
        charge.shrink_to(2 * echo.bytes());
        let id = format!("resp_{request}");
        Ok(Self { id, created_at: unix_seconds(), model: model.to_owned(), echo, _charge: charge })
    }

    /// Returns the response with the output so far.
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
    /// Sets the token counts.
    pub fn with_usage(self, usage: Usage) -> Self {
        Self { usage: Some(usage.into()), ..self }
    }

    /// Sets the reason why the response is incomplete.
    pub fn with_incomplete_reason(self, reason: Option<IncompleteReason>) -> Self {
        Self { incomplete_details: reason.map(|reason| Incomplete { reason }), ..self }
    }

    /// Sets the error.
    pub fn with_error(self, message: &'a str) -> Self {
        // Clients accept a fixed set of codes; this is the one for server errors.
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

/// The reason for an incomplete response. OpenAI has none for an answer that ends within a call.
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
    /// The written tokens, a required field of OpenAI's clients.
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
        serde_json::to_value(Echo::from_fields(&Fields::new(body, "").unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn missing_parts_of_fields_are_added() {
        let function = json!({
            "type": "function",
            "name": "f",
            "description": null,
            "parameters": null,
            "strict": null,
        });
        let schema = json!({
            "type": "json_schema",
            "schema": {},
            "name": "response",
            "description": null,
            "strict": false,
        });
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
    fn given_parts_of_fields_are_kept() {
        let tool = json!({
            "type": "function",
            "name": "f",
            "description": "d",
            "parameters": {},
            "strict": true,
        });
        let custom = json!({"type": "custom", "name": "c"});
        let format = json!({
            "type": "json_schema",
            "name": "n",
            "description": "d",
            "schema": {},
            "strict": true,
        });
        let body = json!({
            "reasoning": {"effort": "low", "summary": "auto"},
            "tools": [tool, custom],
            "top_logprobs": 3,
            "text": {"format": format},
        });
        let echoed = echoed(body.clone());
        for (field, sent) in body.as_object().unwrap() {
            assert_eq!(&echoed[field], sent, "{field}");
        }
    }
}
