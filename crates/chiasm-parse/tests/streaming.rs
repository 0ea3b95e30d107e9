//! Streaming of calls: every format emits names and long texts while the answer grows.

use std::sync::Arc;

use chiasm_parse::{CallEnd, Collected, Format, Parser, Tools, tool_parsers};
use serde_json::{Value, json};

/// The maximum number of bytes of a text that a parser may hold back.
const MAX_LAG: usize = 160;

/// The number of characters of an answer's pieces; about what one step of an engine adds.
const PIECE_CHARS: usize = 12;

/// Returns the parts of a call `f(path="/a", text=…)` before and after its text.
fn call(parser: &str) -> (&'static str, &'static str) {
    match parser {
        "hermes" | "qwen3_json" => (
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"path\": \"/a\", \"text\": \"",
            "\"}}\n</tool_call>",
        ),
        "longcat" => (
            "<longcat_tool_call>{\"name\": \"f\", \"arguments\": {\"path\": \"/a\", \"text\": \"",
            "\"}}</longcat_tool_call>",
        ),
        "llama3_json" | "llama4_json" => {
            ("{\"name\": \"f\", \"parameters\": {\"path\": \"/a\", \"text\": \"", "\"}}")
        }
        "llama4_pythonic" | "pythonic" => ("[f(path='/a', text='", "')]"),
        "mistral" => ("[TOOL_CALLS]f[ARGS]{\"path\": \"/a\", \"text\": \"", "\"}"),
        "deepseek_v3" => (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n\
             {\"path\": \"/a\", \"text\": \"",
            "\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        "deepseek_v31" => (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>\
             {\"path\": \"/a\", \"text\": \"",
            "\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        "deepseek_v32" => (
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
             <｜DSML｜parameter name=\"path\" string=\"true\">/a</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"text\" string=\"true\">",
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        "deepseek_v4" => (
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
             <｜DSML｜parameter name=\"path\" string=\"true\">/a</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"text\" string=\"true\">",
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        ),
        "kimi_k2" => (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0\
             <|tool_call_argument_begin|>{\"path\": \"/a\", \"text\": \"",
            "\"}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        "qwen3_coder" | "qwen3_xml" | "step3p5" | "step5" => (
            "<tool_call>\n<function=f>\n<parameter=path>\n/a\n</parameter>\n<parameter=text>\n",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        "seed_oss" => (
            "<seed:tool_call>\n<function=f>\n<parameter=path>/a</parameter>\n<parameter=text>",
            "</parameter>\n</function>\n</seed:tool_call>",
        ),
        "glm45" | "glm47" | "ling3" => (
            "<tool_call>f\n<arg_key>path</arg_key>\n<arg_value>/a</arg_value>\n\
             <arg_key>text</arg_key>\n<arg_value>",
            "</arg_value>\n</tool_call>",
        ),
        "minimax_m2" => (
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"path\">/a</parameter>\n\
             <parameter name=\"text\">",
            "</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        "gemma4" => ("<|tool_call>call:f{path:<|\"|>/a<|\"|>,text:<|\"|>", "<|\"|>}<tool_call|>"),
        "functiongemma" => (
            "<start_function_call>call:f{path:<escape>/a<escape>,text:<escape>",
            "<escape>}<end_function_call>",
        ),
        other => panic!("add a call in the format '{other}' here"),
    }
}

/// Returns schemas of a text, some of which also allow other values.
fn text_schemas() -> [Value; 7] {
    [
        json!({"type": "string"}),
        json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
        json!({"type": ["null", "string"]}),
        json!({"type": ["string", "integer", "boolean"]}),
        json!({"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "string"}]}),
        json!({"$ref": "#/$defs/Text"}),
        json!({"allOf": [{"$ref": "#/$defs/Text"}], "description": "the text"}),
    ]
}

fn tools(text: &Value) -> Arc<Tools> {
    let parameters = json!({
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": text},
        "$defs": {"Text": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    });
    Tools::new([("f", &parameters)]).into()
}

fn pieces(text: &str) -> impl Iterator<Item = String> {
    let characters: Vec<char> = text.chars().collect();
    let pieces: Vec<String> =
        characters.chunks(PIECE_CHARS).map(|piece| piece.iter().collect()).collect();
    pieces.into_iter()
}

#[test]
fn long_text_is_streamed() {
    let text = "Some words, 12 of them; ".repeat(100);
    for name in tool_parsers() {
        let format = Format::new(Some(name), None).unwrap();
        let (before, after) = call(name);
        for schema in text_schemas() {
            let mut answer = Collected::default();
            let mut parser = Parser::new(&format, tools(&schema), format.start(None));
            pieces(before).for_each(|piece| parser.push(&piece, &mut answer));
            let mut pushed = 0;
            for piece in pieces(&text) {
                parser.push(&piece, &mut answer);
                pushed += piece.len();
                if pushed > MAX_LAG {
                    let call = answer
                        .calls
                        .first()
                        .unwrap_or_else(|| panic!("{name}: no name at byte {pushed}"));
                    let (_, read) = call.arguments.split_once("Some").unwrap_or_default();
                    let lag = pushed - read.len();
                    assert!(
                        lag < MAX_LAG,
                        "{name}, {schema}: {lag} bytes are held back at {pushed}"
                    );
                }
            }
            pieces(after).for_each(|piece| parser.push(&piece, &mut answer));
            parser.finish(&mut answer);
            let call = &answer.calls[0];
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            assert_eq!(arguments, json!({"path": "/a", "text": text}), "{name}");
            assert_eq!((call.name.as_str(), call.end), ("f", Some(CallEnd::Closed)), "{name}");
        }
    }
}

/// Formats with their own syntax of lists and objects also stream the texts in them.
#[test]
fn nested_text_is_streamed() {
    let text = "Some words, 12 of them; ".repeat(40);
    for (name, before, after) in [
        ("gemma4", "<|tool_call>call:f{rows:[{text:<|\"|>", "<|\"|>}]}<tool_call|>"),
        ("pythonic", "[f(rows=[{'text': '", "'}])]"),
    ] {
        let format = Format::new(Some(name), None).unwrap();
        let mut answer = Collected::default();
        let mut parser = Parser::new(&format, Tools::default().into(), format.start(None));
        parser.push(before, &mut answer);
        pieces(&text).for_each(|piece| parser.push(&piece, &mut answer));
        let held = text.len().saturating_sub(answer.calls[0].arguments.len());
        assert!(held < MAX_LAG, "{name}: {held} bytes are held back");
        parser.push(after, &mut answer);
        parser.finish(&mut answer);
        let arguments: Value = serde_json::from_str(&answer.calls[0].arguments).unwrap();
        assert_eq!(arguments, json!({"rows": [{"text": text}]}), "{name}");
    }
}

/// An answer that ends within a call leaves arguments that are not valid JSON.
#[test]
fn answer_that_ends_in_arguments_leaves_call_unfinished() {
    for name in tool_parsers() {
        let format = Format::new(Some(name), None).unwrap();
        let (before, _) = call(name);
        let text = format!("{before}{}", "words ".repeat(40));
        let mut answer = Collected::default();
        let mut parser = Parser::new(&format, tools(&text_schemas()[0]), format.start(None));
        pieces(&text).for_each(|piece| parser.push(&piece, &mut answer));
        parser.finish(&mut answer);
        let call = &answer.calls[0];
        assert_eq!((answer.calls.len(), call.end), (1, Some(CallEnd::Unfinished)), "{name}");
        assert!(
            serde_json::from_str::<Value>(&call.arguments).is_err(),
            "{name}: {}",
            call.arguments
        );
        assert_eq!(answer.text, "", "{name}");
    }
}

/// Text that only begins like `null` is text, wherever the answer is cut.
#[test]
fn nullable_text_is_null_only_if_all_of_it_is() {
    let format = Format::new(Some("qwen3_coder"), None).unwrap();
    let (before, after) = call("qwen3_coder");
    for (text, value) in [
        ("null", Value::Null),
        ("NULL", Value::Null),
        ("nul", json!("nul")),
        ("null!", json!("null!")),
        ("null\nnull", json!("null\nnull")),
        ("", json!("")),
        ("\n", json!("\n")),
    ] {
        let answer = format!("{before}{text}{after}");
        for at in (0..answer.len()).filter(|&at| answer.is_char_boundary(at)) {
            let mut read = Collected::default();
            let mut parser = Parser::new(&format, tools(&text_schemas()[1]), format.start(None));
            parser.push(&answer[..at], &mut read);
            parser.push(&answer[at..], &mut read);
            parser.finish(&mut read);
            let arguments: Value = serde_json::from_str(&read.calls[0].arguments).unwrap();
            assert_eq!(arguments["text"], value, "{text:?} cut at {at}");
        }
    }
}

#[test]
fn referenced_objects_arrive_as_objects() {
    let parameters = json!({
        "type": "object",
        "$defs": {
            "Item": {"type": "object", "properties": {"id": {"type": "integer"}}},
            "Untyped": {"properties": {"id": {"type": "integer"}}},
            "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Item"}]},
        },
        "properties": {
            "item": {"$ref": "#/$defs/Item"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]},
            "all": {"allOf": [{"$ref": "#/$defs/Item"}], "description": "x"},
            "untyped": {"$ref": "#/$defs/Untyped"},
            "either": {"type": ["object", "null"]},
            "tree": {"$ref": "#/$defs/Tree"},
            "elsewhere": {"$ref": "https://example.com/item.json"},
            "missing": {"$ref": "#/$defs/Missing"},
        },
    });
    let referred = json!({
        "$ref": "#/definitions/Arguments",
        "definitions": {"Arguments": parameters.clone()},
    });
    let moved = json!({"allOf": [parameters.clone()], "$defs": parameters["$defs"]});
    let item = json!({"id": 1});
    for name in ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "seed_oss"] {
        for (parameters, keys) in [
            (&parameters, &["item", "maybe", "all", "untyped", "either", "tree"][..]),
            (&referred, &["either"][..]),
            (&moved, &["item", "tree"][..]),
        ] {
            let (before, after) = call(name);
            for (key, is_object) in keys
                .iter()
                .map(|key| (*key, true))
                .chain([("elsewhere", false), ("missing", false)])
            {
                let before = before.replace("text", key).replace("\"true\"", "\"false\"");
                let format = Format::new(Some(name), None).unwrap();
                let tools = Tools::new([("f", parameters)]);
                let mut read = Collected::default();
                let mut parser = Parser::new(&format, tools.into(), format.start(None));
                parser.push(&format!("{before}{item}{after}"), &mut read);
                parser.finish(&mut read);
                let arguments: Value = serde_json::from_str(&read.calls[0].arguments).unwrap();
                // This format declares that a value is JSON.
                let is_object = is_object || name == "deepseek_v32";
                let expected = if is_object { item.clone() } else { Value::from(item.to_string()) };
                assert_eq!(arguments[key], expected, "{name}: {key}");
            }
        }
    }
}

/// Schemas that refer to each other many times are visited a bounded number of times.
#[test]
fn schema_visits_are_bounded() {
    let mut definitions = serde_json::Map::new();
    for i in 0..2000 {
        let next: Vec<Value> =
            (1..=20).map(|step| json!({"$ref": format!("#/$defs/D{}", i + step)})).collect();
        definitions
            .insert(format!("D{i}"), json!({"anyOf": next, "allOf": [{"$ref": "#/$defs/D0"}]}));
    }
    let properties: serde_json::Map<String, Value> =
        (0..2000).map(|i| (format!("p{i}"), json!({"$ref": format!("#/$defs/D{i}")}))).collect();
    let parameters = json!({"type": "object", "properties": properties, "$defs": definitions});
    let format = Format::new(Some("qwen3_coder"), None).unwrap();
    let mut read = Collected::default();
    let mut parser =
        Parser::new(&format, Tools::new([("f", &parameters)]).into(), format.start(None));
    parser.push(
        "<tool_call>\n<function=f>\n<parameter=p1999>\n1\n</parameter>\n</function>\n</tool_call>",
        &mut read,
    );
    parser.finish(&mut read);
    assert_eq!(read.calls[0].arguments, "{\"p1999\": \"1\"}");
}

/// Each visit of a schema reads a bounded part of it.
#[test]
fn long_parts_of_schemas_are_not_read() {
    let mut values: Vec<Value> = (0..300).map(|i| json!(format!("v{i}"))).collect();
    values.push(json!(1));
    let definition = "n".repeat(300);
    let reference = format!("#/$defs/{definition}");
    let parameters = json!({
        "properties": {
            "long": {"enum": values},
            "short": {"enum": ["v", 1]},
            "far": {"$ref": reference},
        },
        "$defs": {definition: {"type": "integer"}},
    });
    let format = Format::new(Some("qwen3_coder"), None).unwrap();
    for (key, value) in [("long", json!("1")), ("short", json!(1)), ("far", json!("1"))] {
        let mut read = Collected::default();
        let mut parser =
            Parser::new(&format, Tools::new([("f", &parameters)]).into(), format.start(None));
        let call = format!(
            "<tool_call>\n<function=f>\n<parameter={key}>\n1\n</parameter>\n</function>\n\
             </tool_call>"
        );
        parser.push(&call, &mut read);
        parser.finish(&mut read);
        let arguments: Value = serde_json::from_str(&read.calls[0].arguments).unwrap();
        assert_eq!(arguments[key], value, "{key}");
    }
}

/// Only the first of two calls is parsed if one is allowed, in pieces of any size.
#[test]
fn single_call_drops_later_calls() {
    for name in tool_parsers() {
        let format = Format::new(Some(name), None).unwrap();
        let (before, after) = call(name);
        let first = format!("{before}x{after}");
        let text = if name.ends_with("pythonic") {
            "[f(path='/a', text='x'), f(path='/b')]".to_owned()
        } else if name.starts_with("llama") {
            format!("{first}; {first}")
        } else {
            format!("{first}\n{first}")
        };
        let read = |is_single: bool, piece_chars: usize| {
            let mut answer = Collected::default();
            let mut parser = Parser::new(&format, tools(&text_schemas()[0]), format.start(None));
            if is_single {
                parser = parser.with_single_call();
            }
            let characters: Vec<char> = text.chars().collect();
            characters
                .chunks(piece_chars)
                .for_each(|piece| parser.push(&String::from_iter(piece), &mut answer));
            parser.finish(&mut answer);
            answer
        };
        assert_eq!(read(false, 1).calls.len(), 2, "{name}");
        for piece_chars in [1, 7, text.len()] {
            let calls = read(true, piece_chars).calls;
            assert_eq!((calls.len(), calls[0].end), (1, Some(CallEnd::Closed)), "{name}");
            let arguments: Value = serde_json::from_str(&calls[0].arguments).unwrap();
            assert_eq!(arguments, json!({"path": "/a", "text": "x"}), "{name}");
        }
    }
}
