//! Ends of streams.

use serde_json::{Value, json};

use super::before;
use super::scripted::{Script, Scripted, Then};
use crate::support::Answer;

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const RESPONSES: &str = "/v1/responses";
pub(crate) const MESSAGES: &str = "/v1/messages";

/// The body of a request for a stream.
pub(crate) fn asked(path: &str) -> Value {
    let hi = json!([{"role": "user", "content": "hi"}]);
    match path {
        RESPONSES => json!({"model": "m", "input": "hi", "stream": true}),
        _ => json!({"model": "m", "messages": hi, "max_tokens": 16, "stream": true}),
    }
}

pub(crate) fn event(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

/// The beginning of a stream: its whole events.
fn begun(path: &str) -> String {
    match path {
        RESPONSES => {
            let created =
                json!({"type": "response.created", "sequence_number": 0, "response": {"id": "r"}});
            let said =
                json!({"type": "response.output_text.delta", "sequence_number": 1, "delta": "one"});
            event("response.created", &created) + &event("response.output_text.delta", &said)
        }
        MESSAGES => {
            let message = json!({"type": "message_start", "message": {"id": "m", "content": []}});
            let said = json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "one"}});
            event("message_start", &message) + &event("content_block_delta", &said)
        }
        _ => {
            format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {"content": "one"}}]}))
        }
    }
}

/// A whole stream.
pub(crate) fn whole(path: &str) -> String {
    let last = match path {
        RESPONSES => event(
            "response.completed",
            &json!({"type": "response.completed", "sequence_number": 2}),
        ),
        MESSAGES => event("message_stop", &json!({"type": "message_stop"})),
        _ => "data: [DONE]\n\n".to_owned(),
    };
    begun(path) + &last
}

/// A server's stream that stops within an event.
fn halved(path: &str, then: Then) -> Script {
    Script::stream(vec![begun(path), "event: x\ndata: {\"half".to_owned()], then)
}

/// The events of a stream, which must all be whole: their names and data.
#[track_caller]
fn events(answer: &Answer) -> Vec<(String, String)> {
    assert!(answer.text.ends_with("\n\n"), "{}", answer.text);
    let parse = |event: &str| {
        let field = |name: &str| {
            event.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().to_owned()
        };
        (field("event: "), field("data: "))
    };
    answer.text.split_terminator("\n\n").map(parse).collect()
}

/// Checks that a stream consists of whole events and has one end, an error in the form of its API.
#[track_caller]
fn ends_with(path: &str, answer: &Answer, code: &str, anthropic: &str) {
    assert_eq!(answer.status, 200, "{}", answer.text);
    let rest = answer
        .text
        .strip_prefix(&begun(path))
        .unwrap_or_else(|| panic!("whole events: {}", answer.text));
    assert!(!rest.contains("127.0.0.1") && !rest.contains("half"), "{rest}");
    let events = events(answer);
    let data = |(_, data): &(String, String)| serde_json::from_str::<Value>(data).expect("JSON");
    let told = events.len() - begun(path).matches("\n\n").count();
    match path {
        CHAT => {
            assert_eq!((told, events[events.len() - 1].1.as_str()), (2, "[DONE]"), "{rest}");
            assert_eq!(data(&events[events.len() - 2])["error"]["code"], code, "{rest}");
        }
        RESPONSES => {
            let last = &events[events.len() - 1];
            let error = data(last);
            assert_eq!(
                (told, last.0.as_str(), &error["type"]),
                (1, "error", &json!("error")),
                "{rest}"
            );
            assert_eq!(
                (&error["code"], &error["sequence_number"]),
                (&json!(code), &json!(2)),
                "{rest}"
            );
        }
        _ => {
            let last = &events[events.len() - 1];
            assert_eq!((told, last.0.as_str()), (1, "error"), "{rest}");
            assert_eq!(data(last)["error"]["type"], anthropic, "{rest}");
        }
    }
}

#[tokio::test]
async fn broken_stream_ends_with_an_error_of_its_api() {
    for then in [Then::Breaks, Then::Ends] {
        let server = Scripted::start(move |path| halved(path, then)).await;
        let frontend = before(&[&server.url], &[]).await;
        for path in [CHAT, RESPONSES, MESSAGES] {
            let answer = frontend.post(path, &asked(path)).await;
            ends_with(path, &answer, "engine_failed", "api_error");
        }
        assert_eq!(frontend.metric("chiasm_stream_ends_total{how=\"failed\"}").await, 3.0);
    }
}

#[tokio::test]
async fn timed_out_stream_ends_and_says_so() {
    let server = Scripted::start(|path| halved(path, Then::HangsOn)).await;
    let frontend = before(&[&server.url], &["--request-timeout", "1"]).await;
    for path in [CHAT, RESPONSES, MESSAGES] {
        let answer = frontend.post(path, &asked(path)).await;
        ends_with(path, &answer, "timeout", "timeout_error");
    }
}

/// A whole stream that ends with an error of its server.
fn failed(path: &str, code: u16, kind: &str) -> String {
    let error = json!({"message": "no more", "code": code, "type": kind});
    let last = match path {
        RESPONSES => event(
            "response.failed",
            &json!({"type": "response.failed", "response": {"error": error}}),
        ),
        MESSAGES => event("error", &json!({"type": "error", "error": error})),
        _ => format!("data: {}\n\ndata: [DONE]\n\n", json!({"error": error})),
    };
    begun(path) + &last
}

#[tokio::test]
async fn servers_own_error_is_a_failed_stream_and_a_refusal_is_not() {
    for (code, kind, how) in
        [(500, "api_error", "failed"), (400, "invalid_request_error", "finished")]
    {
        for then in [Then::Breaks, Then::Ends] {
            let server =
                Scripted::start(move |path| Script::stream(vec![failed(path, code, kind)], then))
                    .await;
            let frontend = before(&[&server.url], &[]).await;
            for path in [CHAT, RESPONSES, MESSAGES] {
                assert_eq!(frontend.post(path, &asked(path)).await.text, failed(path, code, kind));
            }
            assert_eq!(
                frontend.metric(&format!("chiasm_stream_ends_total{{how=\"{how}\"}}")).await,
                3.0
            );
        }
    }
}

#[tokio::test]
async fn stream_is_whole_once_its_end_has_come() {
    for then in [Then::Breaks, Then::Ends] {
        let server = Scripted::start(move |path| Script::stream(vec![whole(path)], then)).await;
        let frontend = before(&[&server.url], &[]).await;
        for path in [CHAT, RESPONSES, MESSAGES] {
            assert_eq!(frontend.post(path, &asked(path)).await.text, whole(path));
        }
        assert_eq!(frontend.metric("chiasm_stream_ends_total{how=\"finished\"}").await, 3.0);
    }
}

#[tokio::test]
async fn answer_whose_finish_came_has_one_end() {
    let finished = json!({"choices": [
        {"index": 0, "token_ids": [40, 41], "finish_reason": "stop", "logprobs": null, "stop_reason": null},
    ]});
    let usage = json!({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}});
    let told = [format!("data: {finished}\n\n"), format!("data: {finished}\n\ndata: {usage}\n\n")];
    for (then, told) in [Then::Breaks, Then::Ends]
        .into_iter()
        .flat_map(|then| told.clone().map(|told| (then, told)))
    {
        let server = Scripted::start(move |_| Script::stream(vec![told.clone()], then)).await;
        let frontend = before(&[&format!("vllm+{}", server.url)], &[]).await;
        let chat = events(&frontend.post(CHAT, &asked(CHAT)).await);
        assert_eq!(
            chat.iter().filter(|(_, data)| data == "[DONE]" || data.contains("\"error\"")).count(),
            1,
            "{chat:?}"
        );
        let messages = events(&frontend.post(MESSAGES, &asked(MESSAGES)).await);
        assert_eq!(
            messages.iter().filter(|(name, _)| name == "message_stop" || name == "error").count(),
            1
        );
        let response = events(&frontend.post(RESPONSES, &asked(RESPONSES)).await);
        let is_end = |(name, _): &&(String, String)| {
            matches!(
                name.as_str(),
                "response.completed" | "response.incomplete" | "response.failed" | "error"
            )
        };
        let ends: Vec<_> = response.iter().filter(is_end).collect();
        assert_eq!((ends.len(), ends[0].0.as_str()), (1, "response.completed"), "{response:?}");
    }
}
