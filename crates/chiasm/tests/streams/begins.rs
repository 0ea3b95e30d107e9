//! Beginnings of streams: until there is content a request can move, whatever its server has sent.

use serde_json::{Value, json};

use super::before;
use super::ends::{CHAT, MESSAGES, RESPONSES, asked, event, whole};
use super::scripted::{Script, Scripted, Then};

/// The events that a server sends before it has a token.
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

/// The error of a server whose engine has died.
fn failure(path: &str) -> String {
    let error =
        json!({"type": "server_error", "code": "server_error", "message": "the engine has died"});
    match path {
        CHAT => format!("data: {}\n\ndata: [DONE]\n\n", json!({"error": error})),
        _ => event("error", &json!({"type": "error", "error": error})),
    }
}

/// Checks that requests move from a server with this script to one that is well, whose answers
/// arrive.
async fn all_move(script: impl Fn(&str) -> Script + Send + Sync + 'static) {
    let bad = Scripted::start(script).await;
    let well = Scripted::start(|path| Script::stream(vec![whole(path)], Then::Ends)).await;
    let frontend = before(&[&bad.url, &well.url], &[]).await;
    for path in [CHAT, RESPONSES, MESSAGES] {
        for _ in 0..2 {
            let answer = frontend.post(path, &asked(path)).await;
            assert_eq!((answer.status, answer.text), (200, whole(path)), "{path}");
        }
    }
    assert!(bad.given() > 0, "it was tried");
    assert_eq!(frontend.metric("chiasm_retries_total{cause=\"lost\"}").await, bad.given() as f64);
}

#[tokio::test]
async fn stream_without_content_moves_when_its_server_is_lost() {
    all_move(|_| Script::stream(Vec::new(), Then::Breaks)).await;
    all_move(|path| Script::stream(vec![prelude(path)], Then::Breaks)).await;
    all_move(|path| Script::stream(vec![prelude(path)], Then::Ends)).await;
}

#[tokio::test]
async fn stream_without_content_moves_when_its_server_fails() {
    all_move(|path| Script::stream(vec![prelude(path), failure(path)], Then::Ends)).await;
}

#[tokio::test]
async fn answer_in_one_piece_moves_when_half_of_it_came() {
    let bad = Scripted::start(|_| Script::json("{\"model\":", Then::Breaks)).await;
    let well = Scripted::start(|_| Script::json("{\"model\":\"m\"}", Then::Ends)).await;
    let frontend = before(&[&bad.url, &well.url], &[]).await;
    let body: Value = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for _ in 0..2 {
        assert_eq!(frontend.chat(&body).await.ok()["model"], "m");
    }
    assert!(bad.given() > 0, "it was tried");
}

#[tokio::test]
async fn stream_without_content_in_time_is_a_504() {
    let server = Scripted::start(|path| Script::stream(vec![prelude(path)], Then::HangsOn)).await;
    let frontend = before(&[&server.url], &["--first-token-timeout", "1"]).await;
    for path in [CHAT, RESPONSES, MESSAGES] {
        assert_eq!(frontend.post(path, &asked(path)).await.status, 504, "{path}");
    }
}
