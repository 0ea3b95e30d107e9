//! Answers compared with the results of vLLM's own parsers (`python/parse_goldens`), in pieces of
//! any size.
//!
//! `goldens/differences.txt` lists exactly the cases that differ, with the reasons. Answers on
//! which vLLM fails are skipped. So are those whose parsing depends on the request or the prompt in
//! vLLM, because the server handles these here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use chiasm_parse::{Call, CallEnd, Collected, Format, Parser, Tools};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Goldens {
    tools: BTreeMap<String, Vec<Value>>,
    goldens: Vec<Golden>,
}

#[derive(Deserialize)]
struct Golden {
    tool_parser: Option<String>,
    reasoning_parser: Option<String>,
    tokenizer: String,
    case: String,
    tools: Option<String>,
    chat_template_kwargs: Map<String, Value>,
    tokens: Vec<String>,
    /// The text, if it differs from the concatenated tokens.
    text: Option<String>,
    prompt: Option<String>,
    tool_choice: Option<Value>,
    skip_special_tokens: Option<bool>,
    raises: Option<Value>,
    reasoning: Option<String>,
    content: Option<String>,
    tool_calls: Option<Vec<GoldenCall>>,
}

#[derive(Deserialize)]
struct GoldenCall {
    name: String,
    arguments: String,
    id: Option<String>,
}

impl Golden {
    fn format(&self) -> Option<Format> {
        let is_plain = self.raises.is_none()
            && self.prompt.is_none()
            && self.tool_choice.is_none()
            && self.skip_special_tokens.is_none();
        let format =
            Format::new(self.tool_parser.as_deref(), self.reasoning_parser.as_deref()).unwrap();
        let variables = &self.chat_template_kwargs;
        let format = match format.thinks_by_default() {
            Some(by_default)
                if variables
                    .keys()
                    .all(|name| ["thinking", "enable_thinking"].contains(&name.as_str())) =>
            {
                let requested = variables
                    .values()
                    .map(|value| *value == true)
                    .reduce(|one, other| one || other);
                if requested.unwrap_or(by_default) { format } else { format.without_reasoning() }
            }
            _ if !variables.is_empty() => return None,
            _ => format,
        };
        if !is_plain {
            return None;
        }
        Some(if self.tools.is_some() { format } else { format.without_calls() })
    }

    fn name(&self) -> String {
        let or_none = |name: &Option<String>| name.clone().unwrap_or_else(|| "-".to_owned());
        format!(
            "{}/{}/{}",
            or_none(&self.tool_parser),
            or_none(&self.reasoning_parser),
            self.tokenizer
        )
    }

    fn text(&self) -> String {
        self.text.clone().unwrap_or_else(|| self.tokens.concat())
    }

    /// Returns `true` if `answer` equals vLLM's result. Arguments are compared as JSON. If there
    /// are calls, white space around the text is ignored, because it belongs to the template.
    fn matches(&self, answer: &Collected) -> bool {
        let json =
            |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::from(text.trim()));
        let expected_calls = self.tool_calls.as_deref().unwrap_or_default();
        let calls = expected_calls.iter().zip(&answer.calls).all(|(expected, call)| {
            let same_id = expected.id.is_none() || expected.id == call.id;
            expected.name == call.name
                && json(&expected.arguments) == json(&call.arguments)
                && same_id
        });
        let content = self.content.as_deref().unwrap_or_default();
        let text = if expected_calls.is_empty() {
            content == answer.text
        } else {
            content.trim() == answer.text.trim()
        };
        calls
            && expected_calls.len() == answer.calls.len()
            && text
            && self.reasoning.as_deref().unwrap_or_default() == answer.reasoning
    }
}

fn goldens(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name))
        .unwrap()
}

fn functions(list: &[Value]) -> Arc<Tools> {
    let function = |tool: &'_ Value| tool["function"].clone();
    let functions: Vec<Value> = list.iter().map(function).collect();
    Tools::new(
        functions
            .iter()
            .map(|function| (function["name"].as_str().unwrap(), &function["parameters"])),
    )
    .into()
}

fn read<'a>(
    format: &Format,
    tools: &Arc<Tools>,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Collected {
    let mut parser = Parser::new(format, tools.clone(), format.start(None));
    let mut answer = Collected::default();
    pieces.into_iter().for_each(|piece| parser.push(piece, &mut answer));
    parser.finish(&mut answer);
    answer
}

/// Returns the calls that the format closed.
fn closed(answer: &Collected) -> impl Iterator<Item = &Call> {
    answer.calls.iter().filter(|call| call.end == Some(CallEnd::Closed))
}

/// The cases of each format that are known to differ.
fn known_differences() -> BTreeSet<(String, String)> {
    let text = goldens("differences.txt");
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .flat_map(|line| {
            let (format, cases) = line.split_once(": ").unwrap();
            cases.split(' ').map(|case| (format.to_owned(), case.to_owned()))
        })
        .collect()
}

/// A truncated answer only closes calls that the whole answer closes with the same arguments.
#[test]
fn truncated_answer_closes_only_whole_calls() {
    let Goldens { tools, goldens } = serde_json::from_str(&goldens("parse.json")).unwrap();
    let tools: BTreeMap<String, Arc<Tools>> =
        tools.into_iter().map(|(name, list)| (name, functions(&list))).collect();
    let mut unfinished = 0;
    for golden in &goldens {
        let (Some(format), Some(list)) = (golden.format(), &golden.tools) else { continue };
        let text = golden.text();
        let whole = read(&format, &tools[list], [text.as_str()]);
        assert!(
            whole.calls.iter().all(|call| call.end.is_some()),
            "{} {}",
            golden.name(),
            golden.case
        );
        for (at, _) in text.char_indices() {
            let cut = read(&format, &tools[list], [&text[..at]]);
            let has_same = closed(&cut).zip(closed(&whole)).all(|(cut, whole)| cut == whole);
            let is_less = closed(&cut).count() <= closed(&whole).count();
            assert!(
                has_same && is_less,
                "cut at {at}: {} {}: {text:?}: {cut:?}",
                golden.name(),
                golden.case
            );
            unfinished += cut.calls.len() - closed(&cut).count();
        }
    }
    assert!(unfinished > 10_000, "{unfinished}");
}

#[test]
fn answers_match_vllm_except_known_differences() {
    let Goldens { tools, goldens } = serde_json::from_str(&goldens("parse.json")).unwrap();
    let tools: BTreeMap<String, Arc<Tools>> =
        tools.into_iter().map(|(name, list)| (name, functions(&list))).collect();
    let none = Arc::new(Tools::default());
    let mut differences = BTreeSet::new();
    let mut compared = 0;
    for golden in &goldens {
        let Some(format) = golden.format() else { continue };
        let tools = golden.tools.as_ref().map_or(&none, |name| &tools[name]);
        let text = golden.text();
        let whole = read(&format, tools, [text.as_str()]);
        let case = || format!("{} {}: {text:?}", golden.name(), golden.case);
        assert_eq!(
            read(&format, tools, text.split_inclusive(|_| true)),
            whole,
            "by characters: {}",
            case()
        );
        if golden.text.is_none() {
            assert_eq!(
                read(&format, tools, golden.tokens.iter().map(String::as_str)),
                whole,
                "by tokens: {}",
                case()
            );
        }
        for (at, _) in text.char_indices() {
            let (first, second) = text.split_at(at);
            assert_eq!(read(&format, tools, [first, second]), whole, "cut at {at}: {}", case());
        }
        compared += 1;
        if !golden.matches(&whole) {
            differences.insert((golden.name(), golden.case.clone()));
        }
    }
    let known = known_differences();
    let lines = |cases: &BTreeSet<(String, String)>, without: &BTreeSet<(String, String)>| {
        let cases = cases.difference(without);
        cases.map(|(format, case)| format!("{format}: {case}")).collect::<Vec<_>>()
    };
    assert_eq!(lines(&differences, &known), Vec::<String>::new(), "not in differences.txt");
    assert_eq!(
        lines(&known, &differences),
        Vec::<String>::new(),
        "in differences.txt, but no difference"
    );
    assert!(
        compared > 4000 && differences.len() * 4 < compared,
        "{} of {compared}",
        differences.len()
    );
}
