//! Compares chats, completions and answers of whole model directories with the results of vLLM 0.33
//! and transformers 5.20 (`python/prompt_goldens`).

#![allow(clippy::unwrap_used, reason = "test support")]

use std::path::PathBuf;
use std::sync::Arc;

use chiasm_prompt::{
    ChatContent, ChatMessage, ChatPart, ChatTemplate, ContentFormat, Detokenizer, ExtendedPart,
    Item, Marker, MarkerText, Markers, RenderOptions, StopStrings, Tokenizer, expand,
};
use chiasm_types::{Modality, Placeholder, TokenId, TokenRun};
use serde_json::{Map, Value};

const MODELS: [&str; 10] = [
    "developer",
    "llama2",
    "llama3",
    "llava",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_vl",
    "translator",
    "vicuna",
];

struct Golden {
    dir: PathBuf,
    json: Value,
}

fn goldens() -> Vec<Golden> {
    MODELS.iter().map(|name| golden(name)).collect()
}

fn golden(name: &str) -> Golden {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(name);
    Golden { dir, json: read(name) }
}

fn read(name: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/goldens/{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn tokens(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect()
}

/// Parses a message of a request body, as the server does.
fn message(body: &Value) -> ChatMessage {
    let text = |key: &str| body[key].as_str().map(str::to_owned);
    let part = |value: &Value| {
        let part = match value["type"].as_str().unwrap() {
            "text" => ChatPart::Text(value["text"].as_str().unwrap().to_owned()),
            "image_url" => ChatPart::Media(Modality::Image),
            other => panic!("part of type {other}"),
        };
        let mut fields = value.as_object().unwrap().clone();
        ["type", "text", "image_url"].iter().for_each(|field| drop(fields.shift_remove(*field)));
        if fields.is_empty() {
            part
        } else {
            ChatPart::Extended(Box::new(ExtendedPart { part, fields }))
        }
    };
    ChatMessage {
        role: text("role").unwrap(),
        content: match &body["content"] {
            Value::Null => None,
            Value::String(text) => Some(ChatContent::Text(text.clone())),
            Value::Array(parts) => Some(ChatContent::Parts(parts.iter().map(part).collect())),
            other => panic!("content {other}"),
        },
        name: text("name"),
        tool_call_id: text("tool_call_id"),
        tool_calls: body.get("tool_calls").cloned(),
        reasoning: text("reasoning"),
    }
}

fn options(body: &Value) -> RenderOptions {
    RenderOptions {
        add_generation_prompt: body["add_generation_prompt"].as_bool().unwrap_or(true),
        continue_final_message: body["continue_final_message"].as_bool().unwrap_or(false),
        kwargs: body["chat_template_kwargs"].as_object().cloned().unwrap_or_else(Map::new),
        tools: body.get("tools").map(|tools| Arc::new(tools.clone())),
    }
}

#[test]
fn chats_render_to_the_same_text_and_tokens() {
    let requests = read("requests");
    let mut failures = Vec::new();
    let mut count = 0;
    for Golden { dir, json } in goldens() {
        let template = ChatTemplate::from_model_dir(&dir, None).unwrap().unwrap();
        let tokenizer = Tokenizer::from_model_dir(&dir).unwrap();
        let format = match json["content_format"].as_str().unwrap() {
            "openai" => ContentFormat::Parts,
            "string" => ContentFormat::String,
            other => panic!("format {other}"),
        };
        assert_eq!(template.content_format(), format, "{dir:?}");
        assert!(!list(&json, "chats").is_empty(), "{dir:?}");
        for case in list(&json, "chats") {
            count += 1;
            let request = &requests[case["name"].as_str().unwrap()];
            let messages: Vec<_> = list(request, "messages").iter().map(message).collect();
            let marker = MarkerText {
                modality: &Modality::Image,
                texts: &[json["image_text"].as_str().unwrap()],
            };
            let rendered = template.render(&messages, &[marker], &options(request));
            let matches = match (&rendered, case["error"].as_str()) {
                (Ok(text), None) => {
                    *text == case["prompt"]
                        && tokenizer.encode(text, false).unwrap() == tokens(&case["tokens"])
                }
                (Err(error), Some(_)) => error.is_request_fault(),
                _ => false,
            };
            if !matches {
                failures.push(format!(
                    "{dir:?} {}\n chiasm {rendered:?}\n vllm   {}{}",
                    case["name"], case["prompt"], case["error"]
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {count}\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn image_placeholders_are_the_same() {
    let mut count = 0;
    for Golden { dir, json } in goldens() {
        let config: Value =
            serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap())
                .unwrap();
        let marker = config["image_token_id"].as_u64().or(config["image_token_index"].as_u64());
        for case in list(&json, "chats").iter().filter(|case| case.get("expanded").is_some()) {
            count += 1;
            let marker = TokenId(marker.unwrap() as u32);
            let marker_tokens = [marker];
            let image_marker = Marker { modality: &Modality::Image, tokens: &marker_tokens };
            let markers = Markers { by_modality: &[image_marker], joins: &[] };
            let places = list(case, "placeholders").iter().map(tokens).collect::<Vec<_>>();
            let places: Vec<_> =
                places.iter().map(|place| (place[0].0 as usize, place[1].0 as usize)).collect();
            let runs = |&(_, count): &(usize, usize)| {
                vec![TokenRun { token: marker, count, embeds: true }]
            };
            let items: Vec<_> = places.iter().map(runs).collect();
            let items: Vec<_> =
                items.iter().map(|runs| Item { modality: &Modality::Image, runs }).collect();
            let prompt = tokens(&case["tokens"]);
            if prompt.iter().filter(|token| **token == marker).count() > items.len() {
                // vLLM lets a marker in the text take the image's position. Chiasm refuses it.
                assert!(expand(&prompt, markers, &items).unwrap_err().is_request_fault());
                continue;
            }
            let expanded = expand(&prompt, markers, &items).unwrap();
            let runs = list(case, "expanded").iter().map(tokens);
            let expected_tokens: Vec<_> =
                runs.flat_map(|run| std::iter::repeat_n(run[0], run[1].0 as usize)).collect();
            assert_eq!(expanded.tokens, expected_tokens, "{dir:?} {case}");
            let expected_placeholders: Vec<_> = places
                .iter()
                .map(|&(offset, length)| Placeholder { offset, length, is_embed: None })
                .collect();
            assert_eq!(expanded.placeholders, expected_placeholders, "{dir:?} {case}");
        }
    }
    assert!(count > 30, "only {count} chats with images");
}

#[test]
fn completions_have_the_same_tokens() {
    for Golden { dir, json } in goldens() {
        let tokenizer = Tokenizer::from_model_dir(&dir).unwrap();
        assert!(!list(&json, "completions").is_empty(), "{dir:?}");
        for case in list(&json, "completions") {
            let ids = tokenizer.encode(case["text"].as_str().unwrap(), true).unwrap();
            assert_eq!(ids, tokens(&case["tokens"]), "{dir:?} {}", case["text"]);
        }
    }
}

#[test]
fn goldens_are_from_the_reference_versions() {
    let versions = read("versions");
    assert!(versions["vllm"].as_str().unwrap().starts_with("0.33."), "{versions}");
    assert!(versions["transformers"].as_str().unwrap().starts_with("5.20."), "{versions}");
}

#[test]
fn vocabularies_are_the_same() {
    for Golden { dir, json } in goldens() {
        let tokenizer = Tokenizer::from_model_dir(&dir).unwrap();
        let size = json["vocab_size"].as_u64().unwrap() as usize;
        assert_eq!(tokenizer.vocab_size(), size, "{dir:?}");
        assert_eq!(tokenizer.max_token_id(), Some(TokenId(size as u32 - 1)), "{dir:?}");
        assert_eq!(
            tokenizer.eos_token(),
            json["eos_token_id"].as_u64().map(|id| TokenId(id as u32)),
            "{dir:?}"
        );
        let special: Vec<_> =
            (0..size as u32).map(TokenId).filter(|token| tokenizer.is_special(*token)).collect();
        assert_eq!(special, tokens(&json["special_ids"]), "{dir:?}");
    }
}

#[test]
fn answers_are_detokenized_in_the_same_pieces() {
    let mut count = 0;
    for Golden { dir, json } in goldens() {
        let tokenizer = Tokenizer::from_model_dir(&dir).unwrap();
        for case in list(&json, "answers").iter().filter(|case| case.get("deltas").is_some()) {
            count += 1;
            let skip_special = case["skip_special"].as_bool().unwrap();
            let mut detokenizer =
                Detokenizer::new(tokenizer.clone(), &tokens(&case["prompt"]), skip_special);
            let deltas: Vec<String> =
                tokens(&case["tokens"]).into_iter().map(|token| detokenizer.push(token)).collect();
            assert_eq!(Value::from(deltas), case["deltas"], "{dir:?} {case}");
            assert_eq!(detokenizer.finish(), "");
        }
    }
    assert!(count > 50, "only {count} answers");
}

#[test]
fn answers_stop_at_the_same_position() {
    let mut count = 0;
    for Golden { dir, json } in goldens() {
        let tokenizer = Tokenizer::from_model_dir(&dir).unwrap();
        for case in list(&json, "answers").iter().filter(|case| case.get("stop").is_some()) {
            count += 1;
            let stops =
                list(case, "stop").iter().map(|stop| stop.as_str().unwrap().to_owned()).collect();
            let mut detokenizer =
                Detokenizer::new(tokenizer.clone(), &tokens(&case["prompt"]), true);
            let mut watch = StopStrings::new(stops, case["include"].as_bool().unwrap());
            let min_tokens = case["min_tokens"].as_u64().unwrap() as usize;
            let mut text = String::new();
            let mut found = None;
            for (index, token) in tokens(&case["tokens"]).into_iter().enumerate() {
                let delta = detokenizer.push(token);
                if index < min_tokens {
                    text += &watch.push_unwatched(&delta);
                    continue;
                }
                let step = watch.push(&delta);
                text += &step.text;
                found = step.stopped_by;
                if found.is_some() {
                    break;
                }
            }
            text += &watch.finish();
            assert_eq!(found.as_deref(), case["found"].as_str(), "{dir:?} {case}");
            assert_eq!(text, case["text"], "{dir:?} {case}");
        }
    }
    assert!(count > 100, "only {count} answers");
}
