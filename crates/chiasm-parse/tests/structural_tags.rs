//! What an engine is told to hold an answer to, against what vLLM tells it
//! (`python/parse_goldens`).

use std::collections::BTreeSet;

use chiasm_parse::{Collected, Format, Function, Parser, Tools};
use serde_json::{Value, json};

/// All texts of a tag that have to be in an answer as they are, and the styles of arguments.
fn texts(tag: &Value, texts_of: &mut BTreeSet<String>) {
    match tag {
        Value::Object(map) => {
            for (key, value) in map.iter().filter(|(key, _)| *key != "json_schema") {
                match value.as_str().filter(|_| {
                    ["begin", "end", "value", "style", "pattern"].contains(&key.as_str())
                }) {
                    Some(text) => drop(texts_of.insert(text.to_owned())),
                    None => texts(value, texts_of),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| texts(value, texts_of)),
        _ => {}
    }
}

#[test]
fn forced_calls_are_written_as_vllm_has_them_written() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/structural_tags.json");
    let goldens: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let any = json!({"type": "object"});
    let mut compared = BTreeSet::new();
    for row in goldens["constraints"].as_array().unwrap() {
        // What GLM's calls may be without a schema is written out there.
        let is_asked = row["tools"] == "strict"
            && row["parallel_tool_calls"] == true
            && row["tool_choice"] == "required";
        if !is_asked
            || row["held_to"] != "structural_tag"
            || row["tool_parser"] == "glm45"
            || row["tool_parser"] == "ling3"
        {
            continue;
        }
        let parser = row["tool_parser"].as_str().unwrap();
        let format = Format::new(Some(parser), None).unwrap();
        let tools = goldens["tools"]["strict"].as_array().unwrap();
        let functions: Vec<Function<'_>> = tools
            .iter()
            .map(|tool| Function {
                name: tool["function"]["name"].as_str().unwrap(),
                arguments: &any,
            })
            .collect();
        let (mut ours, mut theirs) = (BTreeSet::new(), BTreeSet::new());
        texts(&format.structural_tag(&functions, true, false).unwrap(), &mut ours);
        texts(&row["structural_tag"], &mut theirs);
        assert_eq!(ours, theirs, "{parser}");
        compared.insert(parser.to_owned());
    }
    assert_eq!(compared.len(), 12, "{compared:?}");
}

/// What an answer is that was held to a tag: the first way through it.
fn written(tag: &Value) -> String {
    let text = |key: &str| tag[key].as_str().unwrap_or_default();
    match text("type") {
        "structural_tag" => written(&tag["format"]),
        "sequence" => tag["elements"].as_array().unwrap().iter().map(written).collect(),
        "tags_with_separator" => {
            let tags = tag["tags"].as_array().unwrap();
            // The ways to write one call follow each other.
            let ways = tags.len() / 2;
            tags.iter().step_by(ways).map(written).collect::<Vec<_>>().join(text("separator"))
        }
        "tag" => format!("{}{}{}", text("begin"), written(&tag["content"]), text("end")),
        "const_string" => text("value").to_owned(),
        "regex" => "0".to_owned(),
        "json_schema" => match text("style") {
            "json" => r#"{"city": "Paris"}"#.to_owned(),
            "qwen_xml" => "<parameter=city>\nParis\n</parameter>".to_owned(),
            "glm_xml" => "<arg_key>city</arg_key><arg_value>Paris</arg_value>".to_owned(),
            "minimax_xml" => "<parameter name=\"city\">Paris</parameter>".to_owned(),
            "deepseek_xml" => {
                "<｜DSML｜parameter name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n"
                    .to_owned()
            }
            style => panic!("{style}"),
        },
        kind => panic!("{kind}"),
    }
}

#[test]
fn what_is_forced_is_read() {
    let any = json!({"type": "object"});
    let functions = ["weather", "news"].map(|name| Function { name, arguments: &any });
    let mut forced = 0;
    for parser in chiasm_parse::tool_parsers() {
        let format = Format::new(Some(parser), None).unwrap();
        let Some(tag) = format.structural_tag(&functions, true, false) else { continue };
        let mut answer = Collected::default();
        let mut reader = Parser::new(&format, Tools::default().into(), format.start(None));
        reader.push(&written(&tag), &mut answer);
        reader.finish(&mut answer);
        let calls: Vec<_> =
            answer.calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
        assert_eq!(
            calls,
            [("weather", r#"{"city": "Paris"}"#), ("news", r#"{"city": "Paris"}"#)],
            "{parser}"
        );
        assert_eq!(answer.text, "", "{parser}");
        forced += 1;
    }
    assert!(forced > 10);
}
