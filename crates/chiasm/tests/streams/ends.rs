//! Ends of streams: complete, failed, cut off and timed out.

use serde_json::{Value, json};

use super::scripted::{Ending, Script, ScriptedServer};
use super::serve;
use crate::support::Answer;

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const RESPONSES: &str = "/v1/responses";
pub(crate) const MESSAGES: &str = "/v1/messages";

/// Returns a request body for a stream.
pub(crate) fn stream_body(path: &str) -> Value {
    let hi = json!([{"role": "user", "content": "hi"}]);
    match path {
        RESPONSES => json!({"model": "m", "input": "hi", "stream": true}),
        _ => json!({"model": "m", "messages": hi, "max_tokens": 16, "stream": true}),
    }
}

pub(crate) fn event(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

/// Returns the first events of a stream.
fn first_events(path: &str) -> String {
    match path {
        RESPONSES => {
            let created =
                json!({"type": "response.created", "sequence_number": 0, "response": {"id": "r"}});
            let delta =
                json!({"type": "response.output_text.delta", "sequence_number": 1, "delta": "one"});
            event("response.created", &created) + &event("response.output_text.delta", &delta)
        }
        MESSAGES => {
            let message = json!({"type": "message_start", "message": {"id": "m", "content": []}});
            let delta = json!({"type": "text_delta", "text": "one"});
            let delta = json!({"type": "content_block_delta", "index": 0, "delta": delta});
            event("message_start", &message) + &event("content_block_delta", &delta)
        }
        _ => {
            format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {"content": "one"}}]}))
        }
    }
}

/// Returns a complete stream.
pub(crate) fn whole_stream(path: &str) -> String {
    let last = match path {
        RESPONSES => event(
            "response.completed",
            &json!({"type": "response.completed", "sequence_number": 2}),
        ),
        MESSAGES => event("message_stop", &json!({"type": "message_stop"})),
        _ => "data: [DONE]\n\n".to_owned(),
    };
    first_events(path) + &last
}

/// Returns the script of a stream that stops inside an event.
fn truncated_stream(path: &str, ending: Ending) -> Script {
    Script::stream(vec![first_events(path), "event: x\ndata: {\"half".to_owned()], ending)
}

/// Returns names and data of a stream's events, which must all be complete.
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

/// Asserts that a stream consists of complete events and has one end: an error in the format of its
/// API. `anthropic_type` is the error's type in the Messages API, `code` its code in the others.
#[track_caller]
fn assert_ends_with_error(path: &str, answer: &Answer, code: &str, anthropic_type: &str) {
    assert_eq!(answer.status, 200, "{}", answer.text);
    let rest = answer
        .text
        .strip_prefix(&first_events(path))
        .unwrap_or_else(|| panic!("unexpected first events: {}", answer.text));
    assert!(!rest.contains("127.0.0.1") && !rest.contains("half"), "{rest}");
    let events = events(answer);
    let data = |(_, data): &(String, String)| serde_json::from_str::<Value>(data).expect("JSON");
    let new_events = events.len() - first_events(path).matches("\n\n").count();
    match path {
        CHAT => {
            assert_eq!((new_events, events[events.len() - 1].1.as_str()), (2, "[DONE]"), "{rest}");
            assert_eq!(data(&events[events.len() - 2])["error"]["code"], code, "{rest}");
        }
        RESPONSES => {
            let last = &events[events.len() - 1];
            let error = data(last);
            assert_eq!(
                (new_events, last.0.as_str(), &error["type"]),
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
            assert_eq!((new_events, last.0.as_str()), (1, "error"), "{rest}");
            assert_eq!(data(last)["error"]["type"], anthropic_type, "{rest}");
        }
    }
}

#[tokio::test]
async fn broken_stream_ends_with_an_error_of_its_api() {
    for ending in [Ending::Reset, Ending::Complete] {
        let server = ScriptedServer::start(move |path| truncated_stream(path, ending)).await;
        let frontend = serve(&[&server.url], &[]).await;
        for path in [CHAT, RESPONSES, MESSAGES] {
            let answer = frontend.post(path, &stream_body(path)).await;
            assert_ends_with_error(path, &answer, "engine_failed", "api_error");
        }
        assert_eq!(frontend.metric("chiasm_stream_ends_total{how=\"failed\"}").await, 3.0);
    }
}

#[tokio::test]
async fn timed_out_stream_ends_with_an_error() {
    let server = ScriptedServer::start(|path| truncated_stream(path, Ending::Hang)).await;
    let frontend = serve(&[&server.url], &["--request-timeout", "1"]).await;
    for path in [CHAT, RESPONSES, MESSAGES] {
        let answer = frontend.post(path, &stream_body(path)).await;
        assert_ends_with_error(path, &answer, "timeout", "timeout_error");
    }
}

/// Returns a complete stream that ends with an error of its server.
fn failed_stream(path: &str, code: u16, kind: &str) -> String {
    let error = json!({"message": "no more", "code": code, "type": kind});
    let last = match path {
        RESPONSES => event(
            "response.failed",
            &json!({"type": "response.failed", "response": {"error": error}}),
        ),
        MESSAGES => event("error", &json!({"type": "error", "error": error})),
        _ => format!("data: {}\n\ndata: [DONE]\n\n", json!({"error": error})),
    };
    first_events(path) + &last
}

#[tokio::test]
async fn server_error_counts_as_failed_but_not_a_refusal() {
    for (code, kind, how) in
        [(500, "api_error", "failed"), (400, "invalid_request_error", "finished")]
    {
        for ending in [Ending::Reset, Ending::Complete] {
            let server = ScriptedServer::start(move |path| {
                Script::stream(vec![failed_stream(path, code, kind)], ending)
            })
            .await;
            let frontend = serve(&[&server.url], &[]).await;
            for path in [CHAT, RESPONSES, MESSAGES] {
                let answer = frontend.post(path, &stream_body(path)).await;
                assert_eq!(answer.text, failed_stream(path, code, kind));
            }
            assert_eq!(
                frontend.metric(&format!("chiasm_stream_ends_total{{how=\"{how}\"}}")).await,
                3.0
            );
        }
    }
}

#[tokio::test]
async fn stream_with_end_event_counts_as_finished() {
    for ending in [Ending::Reset, Ending::Complete] {
        let server =
            ScriptedServer::start(move |path| Script::stream(vec![whole_stream(path)], ending))
                .await;
        let frontend = serve(&[&server.url], &[]).await;
        for path in [CHAT, RESPONSES, MESSAGES] {
            assert_eq!(frontend.post(path, &stream_body(path)).await.text, whole_stream(path));
        }
        assert_eq!(frontend.metric("chiasm_stream_ends_total{how=\"finished\"}").await, 3.0);
    }
}

#[tokio::test]
async fn answer_with_finish_reason_has_one_end() {
    let choice = json!({
        "index": 0,
        "token_ids": [40, 41],
        "finish_reason": "stop",
        "logprobs": null,
        "stop_reason": null,
    });
    let finished = json!({"choices": [choice]});
    let usage = json!({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}});
    let bodies =
        [format!("data: {finished}\n\n"), format!("data: {finished}\n\ndata: {usage}\n\n")];
    for (ending, body) in [Ending::Reset, Ending::Complete]
        .into_iter()
        .flat_map(|ending| bodies.clone().map(|body| (ending, body)))
    {
        let server =
            ScriptedServer::start(move |_| Script::stream(vec![body.clone()], ending)).await;
        let frontend = serve(&[&format!("vllm+{}", server.url)], &[]).await;
        let chat = events(&frontend.post(CHAT, &stream_body(CHAT)).await);
        assert_eq!(
            chat.iter().filter(|(_, data)| data == "[DONE]" || data.contains("\"error\"")).count(),
            1,
            "{chat:?}"
        );
        let messages = events(&frontend.post(MESSAGES, &stream_body(MESSAGES)).await);
        assert_eq!(
            messages.iter().filter(|(name, _)| name == "message_stop" || name == "error").count(),
            1
        );
        let response = events(&frontend.post(RESPONSES, &stream_body(RESPONSES)).await);
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
