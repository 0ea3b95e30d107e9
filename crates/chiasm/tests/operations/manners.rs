//! Fairness between clients, authentication, and conventions of HTTP and OpenAI's client.

use serde_json::{Value, json};

use super::TIMEOUT;
use crate::support::{Answer, Server, demo_model, wait_for};

async fn serve(name: &str, flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let server = Server::start(
        &[&[model.as_str(), "--served-model-name", name, "--sim", "1"], flags].concat(),
    );
    server.wait_ready(1, TIMEOUT).await;
    server
}

/// Opens a stream that takes minutes, on behalf of a client behind a proxy.
async fn open_stream_for(server: &Server, client: &str) -> reqwest::Response {
    let body = json!({"prompt": "hello", "stream": true, "max_tokens": 5000, "ignore_eos": true});
    let request =
        server.client.post(format!("{}/v1/completions", server.url)).body(body.to_string());
    let request =
        request.header("content-type", "application/json").header("x-forwarded-for", client);
    request.send().await.expect("an answer")
}

#[tokio::test]
async fn clients_behind_a_proxy_share_request_slots() {
    let server = serve("m", &["--max-requests", "8", "--trusted-proxies", "127.0.0.0/8,::1"]).await;
    let one = "192.0.2.1";
    let other = "192.0.2.2";
    let mut streams = Vec::new();
    for _ in 0..8 {
        let stream = open_stream_for(&server, one).await;
        assert_eq!(stream.status(), 200, "a single client may use all slots");
        streams.push(stream);
    }
    assert_eq!(Answer::read(open_stream_for(&server, other).await).await.refused(503), "");
    streams.pop();
    wait_for("free slot", TIMEOUT, async || {
        server.metric("chiasm_in_flight_requests").await == 7.0
    })
    .await;
    let refused = Answer::read(open_stream_for(&server, one).await).await;
    assert_eq!(
        (refused.status, refused.header("retry-after").as_str()),
        (429, "1"),
        "{}",
        refused.text
    );
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!(open_stream_for(&server, other).await.status(), 200);
    assert_eq!(server.metric("chiasm_request_slots").await, 8.0);
}

async fn get(server: &Server, path: &str) -> Answer {
    Answer::read(
        server.client.get(format!("{}{path}", server.url)).send().await.expect("an answer"),
    )
    .await
}

#[tokio::test]
async fn request_without_key_is_refused_but_health_answers() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "# of the tests\nsecret-of-a-file\n").expect("a file");
    let file = file.display().to_string();
    let server = serve("m", &["--api-key", "secret-of-a-flag", "--api-key-file", &file]).await;
    let post = async |key: Option<&str>, path: &str| {
        let body = json!({"prompt": "hello", "max_tokens": 1}).to_string();
        let request = server.client.post(format!("{}{path}", server.url)).body(body);
        let request = request.header("content-type", "application/json");
        let request = key.map_or(request.try_clone(), |key| {
            request.try_clone().map(|request| request.bearer_auth(key))
        });
        Answer::read(request.expect("a request").send().await.expect("an answer")).await
    };
    for key in ["secret-of-a-flag", "secret-of-a-file"] {
        post(Some(key), "/v1/completions").await.ok();
    }
    for (key, path) in
        [(None, "/v1/completions"), (Some("secret"), "/v1/completions"), (None, "/no/such/path")]
    {
        let refused = post(key, path).await;
        assert_eq!(
            (refused.status, refused.header("www-authenticate").as_str()),
            (401, "Bearer"),
            "{}",
            refused.text
        );
        assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    }
    for (path, status) in [
        ("/v1/models", 401),
        ("/workers", 401),
        ("/health", 200),
        ("/ping", 200),
        ("/metrics", 200),
    ] {
        assert_eq!(get(&server, path).await.status, status, "{path}");
    }
    let refused =
        server.metric("chiasm_refusals_total{status=\"401\",code=\"invalid_api_key\"}").await;
    assert_eq!(refused, 2.0);
}

#[tokio::test]
async fn model_name_with_slashes_is_found() {
    let server = serve("/models/org/m-1", &[]).await;
    let listed = get(&server, "/v1/models").await.ok()["data"][0].clone();
    for path in ["/v1/models//models/org/m-1", "/v1/models/%2Fmodels%2Forg%2Fm-1"] {
        assert_eq!(get(&server, path).await.ok(), listed, "{path}");
    }
    assert_eq!(listed["object"], "model");
    for path in ["/v1/models/m-1", "/v1/models/models/org/m-1", "/v1/models/x%20y"] {
        let answer = get(&server, path).await;
        assert_eq!(answer.refused(404), "model", "{path}");
        assert_eq!(answer.json()["error"]["code"], "model_not_found");
    }
    assert_eq!(get(&server, "/v1/models/%FF").await.status, 404);
}

/// Returns the numbers of a JSON text with more than nine digits, which identify any f32.
fn long_numbers(text: &str) -> Vec<&str> {
    let numbers = text.split(|c: char| !(c.is_ascii_digit() || ".-+eE".contains(c)));
    let digits = |number: &str| {
        number
            .trim_start_matches(['-', '0', '.'])
            .bytes()
            .take_while(|b| *b != b'e')
            .filter(u8::is_ascii_digit)
            .count()
    };
    numbers.filter(|number| number.contains('.') && digits(number) > 9).collect()
}

#[tokio::test]
async fn log_probabilities_have_at_most_nine_digits() {
    let server = serve("m", &["--sim-speedup", "1000"]).await;
    let messages = json!([{"role": "user", "content": "hello"}]);
    let chat = json!({"messages": messages, "max_tokens": 5, "logprobs": true, "top_logprobs": 3});
    let completion = json!({"prompt": "hello", "max_tokens": 5, "logprobs": 3});
    for (path, body) in [("/v1/chat/completions", chat), ("/v1/completions", completion)] {
        let answer = server.post(path, &body).await;
        assert!(answer.ok().pointer("/choices/0/logprobs").is_some_and(Value::is_object));
        assert_eq!(long_numbers(&answer.text), Vec::<&str>::new(), "{}", answer.text);
    }
}

#[tokio::test]
async fn post_without_json_content_type_is_refused() {
    let server = serve("m", &["--sim-speedup", "1000"]).await;
    let body = json!({"prompt": "hello", "max_tokens": 1}).to_string();
    let post = async |headers: &[(&str, &str)]| {
        let request =
            server.client.post(format!("{}/v1/completions", server.url)).body(body.clone());
        let request =
            headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        Answer::read(request.send().await.expect("an answer")).await
    };
    let json = ("content-type", "application/json");
    assert_eq!(post(&[]).await.refused(415), "content-type");
    assert_eq!(post(&[("content-type", "text/plain")]).await.refused(415), "content-type");
    assert_eq!(post(&[json, ("content-encoding", "gzip")]).await.refused(415), "content-encoding");
    post(&[("content-type", "application/json; charset=utf-8")]).await.ok();
}
