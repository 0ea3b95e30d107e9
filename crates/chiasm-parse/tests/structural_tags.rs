//! Structural tags, compared with vLLM's (`python/parse_goldens`).

use std::collections::BTreeSet;

use chiasm_parse::{Collected, Format, Function, Parser, Tools};
use serde_json::{Value, json};

/// Collects the literal texts of a tag and its styles of arguments.
fn collect_texts(tag: &Value, texts: &mut BTreeSet<String>) {
    match tag {
        Value::Object(map) => {
            for (key, value) in map.iter().filter(|(key, _)| *key != "json_schema") {
                match value.as_str().filter(|_| {
                    ["begin", "end", "value", "style", "pattern"].contains(&key.as_str())
                }) {
                    Some(text) => drop(texts.insert(text.to_owned())),
                    None => collect_texts(value, texts),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| collect_texts(value, texts)),
        _ => {}
    }
}

#[test]
fn structural_tags_have_texts_of_vllm() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/structural_tags.json");
    let goldens: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let any = json!({"type": "object"});
    let mut compared = BTreeSet::new();
    for row in goldens["constraints"].as_array().unwrap() {
        // vLLM's tags for GLM also spell out the syntax of calls without a schema.
        let is_compared = row["tools"] == "strict"
            && row["parallel_tool_calls"] == true
            && row["tool_choice"] == "required";
        if !is_compared
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
        let mut texts = BTreeSet::new();
        collect_texts(&format.structural_tag(&functions, true, false).unwrap(), &mut texts);
        let mut expected = BTreeSet::new();
        collect_texts(&row["structural_tag"], &mut expected);
        assert_eq!(texts, expected, "{parser}");
        compared.insert(parser.to_owned());
    }
    assert_eq!(compared.len(), 12, "{compared:?}");
}

/// Writes an answer that matches a tag, by its first alternatives.
fn write_answer(tag: &Value) -> String {
    let text = |key: &str| tag[key].as_str().unwrap_or_default();
    match text("type") {
        "structural_tag" => write_answer(&tag["format"]),
        "sequence" => tag["elements"].as_array().unwrap().iter().map(write_answer).collect(),
        "tags_with_separator" => {
            let tags = tag["tags"].as_array().unwrap();
            // The alternatives of one function are next to each other. There are two functions.
            let alternatives = tags.len() / 2;
            tags.iter()
                .step_by(alternatives)
                .map(write_answer)
                .collect::<Vec<_>>()
                .join(text("separator"))
        }
        "tag" => format!("{}{}{}", text("begin"), write_answer(&tag["content"]), text("end")),
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
fn answer_that_follows_tag_is_parsed() {
    let any = json!({"type": "object"});
    let functions = ["weather", "news"].map(|name| Function { name, arguments: &any });
    let mut formats_with_tag = 0;
    for parser in chiasm_parse::tool_parsers() {
        let format = Format::new(Some(parser), None).unwrap();
        let Some(tag) = format.structural_tag(&functions, true, false) else { continue };
        let mut answer = Collected::default();
        let mut reader = Parser::new(&format, Tools::default().into(), format.start(None));
        reader.push(&write_answer(&tag), &mut answer);
        reader.finish(&mut answer);
        let calls: Vec<_> =
            answer.calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
        assert_eq!(
            calls,
            [("weather", r#"{"city": "Paris"}"#), ("news", r#"{"city": "Paris"}"#)],
            "{parser}"
        );
        assert_eq!(answer.text, "", "{parser}");
        formats_with_tag += 1;
    }
    assert!(formats_with_tag > 10);
}
