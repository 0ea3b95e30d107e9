use std::sync::Arc;

use chiasm_request::Chat;

use super::super::tests::{function, model, tools, with_special};
use super::super::{OutputParsing, combine_with_calls};
use super::*;

fn strict_tools(choice: ToolChoice) -> ToolUse {
    let parameters =
        json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let mut weather = function("weather", parameters);
    weather["function"]["strict"] = json!(true);
    ToolUse { tools: Arc::new(json!([weather, function("now", Value::Null)])), ..tools(choice) }
}

fn constraint(model: &ServedModel, tools: &ToolUse) -> Option<Constraint> {
    OutputParsing::plan(model, &Chat::default(), Some(tools), false).unwrap().1
}

fn tag_of(constraint: Option<Constraint>) -> Value {
    let Some(Constraint::StructuralTag(tag)) = constraint else { panic!("no tag: {constraint:?}") };
    serde_json::from_str(&tag).unwrap()
}

/// A strict function is constrained if a grammar has the format, and served without one otherwise.
#[test]
fn strict_functions_are_constrained_by_grammar_formats() {
    let strict = strict_tools(ToolChoice::Auto);
    for parser in [
        "hermes",
        "llama3_json",
        "qwen3_coder",
        "seed_oss",
        "glm45",
        "minimax_m2",
        "deepseek_v31",
        "kimi_k2",
    ] {
        let tag = tag_of(constraint(&model(parser, "none"), &strict)).to_string();
        assert!(tag.contains("triggered_tags") && tag.contains("city"), "{parser}: {tag}");
    }
    for parser in ["gemma4", "functiongemma", "pythonic", "llama4_pythonic"] {
        assert_eq!(constraint(&model(parser, "none"), &strict), None, "{parser}");
    }
}

/// Mistral's models with older tokenizers write calls as a list, which no tag supports.
#[test]
fn mistral_is_constrained_with_arguments_token() {
    let strict = strict_tools(ToolChoice::Auto);
    assert_eq!(constraint(&model("mistral", "none"), &strict), None);
    let newer = with_special(&["[TOOL_CALLS]", "[ARGS]"], "mistral", "none");
    let tag = tag_of(constraint(&newer, &strict));
    assert_eq!(tag["format"]["tags"][0]["begin"], "[TOOL_CALLS]weather[ARGS]");
    let required = constraint(&model("mistral", "none"), &strict_tools(ToolChoice::Required));
    assert!(matches!(required, Some(Constraint::JsonSchema(_))), "{required:?}");
}

#[test]
fn calls_alternate_with_own_constraint() {
    let hermes = model("hermes", "none");
    let own = Constraint::JsonSchema(r#"{"type": "array"}"#.into());
    let either = tag_of(combine_with_calls(&hermes, &strict_tools(ToolChoice::Auto), &own));
    let [calls, answer] = either["format"]["elements"].as_array().unwrap().as_slice() else {
        panic!("{either}")
    };
    assert_eq!(
        (calls["type"].as_str(), calls["at_least_one"].as_bool()),
        (Some("tags_with_separator"), Some(true))
    );
    assert_eq!(*answer, json!({"type": "json_schema", "json_schema": {"type": "array"}}));
    let tag = Constraint::StructuralTag(
        json!({"type": "structural_tag", "format": {"type": "any_text"}}).to_string().into(),
    );
    for (own, kind) in [
        (Constraint::JsonObject, "json_schema"),
        (Constraint::Regex("a+".into()), "regex"),
        (Constraint::Grammar("root ::= \"a\"".into()), "grammar"),
        (tag, "any_text"),
    ] {
        let either = tag_of(combine_with_calls(&hermes, &strict_tools(ToolChoice::Auto), &own));
        assert_eq!(either["format"]["elements"][1]["type"], kind);
    }
}

/// The request's own constraint applies alone if calls are not constrained, or can't be.
#[test]
fn own_constraint_applies_alone_without_tag() {
    let own = Constraint::JsonObject;
    let single = ToolUse { in_parallel: false, ..tools(ToolChoice::Auto) };
    assert_eq!(combine_with_calls(&model("hermes", "none"), &single, &own), None);
    assert_eq!(
        combine_with_calls(&model("gemma4", "none"), &strict_tools(ToolChoice::Auto), &own),
        None
    );
}
