//! The request bodies of `/v1/messages` and `/v1/messages/count_tokens`.

use std::fmt;

use chiasm_backend::Structured;
use chiasm_media::Charge;
use chiasm_request::{Chat, ClientSampling, GenerateRequest, Prompt, ThinkingBudget};
use serde::de::{MapAccess, Visitor};
use serde_json::{Map, Value};

use super::messages::{Messages, System, message};
use super::tools;
use crate::error::{ApiError, excerpt};
use crate::openai::fields::Fields;
use crate::openai::intake::{Intake, Seed};
use crate::openai::{RequestBody, sampling, structured};

/// The minimum thinking budget, in tokens: Anthropic's limit.
const MIN_THINKING_TOKENS: u32 = 1024;
/// Fields without an effect on the answer, or only on Anthropic's billing, caching and choice of
/// region.
const IGNORED_FIELDS: [&str; 9] = [
    "metadata",
    "service_tier",
    "speed",
    "inference_geo",
    "cache_control",
    "betas",
    "context_management",
    "user_profile_id",
    "workspace_id",
];

/// The body of `POST /v1/messages`.
pub struct MessagesRequest {
    /// The model's name, if given.
    pub model: Option<String>,
    /// `true` if the answer is a stream of events.
    pub is_streamed: bool,
    /// The request itself.
    pub generate: GenerateRequest,
}

/// The body of `POST /v1/messages/count_tokens`.
pub struct CountRequest {
    /// The model's name, if given.
    pub model: Option<String>,
    /// The request whose tokens are counted.
    pub generate: GenerateRequest,
}

impl RequestBody for MessagesRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let mut body: Body = intake.read()?;
        let fields = &mut body.fields;
        let max_tokens = fields.take_in("max_tokens", 1.., "at least 1")?;
        let max_tokens: u32 = max_tokens.ok_or_else(|| ApiError::missing("max_tokens"))?;
        let sampling = ClientSampling {
            max_tokens: Some(max_tokens),
            temperature: fields.take_in("temperature", 0.0..=2.0, "from 0 to 2")?,
            top_p: fields.take_in("top_p", f64::MIN_POSITIVE..=1.0, "above 0 and at most 1")?,
            top_k: fields.take_in("top_k", -1..=i64::from(i32::MAX), "-1, 0 or more")?,
            stop: sampling::take_stops(fields, "stop_sequences")?,
            ..ClientSampling::default()
        };
        let is_streamed = fields.take("stream")?.unwrap_or(false);
        let cache_salt = sampling::take_salt(fields)?;
        let (model, generate) = body.finish(sampling)?;
        let generate = GenerateRequest { cache_salt, ..generate };
        Ok((Self { model, is_streamed, generate }, intake.into_charge()))
    }
}

impl RequestBody for CountRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (model, generate) = intake.read::<Body>()?.finish(ClientSampling::default())?;
        Ok((Self { model, generate }, intake.into_charge()))
    }
}

/// All fields of a body.
struct Body {
    fields: Fields,
    system: Option<System>,
    messages: Option<Messages>,
}

impl<'de> Visitor<'de> for Seed<'_, Body> {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
        let intake = self.intake;
        let mut fields = Map::new();
        let mut system = None;
        let mut messages = None;
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(&name);
            match &*name {
                "messages" => messages = map.next_value_seed(intake.seed::<Option<Messages>>())?,
                "system" => system = map.next_value_seed(intake.seed::<Option<System>>())?,
                _ => {
                    let value = map.next_value_seed(intake.seed::<Value>())?;
                    intake.insert(&mut fields, &name, value)?;
                }
            }
            intake.leave(outer);
        }
        Ok(Body { fields: Fields::from_map(fields), system, messages })
    }
}

impl Body {
    /// Takes the fields of both endpoints: the model's name, and everything that affects the
    /// prompt. `sampling` holds the settings from other fields.
    fn finish(
        self,
        sampling: ClientSampling,
    ) -> Result<(Option<String>, GenerateRequest), ApiError> {
        let Self { mut fields, system, messages } = self;
        let Messages { mut messages, media } =
            messages.ok_or_else(|| ApiError::missing("messages"))?;
        if let Some(System(text)) = system.filter(|System(text)| !text.is_empty()) {
            messages.insert(0, message("system", text));
        }
        let (effort, structured) = take_output_config(&mut fields)?;
        let Thinking { is_off, budget } = take_thinking(&mut fields, sampling.max_tokens)?;
        let tools = tools::take(&mut fields)?;
        let chat = Chat {
            messages,
            media,
            add_generation_prompt: true,
            template_kwargs: fields.take("chat_template_kwargs")?.unwrap_or_default(),
            reasoning_effort: if is_off { Some("none".to_owned()) } else { effort },
            tools: tools.as_ref().map(|tools| tools.tools.clone()),
            ..Chat::default()
        };
        let model = fields.take("model")?;
        fields.ignore(&IGNORED_FIELDS);
        fields.finish()?;
        let generate = GenerateRequest {
            prompt: Prompt::Chat(chat),
            sampling: ClientSampling { structured, thinking_budget: budget, ..sampling },
            cache_salt: None,
            priority: 0,
            tools,
            without_reasoning: false,
        };
        Ok((model, generate))
    }
}

/// The value of `thinking`.
#[derive(Default)]
struct Thinking {
    /// `true` if the model must not think.
    is_off: bool,
    budget: Option<ThinkingBudget>,
}

/// Takes `thinking`. The answer always includes the reasoning, as in vLLM.
fn take_thinking(fields: &mut Fields, max_tokens: Option<u32>) -> Result<Thinking, ApiError> {
    let Some(thinking) = fields.take::<Value>("thinking")? else { return Ok(Thinking::default()) };
    let mut tokens = None;
    let mut fields = Fields::new(thinking, "thinking")?;
    let kind: String = fields.take("type")?.ok_or_else(|| ApiError::missing("thinking.type"))?;
    match kind.as_str() {
        "enabled" => {
            const BUDGET: &str = "thinking.budget_tokens";
            let budget: Option<u32> =
                fields.take_in("budget_tokens", MIN_THINKING_TOKENS.., "at least 1024")?;
            let budget = budget.ok_or_else(|| ApiError::missing(BUDGET))?;
            if max_tokens.is_some_and(|max| budget >= max) {
                return Err(ApiError::invalid(
                    BUDGET,
                    format!("'{BUDGET}' must be less than 'max_tokens'"),
                ));
            }
            // Coding agents send a budget to every model.
            tokens = Some(ThinkingBudget { tokens: budget, field: BUDGET, only_if_thinking: true });
        }
        "adaptive" | "disabled" => {}
        other => {
            let other = excerpt(other);
            let message =
                format!("'thinking.type' must be enabled, disabled or adaptive, got '{other}'");
            return Err(ApiError::invalid("thinking.type", message));
        }
    }
    fields.ignore(&["display"]);
    fields.finish()?;
    Ok(Thinking { is_off: kind == "disabled", budget: tokens })
}

/// Takes `output_config`: the reasoning effort, and the constraint on the answer.
fn take_output_config(
    fields: &mut Fields,
) -> Result<(Option<String>, Option<Structured>), ApiError> {
    const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];
    const FORMAT: &str = "output_config.format";
    const SCHEMA: &str = "output_config.format.schema";
    let Some(config) = fields.take::<Value>("output_config")? else { return Ok((None, None)) };
    let mut fields = Fields::new(config, "output_config")?;
    let effort: Option<String> = fields.take("effort")?;
    if let Some(effort) = effort.as_deref().filter(|effort| !EFFORTS.contains(effort)) {
        let effort = excerpt(effort);
        let message =
            format!("'output_config.effort' must be one of {}, got '{effort}'", EFFORTS.join(", "));
        return Err(ApiError::invalid("output_config.effort", message));
    }
    let format = fields.take::<Value>("format")?;
    fields.finish()?;
    let Some(format) = format else { return Ok((effort, None)) };
    let mut fields = Fields::new(format, FORMAT)?;
    let kind: String =
        fields.take("type")?.ok_or_else(|| ApiError::missing(&fields.name("type")))?;
    if kind != "json_schema" {
        let name = fields.name("type");
        let message = format!("'{name}' must be json_schema, got '{kind}'");
        return Err(ApiError::invalid(name, message));
    }
    let schema = fields.take("schema")?.ok_or_else(|| ApiError::missing(SCHEMA))?;
    fields.finish()?;
    let constraint = structured::json_schema(schema, SCHEMA)?;
    Ok((effort, Some(Structured { constraint, field: SCHEMA })))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(extra: Value) -> Result<MessagesRequest, ApiError> {
        let messages = json!([{"role": "user", "content": "hi"}]);
        let mut body = json!({"model": "m", "max_tokens": 2000, "messages": messages});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        MessagesRequest::parse(Intake::from_json(&body)).map(|(request, _)| request)
    }

    fn chat(request: &GenerateRequest) -> &Chat {
        let Prompt::Chat(chat) = &request.prompt else { panic!("a conversation") };
        chat
    }

    #[test]
    fn fields_map_to_request() {
        let request = parse(json!({
            "system": "s",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "stop_sequences": ["x"],
            "stream": true,
            "metadata": {"user_id": "u"},
            "user_profile_id": "u",
            "workspace_id": "w",
            "service_tier": "auto",
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {
                "effort": "low",
                "format": {"type": "json_schema", "schema": {"type": "object"}},
            },
        }));
        let MessagesRequest { model, is_streamed, generate } = request.unwrap();
        assert_eq!((model.as_deref(), is_streamed), (Some("m"), true));
        let sampling = &generate.sampling;
        assert_eq!(
            (sampling.max_tokens, sampling.temperature, sampling.top_p),
            (Some(2000), Some(0.5), Some(0.9))
        );
        assert_eq!((sampling.top_k, &sampling.stop[..]), (Some(5), &["x".to_owned()][..]));
        assert!(sampling.structured.is_some());
        let budget = ThinkingBudget {
            tokens: 1024,
            field: "thinking.budget_tokens",
            only_if_thinking: true,
        };
        assert_eq!(sampling.thinking_budget, Some(budget));
        let chat = chat(&generate);
        assert_eq!(
            (chat.reasoning_effort.as_deref(), chat.add_generation_prompt),
            (Some("low"), true)
        );
        let roles: Vec<_> = chat.messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user"]);
    }

    #[test]
    fn disabled_thinking_overrides_effort() {
        let effort = |extra: Value| chat(&parse(extra).unwrap().generate).reasoning_effort.clone();
        let config = json!({"effort": "max"});
        assert_eq!(
            effort(json!({"thinking": {"type": "disabled"}, "output_config": config})).unwrap(),
            "none"
        );
        assert_eq!(
            effort(json!({"thinking": {"type": "adaptive"}, "output_config": config})).unwrap(),
            "max"
        );
        assert_eq!(effort(json!({"thinking": {"type": "enabled", "budget_tokens": 1500}})), None);
    }

    #[test]
    fn invalid_field_is_named() {
        for (extra, field) in [
            (json!({"max_tokens": null}), "max_tokens"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"messages": null}), "messages"),
            (json!({"temperature": 3}), "temperature"),
            (json!({"stop_sequences": ["a", ""]}), "stop_sequences[1]"),
            (json!({"stop_sequences": 3}), "stop_sequences"),
            (json!({"system": [{"type": "text"}]}), "system[0].text"),
            (
                json!({"system": [{"type": "image", "source": {"type": "url", "url": "x"}}]}),
                "system[0].type",
            ),
            (json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens"),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 1023}}),
                "thinking.budget_tokens",
            ),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 2000}}),
                "thinking.budget_tokens",
            ),
            (json!({"thinking": {"type": "on"}}), "thinking.type"),
            (json!({"output_config": {"effort": "none"}}), "output_config.effort"),
            (json!({"output_config": {"format": {"type": "text"}}}), "output_config.format.type"),
            (
                json!({"output_config": {"format": {"type": "json_schema", "schema": 1}}}),
                "output_config.format.schema",
            ),
            (json!({"container": "c"}), "container"),
            (json!({"diagnostics": {"previous_message_id": "msg_1"}}), "diagnostics"),
            (json!({"n": 2}), "n"),
        ] {
            assert_eq!(parse(extra).err().unwrap().param.as_deref(), Some(field));
        }
    }

    #[test]
    fn count_request_has_no_max_tokens() {
        let parse = |extra: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            CountRequest::parse(Intake::from_json(&body))
                .map(drop)
                .map_err(|error| error.param.unwrap())
        };
        assert_eq!(
            parse(json!({"thinking": {"type": "enabled", "budget_tokens": 9999}, "system": "s"})),
            Ok(())
        );
        assert_eq!(parse(json!({"max_tokens": 3})), Err("max_tokens".to_owned()));
    }
}
