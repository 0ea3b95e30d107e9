//! Starts of streams: a request can move until there is content, whatever its server has sent.

use serde_json::{Value, json};

use super::ends::{CHAT, MESSAGES, RESPONSES, event, stream_body, whole_stream};
use super::scripted::{Ending, Script, ScriptedServer};
use super::serve;

/// Returns the events that a server sends before its first token.
fn prelude(path: &str) -> String {
    match path {
        RESPONSES => {
            event("response.created", &json!({"type": "response.created", "response": {"id": "r"}}))
        }
        MESSAGES => {
            event("message_start", &json!({"type": "message_start", "message": {"content": []}}))
        }
        _ => format!(
            "data: {}\n\n",
            json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        ),
    }
}

/// Returns the error event of a server whose engine has died.
fn failure(path: &str) -> String {
    let error =
        json!({"type": "server_error", "code": "server_error", "message": "the engine has died"});
    match path {
        CHAT => format!("data: {}\n\ndata: [DONE]\n\n", json!({"error": error})),
        _ => event("error", &json!({"type": "error", "error": error})),
    }
}

/// Checks that requests move from a server with this script to a healthy one.
async fn check_requests_move(script: impl Fn(&str) -> Script + Send + Sync + 'static) {
    let bad = ScriptedServer::start(script).await;
    let healthy =
        ScriptedServer::start(|path| Script::stream(vec![whole_stream(path)], Ending::Complete))
            .await;
    let frontend = serve(&[&bad.url, &healthy.url], &[]).await;
    for path in [CHAT, RESPONSES, MESSAGES] {
        for _ in 0..2 {
            let answer = frontend.post(path, &stream_body(path)).await;
            assert_eq!((answer.status, answer.text), (200, whole_stream(path)), "{path}");
        }
    }
    assert!(bad.request_count() > 0, "the bad server got requests");
    assert_eq!(
        frontend.metric("chiasm_retries_total{cause=\"lost\"}").await,
        bad.request_count() as f64
    );
}

#[tokio::test]
async fn stream_without_content_moves_when_its_server_is_lost() {
    check_requests_move(|_| Script::stream(Vec::new(), Ending::Reset)).await;
    check_requests_move(|path| Script::stream(vec![prelude(path)], Ending::Reset)).await;
    check_requests_move(|path| Script::stream(vec![prelude(path)], Ending::Complete)).await;
}

#[tokio::test]
async fn stream_without_content_moves_when_its_server_fails() {
    check_requests_move(|path| {
        Script::stream(vec![prelude(path), failure(path)], Ending::Complete)
    })
    .await;
}

#[tokio::test]
async fn truncated_json_answer_moves_to_another_server() {
    let bad = ScriptedServer::start(|_| Script::json("{\"model\":", Ending::Reset)).await;
    let healthy =
        ScriptedServer::start(|_| Script::json("{\"model\":\"m\"}", Ending::Complete)).await;
    let frontend = serve(&[&bad.url, &healthy.url], &[]).await;
    let body: Value = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for _ in 0..2 {
        assert_eq!(frontend.chat(&body).await.ok()["model"], "m");
    }
    assert!(bad.request_count() > 0, "the bad server got requests");
}

#[tokio::test]
async fn stream_without_content_in_time_is_a_504() {
    let server =
        ScriptedServer::start(|path| Script::stream(vec![prelude(path)], Ending::Hang)).await;
    let frontend = serve(&[&server.url], &["--first-token-timeout", "1"]).await;
    for path in [CHAT, RESPONSES, MESSAGES] {
        assert_eq!(frontend.post(path, &stream_body(path)).await.status, 504, "{path}");
    }
}
