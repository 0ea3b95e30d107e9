use std::collections::HashSet;

use chiasm_backend::{Content, Output};
use chiasm_prompt::{StopStrings, Tokenizer};
use chiasm_request::ChatDefaults;
use chiasm_request::ClientSampling;
use serde_json::json;

use super::*;
use crate::answers::ParserChoice;
use crate::choice::Choice;
pub(super) use crate::test_support::model;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");

fn named(name: &str) -> ParserChoice {
    name.parse().unwrap()
}

/// Loads the model with additional special tokens.
pub(super) fn with_special(tokens: &[&str], tools: &str, reasoning: &str) -> Arc<ServedModel> {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(MODEL).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = dir.path().join("tokenizer_config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    settings["extra_special_tokens"] = json!(tokens);
    std::fs::write(config, settings.to_string()).unwrap();
    let model = ServedModel::load(dir.path(), "m", None).unwrap();
    Arc::new(model.with_parsers(&named(tools), &named(reasoning)).unwrap())
}

pub(super) fn function(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

pub(super) fn tools(choice: ToolChoice) -> ToolUse {
    let parameters =
        json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let tools = json!([function("weather", parameters), function("now", Value::Null)]);
    ToolUse {
        tools: Arc::new(tools),
        choice,
        allowed: None,
        enforced: HashSet::new(),
        in_parallel: true,
    }
}

fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    tokenizer.encode(text, false).unwrap()
}

/// Returns the deltas of an answer that arrives token by token.
fn deltas(
    model: &Arc<ServedModel>,
    tools: Option<&ToolUse>,
    prompt: &str,
    answer: &str,
) -> Vec<ChoiceDelta> {
    let (parsing, _) = OutputParsing::plan(model, &Chat::default(), tools, false).unwrap();
    let prompt = tokens(&model.tokenizer, prompt);
    let stops = StopStrings::new(Vec::new(), false);
    let mut choice =
        Choice::new(0, model, &prompt, &ClientSampling::default(), stops, parsing.as_ref());
    let outputs = tokens(&model.tokenizer, answer).into_iter().map(|token| (vec![token], None));
    let end = (vec![model.tokenizer.eos_token().unwrap()], Some(Finish::Eos));
    let output = |(tokens, finish)| Output {
        choice: 0,
        content: Content::Tokens { tokens, logprobs: None },
        finish,
        prefill: None,
        prompt_logprobs: None,
    };
    outputs.chain([end]).map(|step| choice.push(output(step))).collect()
}

fn whole(deltas: Vec<ChoiceDelta>) -> ChoiceDelta {
    deltas.into_iter().fold(ChoiceDelta::default(), |mut whole, delta| {
        whole.append(delta);
        whole
    })
}

/// Returns the reasoning and the text of deltas.
fn reasoning_with_text(deltas: Vec<ChoiceDelta>) -> (String, String) {
    let ChoiceDelta { events, .. } = whole(deltas);
    (events.reasoning().into_owned(), events.text().into_owned())
}

/// Returns the names and arguments of a delta's calls.
fn calls(delta: &ChoiceDelta) -> Vec<(&str, &str)> {
    let calls = delta.events.calls().into_iter();
    calls
        .map(|whole| (whole.call.name.as_deref().unwrap(), whole.call.arguments.as_str()))
        .collect()
}

fn ids(delta: &ChoiceDelta) -> Vec<&str> {
    delta.events.calls().into_iter().map(|whole| whole.call.id.as_deref().unwrap()).collect()
}

const ANSWER: &str = "hm, the fox.</think>\n\nI look.\n\
                      <tool_call>\n\
                      {\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}\n\
                      </tool_call>\n\
                      <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";

#[test]
fn answer_is_parsed_while_it_arrives() {
    let model = model("hermes", "qwen3");
    let deltas = deltas(&model, Some(&tools(ToolChoice::Auto)), "a <think>", ANSWER);
    let argument_deltas: Vec<_> = deltas
        .iter()
        .flat_map(|delta| delta.events.iter())
        .filter_map(|event| match event {
            AnswerEvent::Call(piece) => Some(piece),
            _ => None,
        })
        .filter(|piece| piece.index == 0 && !piece.arguments.is_empty())
        .collect();
    assert!(argument_deltas.len() > 5, "arguments come in pieces: {argument_deltas:?}");
    assert!(
        argument_deltas[1..].iter().all(|piece| piece.id.is_none() && piece.name.is_none()),
        "{argument_deltas:?}"
    );
    let whole = whole(deltas);
    let ChoiceDelta { events, reasoning_tokens, finish, .. } = &whole;
    assert_eq!(
        (events.reasoning().as_ref(), events.text().as_ref()),
        ("hm, the fox.", "\n\nI look.")
    );
    let expected = tokens(&model.tokenizer, "hm, the fox.").len();
    assert!(
        (expected..expected + 10).contains(reasoning_tokens),
        "{reasoning_tokens} of about {expected}"
    );
    assert_eq!(calls(&whole), [("weather", r#"{"city": "Köln"}"#), ("now", "{}")]);
    let ids = ids(&whole);
    assert!(ids[0].starts_with("chatcmpl-tool-") && ids[0] != ids[1], "{ids:?}");
    assert_eq!(*finish, Some(Finish::ToolCalls));
}

#[test]
fn calls_are_text_without_functions_or_format() {
    let prompt = "a <think>";
    for tools in [None, Some(tools(ToolChoice::None))] {
        let ChoiceDelta { events, finish, .. } =
            whole(deltas(&model("hermes", "qwen3"), tools.as_ref(), prompt, ANSWER));
        assert_eq!(events.reasoning(), "hm, the fox.");
        assert!(events.text().ends_with("</tool_call>") && events.calls().is_empty(), "{events:?}");
        assert_eq!(finish, Some(Finish::Eos));
    }
    assert_eq!(
        reasoning_with_text(deltas(&model("none", "none"), None, prompt, ANSWER)),
        (String::new(), ANSWER.to_owned())
    );
    let hermes = model("hermes", "none");
    let (parsing, _) = OutputParsing::plan(&hermes, &Chat::default(), None, false).unwrap();
    assert!(parsing.is_none(), "an answer that is text in any case is not parsed");
}

#[test]
fn broken_call_before_closed_one_is_not_run() {
    let model = model("hermes", "none");
    let answer = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1} x</tool_call>\
                  <tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    let whole = whole(deltas(&model, Some(&tools(ToolChoice::Auto)), "", answer));
    let ends: Vec<_> = whole.events.calls().into_iter().map(|call| call.end).collect();
    assert_eq!(ends, [CallEnd::Unfinished, CallEnd::Closed]);
    assert_eq!(whole.finish, Some(Finish::Eos), "clients run all calls of an answer or none");
}

#[test]
fn text_after_closed_reasoning_is_text() {
    let model = model("none", "qwen3");
    let pair = |reasoning: &str, text: &str| (reasoning.to_owned(), text.to_owned());
    // The model has no single tokens for the markers, so the prompt can't open reasoning.
    assert_eq!(reasoning_with_text(deltas(&model, None, "a", "the fox")), pair("the fox", ""));
    let special = with_special(&["<think>", "</think>"], "none", "qwen3");
    let parse =
        |prompt: &str, answer: &str| reasoning_with_text(deltas(&special, None, prompt, answer));
    assert_eq!(parse("<|im_start|>a\n<think>\n", "x</think>y"), pair("x", "y"));
    assert_eq!(parse("<|im_start|>a\n<think>\n\n</think>\n\n", "the fox"), pair("", "the fox"));
    // The reasoning belongs to an earlier answer.
    assert_eq!(parse("<think>x</think>y<|im_end|>\n<|im_start|>a\n", "x</think>y"), pair("x", "y"));
}

#[test]
fn detected_reasoning_needs_its_open_marker() {
    let format = chiasm_parse::Format::new(None, Some("qwen3")).unwrap();
    let format = format.with_required_open_marker();
    let parse = |text: &str| {
        let mut answer = chiasm_parse::Collected::default();
        let mut parser = Parser::new(&format, Arc::default(), format.start(None));
        parser.push(text, &mut answer);
        parser.finish(&mut answer);
        (answer.reasoning, answer.text)
    };
    assert_eq!(parse("the fox"), (String::new(), "the fox".to_owned()));
    assert_eq!(parse("<think>hm</think>the fox"), ("hm".to_owned(), "the fox".to_owned()));
    assert_eq!(parse("Write <think> first."), (String::new(), "Write <think> first.".to_owned()));
}

#[test]
fn only_marker_tokens_are_kept_in_text() {
    let markers = ["[TOOL_CALLS]", "[ARGS]", "[OTHER]"];
    let model = with_special(&markers, "mistral", "none");
    let answer = "so[OTHER] it is[TOOL_CALLS]now[ARGS]{\"a\": 1}";
    let whole = whole(deltas(&model, Some(&tools(ToolChoice::Auto)), "a", answer));
    assert_eq!(whole.events.text(), "so it is");
    assert_eq!(calls(&whole), [("now", "{\"a\": 1}")]);
    let id = ids(&whole)[0];
    assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
}

#[test]
fn calls_are_constrained_by_tag_or_schema() {
    let forced = |model: &Arc<ServedModel>, tools: &ToolUse| {
        OutputParsing::plan(model, &Chat::default(), Some(tools), false)
            .map(|(_, constraint)| constraint)
    };
    let hermes = model("hermes", "none");
    let Some(Constraint::StructuralTag(tag)) =
        forced(&hermes, &tools(ToolChoice::Required)).unwrap()
    else {
        panic!("a tag")
    };
    assert!(tag.contains("<tool_call>") && tag.contains("weather") && tag.contains("now"), "{tag}");
    let Some(Constraint::StructuralTag(tag)) =
        forced(&hermes, &tools(ToolChoice::Named("now".to_owned()))).unwrap()
    else {
        panic!("a tag")
    };
    assert!(!tag.contains("weather") && tag.contains("\"stop_after_first\":true"), "{tag}");
    assert_eq!(forced(&hermes, &tools(ToolChoice::Auto)).unwrap(), None);
    let single = ToolUse { in_parallel: false, ..tools(ToolChoice::Auto) };
    assert!(matches!(forced(&hermes, &single).unwrap(), Some(Constraint::StructuralTag(_))));

    let now = Some(HashSet::from(["now".to_owned()]));
    let some = |choice| ToolUse { allowed: now.clone(), ..tools(choice) };
    for (choice, must_call) in [(ToolChoice::Auto, false), (ToolChoice::Required, true)] {
        let Some(Constraint::StructuralTag(tag)) = forced(&hermes, &some(choice)).unwrap() else {
            panic!("a tag")
        };
        assert!(tag.contains("now") && !tag.contains("weather"), "{tag}");
        assert_eq!(tag.contains("triggered_tags"), !must_call, "{tag}");
    }
    assert_eq!(forced(&hermes, &some(ToolChoice::None)).unwrap(), None);

    let held = HashSet::from(["weather".to_owned()]);
    for (enforced, has_schema) in [(HashSet::new(), false), (held, true)] {
        let tools = ToolUse { enforced, ..tools(ToolChoice::Required) };
        let Some(Constraint::StructuralTag(tag)) = forced(&hermes, &tools).unwrap() else {
            panic!("a tag")
        };
        assert_eq!(tag.contains("city"), has_schema, "{tag}");
    }
    let held =
        ToolUse { enforced: HashSet::from(["weather".to_owned()]), ..tools(ToolChoice::Auto) };
    assert_eq!(
        forced(&hermes, &held).unwrap(),
        None,
        "a model that need not call is not constrained"
    );

    let unforced = model("mistral", "none");
    assert_eq!(
        forced(&unforced, &some(ToolChoice::Auto)).unwrap_err().field.as_deref(),
        Some("tool_choice")
    );
    let Some(Constraint::JsonSchema(schema)) =
        forced(&unforced, &some(ToolChoice::Required)).unwrap()
    else {
        panic!("a schema")
    };
    assert!(schema.contains("now") && !schema.contains("weather"), "{schema}");

    let unknown = model("none", "none");
    let error = forced(&unknown, &tools(ToolChoice::Auto)).unwrap_err();
    assert_eq!(error.field.as_deref(), Some("tools"));
    let Some(Constraint::JsonSchema(schema)) =
        forced(&unknown, &tools(ToolChoice::Required)).unwrap()
    else {
        panic!("a schema")
    };
    assert!(schema.contains("\"minItems\":1") && schema.contains("weather"), "{schema}");
    let answer = r#"[{"name": "weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}]"#;
    let listed = whole(deltas(&unknown, Some(&tools(ToolChoice::Required)), "a", answer));
    assert_eq!((listed.events.text().as_ref(), calls(&listed).len()), ("", 2));
    assert_eq!(listed.finish, Some(Finish::ToolCalls));
    let named = tools(ToolChoice::Named("weather".to_owned()));
    let answer = r#"[{"name": "weather", "parameters": {"city": "Paris"}}]"#;
    let single = whole(deltas(&unknown, Some(&named), "a", answer));
    assert_eq!(calls(&single), [("weather", r#"{"city": "Paris"}"#)]);
    assert_eq!(single.finish, Some(Finish::Eos));
}

#[test]
fn schema_definitions_move_to_root() {
    let parameters = json!({
        "type": "object",
        "$defs": {"d": {"type": "string"}},
        "properties": {"a": {"$ref": "#/$defs/d"}},
    });
    let tools = ToolUse {
        tools: Arc::new(json!([function("f", parameters)])),
        ..tools(ToolChoice::Required)
    };
    let Constraint::JsonSchema(schema) = tool_constraint::json_list(&tools) else {
        panic!("a schema")
    };
    let schema: Value = serde_json::from_str(&schema).unwrap();
    assert_eq!(schema["$defs"]["d"]["type"], "string");
    assert_eq!(schema["items"]["anyOf"][0]["properties"]["parameters"].get("$defs"), None);
}

#[test]
fn unwanted_reasoning_is_left_out() {
    let model = model("none", "qwen3");
    let (parsing, _) = OutputParsing::plan(&model, &Chat::default(), None, true).unwrap();
    let mut parser = parsing.unwrap().parser(&model, &[]);
    let mut delta = ChoiceDelta::default();
    parser.push("hm</think>the fox", &mut delta);
    assert_eq!(delta.events.only_text(), Some("the fox"));
}

#[test]
fn template_variables_enable_reasoning() {
    let has_reasoning = |parser: &str, chat: Value, defaults: Value| {
        let model = model("none", parser);
        let chats = ChatDefaults {
            template_kwargs: defaults.as_object().unwrap().clone(),
            ..ChatDefaults::default()
        };
        let model = ServedModel { chats, ..Arc::into_inner(model).unwrap() };
        let effort = chat["reasoning_effort"].as_str().map(str::to_owned);
        let template_kwargs = chat["kwargs"].as_object().cloned().unwrap_or_default();
        let chat = Chat { template_kwargs, reasoning_effort: effort, ..Chat::default() };
        OutputParsing::plan(&model, &chat, None, false)
            .unwrap()
            .0
            .is_some_and(|parsing| parsing.reads_reasoning())
    };
    for (chat, defaults, v3, holo2) in [
        (json!({}), json!({}), false, true),
        (json!({"kwargs": {"thinking": true}}), json!({}), true, true),
        (json!({"kwargs": {"thinking": false, "enable_thinking": 1}}), json!({}), true, true),
        (json!({"kwargs": {"enable_thinking": false}}), json!({}), false, false),
        (json!({"kwargs": {"enable_thinking": null}}), json!({"thinking": ""}), false, false),
        (
            json!({"kwargs": {"enable_thinking": false}}),
            json!({"enable_thinking": true}),
            false,
            false,
        ),
        (json!({"reasoning_effort": "low"}), json!({}), true, true),
        (json!({"reasoning_effort": "none"}), json!({"enable_thinking": true}), false, false),
    ] {
        assert_eq!(
            has_reasoning("deepseek_v3", chat.clone(), defaults.clone()),
            v3,
            "{chat} {defaults}"
        );
        assert_eq!(
            has_reasoning("holo2", chat.clone(), defaults.clone()),
            holo2,
            "{chat} {defaults}"
        );
        assert!(has_reasoning("deepseek_r1", chat, defaults));
    }
}
