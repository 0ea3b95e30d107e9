//! Upstream servers of OpenAI's API, to which requests are forwarded as they are.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{
    Answer, Process, Server, chiasm, demo_model, free_port, send_signal, wait_for,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts another server with one simulated engine, to be used as an upstream.
async fn start_other_server() -> Server {
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--served-model-name", "its/own name", "--sim", "1"]);
    server.wait_ready(1, TIMEOUT).await;
    server
}

/// Starts a frontend of these upstream servers.
async fn serve_upstreams(upstreams: &[&str], flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args = vec![model.as_str(), "--served-model-name", "m"];
    for upstream in upstreams {
        args.extend(["--upstream", upstream]);
    }
    let frontend = Server::start(&[&args, flags].concat());
    frontend.wait_ready(upstreams.len() as u64, TIMEOUT).await;
    frontend
}

/// Returns a content part with one of the demo's pictures.
fn picture(name: &str) -> Value {
    let bytes = std::fs::read(format!("{}/assets/images/{name}.jpg", env!("CARGO_MANIFEST_DIR")))
        .expect("a picture");
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes));
    json!({"type": "image_url", "image_url": {"url": url}})
}

/// Returns a request about a picture, with additional fields.
fn chat_body(name: &str, fields: &Value) -> Value {
    let content = json!([picture(name), {"type": "text", "text": "what is in this picture?"}]);
    let messages = json!([{"role": "user", "content": content}]);
    let mut body = json!({"model": "m", "messages": messages, "max_tokens": 6, "temperature": 0});
    body.as_object_mut()
        .expect("an object")
        .extend(fields.as_object().cloned().unwrap_or_default());
    body
}

#[tokio::test]
async fn similar_requests_go_to_the_same_server() {
    let others = [start_other_server().await, start_other_server().await];
    let frontend = serve_upstreams(&[&others[0].url, &format!("{}/v1", others[1].url)], &[]).await;
    let route =
        |answer: &Answer| (answer.header("x-chiasm-worker"), answer.header("x-chiasm-overlap"));
    let mut homes = Vec::new();
    for name in ["dawn", "dusk", "night", "snow"] {
        let answer = frontend.chat(&chat_body(name, &json!({}))).await;
        assert_eq!(answer.ok()["model"], "its/own name", "the answer is unchanged");
        let (home, overlap) = route(&answer);
        assert!(overlap.starts_with("0/"), "{overlap}");
        homes.push((name, home));
    }
    for (name, home) in &homes {
        let answer = frontend.chat(&chat_body(name, &json!({"max_tokens": 7}))).await;
        answer.ok();
        let (worker, overlap) = route(&answer);
        let (held, all) = overlap.split_once('/').expect("X/Y");
        let [held, all] = [held, all].map(|blocks| blocks.parse::<u32>().expect("a number"));
        // The last block is not full.
        assert_eq!((&worker, held), (home, all - 1), "{name}: {overlap}");
    }
    assert!(
        homes.iter().any(|(_, home)| home != &homes[0].1),
        "both servers got requests: {homes:?}"
    );
    assert!(
        frontend.metric("chiasm_completion_tokens_total").await >= 4.0 * 13.0,
        "usage is read out of the answers"
    );
    // The live page explains the routing of the first request and shows its outcome.
    let explanation = frontend
        .client
        .get(format!("{}/ui/requests/0", frontend.url))
        .send()
        .await
        .expect("an answer");
    let explanation: Value =
        serde_json::from_str(&explanation.text().await.expect("text")).expect("JSON");
    assert_eq!(
        (explanation["candidates"].as_array().map(Vec::len), &explanation["request"]["worker"]),
        (Some(2), &json!(homes[0].1))
    );
    let outcome = &explanation["request"]["outcome"];
    assert_eq!(
        (&outcome["status"], &outcome["found"]["completion_tokens"]),
        (&json!(200), &json!(6))
    );

    // A stream is forwarded as it is.
    let stream = frontend
        .chat(&chat_body(
            "dawn",
            &json!({"stream": true, "stream_options": {"include_usage": true}}),
        ))
        .await;
    assert_eq!(stream.header("content-type"), "text/event-stream; charset=utf-8");
    assert!(
        stream.text.contains("\"model\":\"its/own name\"")
            && stream.text.ends_with("data: [DONE]\n\n"),
        "{}",
        stream.text
    );
    // The server refuses unknown fields itself.
    assert_eq!(
        frontend.chat(&chat_body("dawn", &json!({"nonsense": 1}))).await.refused(400),
        "nonsense"
    );
    assert_eq!(frontend.chat(&json!({"model": "n"})).await.status, 404);
    let body = json!({"model": "m", "prompt": "hello", "max_tokens": 2});
    frontend.post("/v1/completions", &body).await.ok();
    let body =
        json!({"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    assert_eq!(frontend.post("/v1/messages", &body).await.ok()["type"], "message");
}

#[tokio::test]
async fn dead_server_is_replaced_by_another() {
    let mut others = [start_other_server().await, start_other_server().await];
    let frontend = serve_upstreams(&[&others[0].url, &others[1].url], &[]).await;
    let answer = frontend.chat(&chat_body("dawn", &json!({}))).await;
    answer.ok();
    let home = usize::from(answer.header("x-chiasm-worker") == "worker_1");
    others[home].signal_and_wait("KILL");
    for _ in 0..3 {
        let answer = frontend.chat(&chat_body("dawn", &json!({}))).await;
        answer.ok();
        assert_eq!(answer.header("x-chiasm-worker"), format!("worker_{}", 1 - home));
    }
    wait_for("the removal of the server", TIMEOUT, async || frontend.ready_workers().await == 1)
        .await;
    others[1 - home].signal_and_wait("KILL");
    assert_eq!(frontend.chat(&chat_body("dawn", &json!({}))).await.status, 503);
}

/// A mock server that records requests and gives a fixed answer.
#[derive(Clone, Default)]
struct MockServer {
    requests: Arc<Mutex<Vec<String>>>,
    answer: &'static str,
}

impl MockServer {
    /// Starts a server that gives `answer` to all requests except those for its models. If `answer`
    /// is empty, it never answers. Returns the server and its URL.
    async fn start(answer: &'static str) -> (Self, String) {
        let mock = Self { answer, ..Self::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let serving = mock.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serving.clone().serve(stream));
            }
        });
        (mock, url)
    }

    async fn serve(self, mut stream: TcpStream) {
        let mut buffer = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&buffer).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head
                    .lines()
                    .find_map(|line| line.strip_prefix("content-length: "))
                    .unwrap_or("0");
                if body.len() >= length.parse().expect("a number") {
                    break;
                }
            }
            if stream.read_buf(&mut buffer).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let request = String::from_utf8(buffer).expect("text");
        let answer = if request.starts_with("GET ") {
            let models = json!({"data": [{"id": "theirs"}]}).to_string();
            format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{models}",
                models.len()
            )
        } else {
            self.requests.lock().expect("not poisoned").push(request);
            if self.answer.is_empty() {
                std::future::pending::<()>().await;
            }
            self.answer.to_owned()
        };
        let _ = stream.write_all(answer.as_bytes()).await;
        // A chunked answer continues with the first chunk's size, which never ends.
        let is_endless = answer.ends_with("chunked\r\n\r\n");
        while is_endless && stream.write_all(&[b'0'; 1 << 16]).await.is_ok() {}
    }
}

#[tokio::test]
async fn forwarded_request_keeps_all_but_model_name() {
    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/x-own\r\n\
                          content-length: 6\r\nconnection: close\r\n\r\n{ \"a\"}";
    let (mock, url) = MockServer::start(ANSWER).await;
    let key = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(key.path(), "theirs-alone\n").expect("a key");
    let upstream = format!("{url},api-key-file={}", key.path().display());
    let frontend = serve_upstreams(&[&upstream], &["--api-key", "of-clients"]).await;
    let body = concat!(
        r#"{ "temperature": 1.50, "audio": {"x": [1e3, null]}, "model":"m", "#,
        r#""tools": [],"messages":[{"role":"user","content":"hi"}] }"#
    );
    let request = frontend.client.post(format!("{}/v1/chat/completions", frontend.url)).body(body);
    let request = request
        .header("content-type", "application/json")
        .header("authorization", "Bearer of-clients");
    let answer =
        Answer::read(request.header("x-request-id", "r-7").send().await.expect("an answer")).await;
    assert_eq!(
        (answer.status, answer.text.as_str(), answer.header("content-type").as_str()),
        (200, "{ \"a\"}", "application/x-own")
    );
    let forwarded = mock.requests.lock().expect("not poisoned").remove(0);
    let (head, sent) = forwarded.split_once("\r\n\r\n").expect("a head");
    assert_eq!(sent, body.replace("\"m\"", "\"theirs\""));
    assert!(
        head.contains("authorization: Bearer theirs-alone") && head.contains("x-request-id: r-7"),
        "{head}"
    );
    assert!(!head.contains("of-clients"), "{head}");
}

#[tokio::test]
async fn endless_chunk_size_is_a_502() {
    const ENDLESS: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let (_, endless) = MockServer::start(ENDLESS).await;
    let frontend = serve_upstreams(&[&endless], &[]).await;
    let answer = frontend
        .chat(&json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}))
        .await;
    assert_eq!(answer.status, 502, "{}", answer.text);
}

#[tokio::test]
async fn failing_or_silent_servers_do_not_affect_others() {
    const FAILURE: &str =
        "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\nconnection: close\r\n\r\nboom";
    const TRUNCATED: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                             content-length: 99\r\nconnection: close\r\n\r\ndata: {}\n\n";
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let (mock, failing) = MockServer::start(FAILURE).await;
    let healthy = start_other_server().await;
    let frontend = serve_upstreams(&[&failing, &healthy.url], &["--policy", "round-robin"]).await;
    for _ in 0..4 {
        frontend.chat(&body).await.ok();
    }
    assert!(
        !mock.requests.lock().expect("not poisoned").is_empty(),
        "the failing server got no request"
    );
    let alone = serve_upstreams(&[&failing], &[]).await;
    let refused = alone.chat(&body).await;
    assert!(refused.status == 502 || refused.status == 503, "{}", refused.text);

    let (_, silent) = MockServer::start("").await;
    let frontend = serve_upstreams(&[&silent], &["--first-token-timeout", "1"]).await;
    assert_eq!(frontend.chat(&body).await.status, 504);
    frontend.wait_for_log("blocks overlap endpoint=\"chat\" status=504");

    let (_, truncated) = MockServer::start(TRUNCATED).await;
    let frontend = serve_upstreams(&[&truncated], &[]).await;
    let stream = frontend.chat(&body).await;
    assert!(
        stream.text.starts_with("data: {}\n\n") && stream.text.contains("\"error\""),
        "{}",
        stream.text
    );
    assert_eq!(frontend.metric("chiasm_stream_ends_total{how=\"failed\"}").await, 1.0);
}

/// An answer with this head and body, after which the connection closes.
macro_rules! answer {
    ($head:literal, $body:literal) => {
        concat!(
            "HTTP/1.1 ",
            $head,
            "\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n",
            $body
        )
    };
}

/// Sends a GET request for this path to the frontend.
async fn get(frontend: &Server, path: &str) -> Answer {
    Answer::read(
        frontend.client.get(format!("{}{path}", frontend.url)).send().await.expect("an answer"),
    )
    .await
}

/// A server that fails at once looks idle, but gets only a few requests. No client sees an error.
#[tokio::test]
async fn broken_server_does_not_attract_requests() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let healthy = start_other_server().await;
    for (answer, max_requests, reason) in [
        (answer!("500 x", r#"{"error":{"message":"the core is dead"}}"#), 8, "the core is dead"),
        (answer!("401 x", r#"{"error":{"message":"no such key"}}"#), 4, "no such key"),
        (answer!("429 x\r\nretry-after: 50", r#"{"error":{"message":"too many"}}"#), 1, "too many"),
        (answer!("503 x\r\nretry-after: 50", r#"{"error":{"message":"too many"}}"#), 1, "too many"),
        (
            answer!("404 x", r#"{"error":{"message":"no such model","param":"model"}}"#),
            8,
            "no such model",
        ),
    ] {
        let (broken, url) = MockServer::start(answer).await;
        let frontend = serve_upstreams(&[&url, &healthy.url], &["--policy", "round-robin"]).await;
        for _ in 0..30 {
            frontend.chat(&body).await.ok();
        }
        let count = broken.requests.lock().expect("not poisoned").len();
        assert!((1..=max_requests).contains(&count), "{answer}: {count}");
        let workers = get(&frontend, "/workers").await.ok();
        let breaker = &workers["workers"][0]["breaker"];
        assert_ne!(breaker["state"], "closed", "{workers}");
        assert_eq!(breaker["reason"], reason);
        let (alone, url) = MockServer::start(answer).await;
        let frontend = serve_upstreams(&[&url], &[]).await;
        let refused = frontend.chat(&body).await;
        let status = if answer.contains(" 500 ") || answer.contains(" 401 ") {
            "502"
        } else {
            &answer[9..12]
        };
        assert_eq!(refused.status.to_string(), status, "{}", refused.text);
        assert!(
            refused.text.contains(reason) && !refused.text.contains("127.0.0.1"),
            "{}",
            refused.text
        );
        if answer.contains("retry-after") {
            let seconds: u64 = refused.header("retry-after").parse().expect("seconds");
            assert!((40..=50).contains(&seconds), "{seconds}");
            assert_eq!(
                get(&frontend, "/ready").await.status,
                503,
                "a worker with an open breaker is not ready"
            );
        }
        drop(alone);
    }
}

/// Starts a server with a list of models. Returns its URL.
async fn serve_models(ids: &[&str]) -> String {
    let models: Vec<Value> = ids.iter().map(|id| json!({"id": id})).collect();
    let models = json!({"data": models}).to_string();
    let list = axum::routing::get(async move || models);
    serve(axum::Router::new().route("/v1/models", list)).await.replace("vllm+", "")
}

#[tokio::test]
async fn server_of_other_models_is_reported_or_refused() {
    let ours = serve_models(&["other", "m"]).await;
    let one = serve_models(&["llama"]).await;
    let several = serve_models(&["llama", "qwen"]).await;
    let model = demo_model().display().to_string();
    let mut args = vec![model.as_str(), "--served-model-name", "m"];
    let lacking = format!("{one},model=gemma");
    for upstream in [&ours, &one, &several, &lacking] {
        args.extend(["--upstream", upstream]);
    }
    let frontend = Server::start(&args);
    frontend.wait_ready(2, TIMEOUT).await;
    let cause = frontend.wait_for_log_line("none of them named m or ");
    assert!(
        cause.contains(&several)
            && cause.contains("serves llama, qwen")
            && cause.contains("model=NAME"),
        "{cause}"
    );
    let cause = frontend.wait_for_log_line("does not serve model=gemma");
    assert!(cause.contains(&one), "{cause}");
    let warning = frontend.wait_for_log_line("model has another name");
    assert!(warning.contains(&one) && warning.contains("llama"), "{warning}");
    let workers =
        frontend.client.get(format!("{}/workers", frontend.url)).send().await.expect("workers");
    let workers: Value = serde_json::from_str(&workers.text().await.expect("text")).expect("JSON");
    let runs = |at: usize| workers["workers"][at]["runs"].as_str().unwrap_or_default().to_owned();
    assert_eq!(
        (runs(0).contains("model named"), runs(1).ends_with("model named llama")),
        (false, true),
        "{workers}"
    );
    assert_eq!(workers["workers"].as_array().map(Vec::len), Some(2), "{workers}");
}

/// Returns the routes of a mock `vllm serve` about the server itself.
fn vllm_serve_routes() -> axum::Router {
    use axum::routing::get;
    let models = json!({"data": [{"id": "m", "parent": null, "max_model_len": 4096}]}).to_string();
    let metrics = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000\"} 1.0\n";
    axum::Router::new()
        .route("/version", get(async || "{\"version\": \"0.33.0\"}"))
        .route("/v1/models", get(async move || models))
        .route("/metrics", get(async move || metrics))
}

/// Serves `app` on a free port. Returns its address as a value for `--upstream`.
async fn serve(app: axum::Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("vllm+http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

/// Starts a mock `vllm serve` that counts two tokens in every prompt. Returns its address.
async fn serve_wrong_vllm() -> String {
    use axum::routing::post;
    let choice = json!({
        "index": 0,
        "token_ids": [40],
        "finish_reason": "length",
        "logprobs": null,
        "stop_reason": null,
    });
    let event = json!({"choices": [choice], "prompt_token_ids": [1, 2]});
    let generate = async move |body: String| {
        if body.contains("token_ids") {
            Ok(format!("data: {event}\n\ndata: [DONE]\n\n"))
        } else {
            Err(axum::http::StatusCode::BAD_REQUEST)
        }
    };
    let chat = async || {
        json!({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}).to_string()
    };
    serve(
        vllm_serve_routes()
            .route("/inference/v1/generate", post(generate))
            .route("/v1/chat/completions", post(chat)),
    )
    .await
}

/// Starts a mock `vllm serve` that forwards requests to `target`. Returns the bodies of its
/// requests and its address.
async fn serve_vllm_proxy(target: &Server) -> (Arc<Mutex<Vec<String>>>, String) {
    use axum::response::IntoResponse;
    let requests = Arc::new(Mutex::new(Vec::new()));
    let client = target.client.clone();
    let url = format!("{}/v1/chat/completions", target.url);
    let recorded = requests.clone();
    let chat = async move |body: String| {
        recorded.lock().expect("not poisoned").push(body.clone());
        let body = body.replace("\"model\":\"m\"", "\"model\":\"its/own name\"");
        let request = client.post(url).header("content-type", "application/json").body(body);
        let answer = request.send().await.expect("an answer");
        let status = axum::http::StatusCode::from_u16(answer.status().as_u16()).expect("a status");
        (status, answer.text().await.expect("text")).into_response()
    };
    let app = vllm_serve_routes().route("/v1/chat/completions", axum::routing::post(chat));
    (requests, serve(app).await)
}

#[tokio::test]
async fn images_for_vllm_get_the_frontends_uuids() {
    let target = start_other_server().await;
    let (requests, url) = serve_vllm_proxy(&target).await;
    let frontend = serve_upstreams(&[&format!("{url},mode=chat")], &[]).await;
    let take_request = || requests.lock().expect("not poisoned").pop().expect("a request");
    let mut names = Vec::new();
    for name in ["dawn", "dusk", "dawn"] {
        let mut body = chat_body(name, &json!({}));
        body["messages"][0]["content"][0]["uuid"] = "a-clients-own".into();
        let answer = frontend.chat(&body).await;
        let cached =
            answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        let predicted: u64 = answer
            .header("x-chiasm-overlap")
            .split('/')
            .next()
            .expect("X")
            .parse()
            .expect("a number");
        assert_eq!(predicted, cached / 16, "{name}");
        let mut sent: Value = serde_json::from_str(&take_request()).expect("JSON");
        names.push(
            sent["messages"][0]["content"][0]["uuid"].take().as_str().expect("a name").to_owned(),
        );
        body["messages"][0]["content"][0]["uuid"] = Value::Null;
        assert_eq!(sent, body, "everything else is unchanged");
    }
    assert!(names[0] == names[2] && names[0] != names[1] && names[0].len() == 64, "{names:?}");

    // A request without images is forwarded byte for byte.
    let body =
        r#"{"max_tokens": 2,   "model":"m", "messages": [{"role": "user", "content": "hi"}]}"#;
    let request = frontend.client.post(format!("{}/v1/chat/completions", frontend.url)).body(body);
    Answer::read(
        request.header("content-type", "application/json").send().await.expect("an answer"),
    )
    .await
    .ok();
    assert_eq!(take_request(), body);
    // The server refuses unknown fields itself. Such requests contain no names of clients either.
    assert_eq!(
        frontend.chat(&chat_body("dawn", &json!({"nonsense": 1}))).await.refused(400),
        "nonsense"
    );
    let mut odd = chat_body("dawn", &json!({"nonsense": 1}));
    odd["messages"][0]["content"][0]["image_url"]["uuid"] = "a-clients-own".into();
    take_request();
    assert_eq!(frontend.chat(&odd).await.refused(400), "nonsense");
    assert!(!take_request().contains("a-clients-own"));
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
}

/// Returns an image part with a name and without an image.
fn only_named(uuid: &str) -> Value {
    json!({"type": "image_url", "image_url": null, "uuid": uuid})
}

/// Returns an image part with a name.
fn with_name(name: &str, uuid: &str) -> Value {
    let mut part = picture(name);
    part["uuid"] = uuid.into();
    part
}

/// Sends a request about one image, with an API key.
async fn send_image(server: &Server, key: &str, part: &Value) -> Answer {
    let content = json!([part, {"type": "text", "text": "what is in this picture?"}]);
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 60});
    let request =
        server.client.post(format!("{}/v1/chat/completions", server.url)).body(body.to_string());
    let request = request.header("content-type", "application/json").bearer_auth(key);
    Answer::read(request.send().await.expect("an answer")).await
}

/// Returns a simulated engine's description of the image, without the number of cached tokens.
fn description(answer: &Answer) -> String {
    let text = answer.ok()["choices"][0]["message"]["content"].take();
    text.as_str().and_then(|text| text.split(';').next()).expect("text").to_owned()
}

#[tokio::test]
async fn media_names_are_private_to_each_client() {
    let target = start_other_server().await;
    let (requests, url) = serve_vllm_proxy(&target).await;
    for url in [url.replace("vllm+", ""), format!("{url},mode=chat")] {
        let frontend = serve_upstreams(&[&url], &["--api-key", "k1", "--api-key", "k2"]).await;
        let first = send_image(&frontend, "k1", &with_name("dawn", "logo")).await;
        let other = send_image(&frontend, "k2", &only_named("logo")).await;
        assert_eq!(other.refused(400), "messages[0].content[0].image_url", "{url}");
        assert_ne!(
            description(&send_image(&frontend, "k2", &with_name("dusk", "logo")).await),
            description(&first),
            "{url}"
        );
        assert_eq!(
            description(&send_image(&frontend, "k1", &only_named("logo")).await),
            description(&first),
            "{url}"
        );
        let requests = std::mem::take(&mut *requests.lock().expect("not poisoned"));
        assert!(
            requests.len() == 3 && requests.iter().all(|body| !body.contains("logo")),
            "{url}: {}",
            requests.len()
        );
    }
}

#[tokio::test]
async fn named_image_works_on_all_workers_of_a_mixed_fleet() {
    let server = start_other_server().await;
    let model = demo_model().display().to_string();
    let mixed = ["--sim", "1", "--upstream", &server.url, "--policy", "round-robin"];
    let frontend =
        Server::start(&[&[model.as_str(), "--served-model-name", "m"], &mixed[..]].concat());
    frontend.wait_ready(2, TIMEOUT).await;
    let mut homes = Vec::new();
    for (at, name) in ["dawn", "dusk", "night", "snow"].into_iter().enumerate() {
        let shown = send_image(&frontend, "k", &with_name(name, name)).await;
        // The varying number of requests makes both workers get one with a name only.
        for _ in 0..1 + at % 2 {
            let named = send_image(&frontend, "k", &only_named(name)).await;
            assert_eq!(description(&named), description(&shown), "{name}");
            homes.push(named.header("x-chiasm-worker"));
        }
    }
    homes.sort();
    homes.dedup();
    assert_eq!(homes.len(), 2, "{homes:?}");
}

#[tokio::test]
async fn image_without_type_is_predicted_like_one_with() {
    let target = start_other_server().await;
    let (_, url) = serve_vllm_proxy(&target).await;
    let frontend = serve_upstreams(&[&format!("{url},mode=chat")], &[]).await;
    for is_typed in [false, false, true, false] {
        let mut part = picture("dawn");
        if !is_typed {
            part.as_object_mut().expect("an object").remove("type");
        }
        let answer = send_image(&frontend, "k", &part).await;
        let cached =
            answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        let overlap = answer.header("x-chiasm-overlap");
        let predicted: u64 = overlap.split('/').next().expect("X").parse().expect("a number");
        assert_eq!(predicted, cached / 16, "{overlap}");
    }
}

#[tokio::test]
async fn requests_to_server_without_load_metrics_are_counted() {
    let (_, silent) = MockServer::start("").await;
    let frontend = serve_upstreams(&[&silent], &[]).await;
    let wait_running = async |count: f64| {
        let has_count = async || frontend.metric("chiasm_worker_running_requests").await == count;
        wait_for("requests to be counted", TIMEOUT, has_count).await;
    };
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let first = frontend.chat(&body);
    let second = frontend.chat(&body);
    let both = futures_util::future::join(first, second);
    tokio::select! {
        _ = both => panic!("the server never answers"),
        () = wait_running(2.0) => {}
    }
    // The clients have disconnected.
    wait_running(0.0).await;
}

#[tokio::test]
async fn image_by_url_counts_as_the_same_work_as_inline() {
    let (_, silent) = MockServer::start("").await;
    let mut pending = Vec::new();
    for part in [
        picture("dawn"),
        json!({"type": "image_url", "image_url": {"url": "http://192.0.2.1/dawn.jpg"}}),
    ] {
        let frontend = serve_upstreams(&[&silent], &[]).await;
        let tokens = std::cell::Cell::new(0.0);
        let has_work = async || {
            tokens.set(frontend.metric("chiasm_worker_pending_tokens").await);
            tokens.get() > 0.0
        };
        tokio::select! {
            _ = send_image(&frontend, "k", &part) => panic!("the server never answers"),
            _ = wait_for("work", TIMEOUT, has_work) => {}
        }
        pending.push(tokens.get());
    }
    assert!(pending[0] > 1000.0 && (pending[0] - pending[1]).abs() < 20.0, "{pending:?}");
}

#[tokio::test]
async fn server_with_unexpected_prompts_is_logged_once() {
    let frontend = serve_upstreams(&[&serve_wrong_vllm().await], &[]).await;
    let distrusted = async || frontend.metric("chiasm_distrusted_workers_total").await;
    let text =
        json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
    frontend.chat(&text).await.ok();
    assert_eq!(distrusted().await, 0.0, "prompts without items are not compared");
    for _ in 0..3 {
        frontend.chat(&chat_body("dawn", &json!({"max_tokens": 1}))).await.ok();
    }
    wait_for("the server to be distrusted", TIMEOUT, async || distrusted().await == 1.0).await;
    frontend.wait_for_log("were expected");
    assert_eq!(frontend.count_logged("were expected"), 1);

    let frontend =
        serve_upstreams(&[&format!("{},mode=chat", serve_wrong_vllm().await)], &[]).await;
    for _ in 0..3 {
        frontend.chat(&chat_body("dawn", &json!({"max_tokens": 1}))).await.ok();
    }
    let distrusted = async || frontend.metric("chiasm_distrusted_workers_total").await == 1.0;
    wait_for("the server to be distrusted", TIMEOUT, distrusted).await;
    frontend.wait_for_log("the server counts 2 tokens");
    assert_eq!(frontend.count_logged("the server counts 2 tokens in a prompt"), 1);
}

/// Uses an engine, which gets tokens, and a server, which gets messages. Each keeps its own
/// prompts, and replaces the other for requests that only one of them supports.
#[tokio::test]
async fn engines_share_the_work_with_servers() {
    let mut server = start_other_server().await;
    let model = demo_model().display().to_string();
    let frontend = Server::start(&[
        &model,
        "--served-model-name",
        "m",
        "--sim",
        "1",
        "--upstream",
        &server.url,
    ]);
    frontend.wait_ready(2, TIMEOUT).await;
    let frontend = &frontend;
    let long = |name: &str, max_tokens: u32| {
        let words = format!("{name} and what comes after ").repeat(200);
        json!({
            "model": "m",
            "messages": [{"role": "user", "content": words}],
            "max_tokens": max_tokens,
            "temperature": 0,
        })
    };
    let names = ["one", "two", "three", "four", "five", "six"];
    // Sent at once, so that the load spreads over both.
    let answers = join_all(names.map(|name| async move { frontend.chat(&long(name, 64)).await }));
    let home = |answer: &Answer| {
        (answer.header("x-chiasm-worker"), answer.ok()["model"] == "its/own name")
    };
    let homes = names.iter().zip(answers.await);
    let homes: Vec<(&str, String, bool)> =
        homes.map(|(name, answer)| (*name, home(&answer).0, home(&answer).1)).collect();
    assert!(homes.iter().any(|home| home.2) && homes.iter().any(|home| !home.2), "{homes:?}");
    for (name, home, _) in &homes {
        let answer = frontend.chat(&long(name, 7)).await;
        answer.ok();
        assert_eq!(&answer.header("x-chiasm-worker"), home, "{name}");
        assert!(!answer.header("x-chiasm-overlap").starts_with("0/"), "{name}");
    }
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let counted = frontend.post("/v1/messages/count_tokens", &body).await;
    assert!(counted.ok()["input_tokens"].as_u64().expect("a number") > 1);
    let stream = frontend.chat(&chat_body("dawn", &json!({"stream": true}))).await;
    assert!(stream.text.ends_with("data: [DONE]\n\n"), "{}", stream.text);

    // Requests with unknown fields go to the server, which refuses them.
    let odd = frontend.chat(&chat_body("dawn", &json!({"nonsense": 1}))).await;
    assert_eq!(
        (odd.refused(400), odd.header("x-chiasm-worker")),
        ("nonsense".to_owned(), server_worker(&homes))
    );
    server.signal_and_wait("KILL");
    for (name, ..) in &homes {
        assert_eq!(frontend.chat(&long(name, 7)).await.ok()["model"], "m", "{name}");
    }
    assert_eq!(frontend.chat(&chat_body("dawn", &json!({}))).await.ok()["model"], "m");
    wait_for("the removal of the server", TIMEOUT, async || frontend.ready_workers().await == 1)
        .await;
    assert_eq!(
        frontend.chat(&chat_body("dawn", &json!({"nonsense": 1}))).await.refused(400),
        "nonsense"
    );
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
}

/// Returns the worker id of the server.
fn server_worker(homes: &[(&str, String, bool)]) -> String {
    homes.iter().find(|home| home.2).map(|home| home.1.clone()).unwrap_or_default()
}

/// A fleet of an engine in a separate process, which needs seconds per prompt, and a mock server
/// that gets messages.
struct MixedFleet {
    frontend: Server,
    address: String,
    engine: Process,
    /// The engine's log, with a line for each request that it got.
    request_log: NamedTempFile,
    mock: MockServer,
}

impl MixedFleet {
    /// An answer for the mock server.
    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\
                          content-length: 18\r\nconnection: close\r\n\r\n{\"model\":\"theirs\"}";

    async fn start(answer: &'static str, flags: &[&str]) -> Self {
        let (mock, url) = MockServer::start(answer).await;
        let model = demo_model().display().to_string();
        let address = format!("tcp://127.0.0.1:{}", free_port());
        let args = [&model, "--served-model-name", "m", "--attach", &address, "--upstream", &url];
        let frontend = Server::start(&[&args[..], &["--policy", "round-robin"], flags].concat());
        let request_log = NamedTempFile::new().expect("a file");
        let engine = Self::engine(&address, &request_log);
        frontend.wait_ready(2, TIMEOUT).await;
        Self { frontend, address, engine, request_log, mock }
    }

    fn engine(address: &str, request_log: &NamedTempFile) -> Process {
        let model = demo_model().display().to_string();
        let log = request_log.path().display().to_string();
        let args =
            ["sim-engine", "--handshake", address, "--model", &model, "--sim-request-log", &log];
        let slow = ["--sim-prefill-rate", "2"];
        Process(
            chiasm(&args)
                .args(slow)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("an engine"),
        )
    }

    /// Waits until a killed engine is removed, and starts a new one at its address.
    async fn restart_engine(&mut self) {
        let is_removed = async || self.frontend.ready_workers().await == 1;
        wait_for("the removal of the engine", TIMEOUT, is_removed).await;
        self.request_log = NamedTempFile::new().expect("a file");
        self.engine = Self::engine(&self.address, &self.request_log);
        self.frontend.wait_ready(2, TIMEOUT).await;
    }

    /// Returns the number of the mock server's requests.
    fn server_requests(&self) -> usize {
        self.mock.requests.lock().expect("not poisoned").len()
    }

    /// Sends a request until the engine gets it, then sends `signal` to the engine. Returns the
    /// answer.
    async fn answer_after_signal(&mut self, signal: &str, path: &str, body: &Value) -> Answer {
        let mut answer = String::new();
        for _ in 0..8 {
            let url = format!("{}{path}", self.frontend.url);
            let body = body.to_string();
            let request = self
                .frontend
                .client
                .post(url)
                .header("content-type", "application/json")
                .body(body);
            let pending = tokio::spawn(async move {
                Answer::read(request.send().await.expect("an answer")).await
            });
            let engine_has_it =
                || std::fs::metadata(self.request_log.path()).expect("a file").len() > 0;
            let is_routed = async || pending.is_finished() || engine_has_it();
            wait_for("the request to be routed", TIMEOUT, is_routed).await;
            if engine_has_it() {
                send_signal(self.engine.0.id(), signal);
                return pending.await.expect("an answer");
            }
            answer = pending.await.expect("an answer").text;
        }
        panic!("the engine did not get the request: {answer}");
    }

    async fn retries(&self, cause: &str) -> f64 {
        self.frontend.metric(&format!("chiasm_retries_total{{cause=\"{cause}\"}}")).await
    }
}

#[tokio::test]
async fn request_of_dead_engine_moves_to_a_server() {
    let mut fleet = MixedFleet::start(MixedFleet::ANSWER, &["--max-requests", "1"]).await;
    let hi = json!([{"role": "user", "content": "hi"}]);
    let body = json!({"model": "m", "messages": hi, "stream": true, "user": "it's me"});
    let answer = fleet.answer_after_signal("KILL", "/v1/chat/completions", &body).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, r#"{"model":"theirs"}"#));
    let sent =
        fleet.mock.requests.lock().expect("not poisoned").last().cloned().unwrap_or_default();
    assert!(sent.ends_with(&body.to_string().replace("\"m\"", "\"theirs\"")), "{sent}");
    assert_eq!((fleet.retries("lost").await, fleet.retries("over_budget").await), (1.0, 0.0));
    assert!(
        fleet.frontend.wait_for_log_line("moves=1").contains(&answer.header("x-chiasm-worker"))
    );
    let lines =
        (fleet.frontend.count_logged("endpoint=\"chat\""), fleet.frontend.count_logged("moves=1"));
    assert_eq!(lines, (fleet.server_requests(), 1), "one line per request");

    // The retry budget is used up: its initial value is `--max-requests`, and few requests have
    // added to it since.
    fleet.restart_engine().await;
    let body = json!({"model": "m", "max_tokens": 6, "messages": hi});
    let answer = fleet.answer_after_signal("KILL", "/v1/messages", &body).await;
    assert_eq!(answer.status, 502, "{}", answer.text);
    assert_eq!((fleet.retries("lost").await, fleet.retries("over_budget").await), (1.0, 1.0));
}

#[tokio::test]
async fn request_moves_at_most_twice() {
    const FAILURE: &str =
        "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\nconnection: close\r\n\r\nboom";
    let mut fleet = MixedFleet::start(FAILURE, &[]).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let answer = fleet.answer_after_signal("KILL", "/v1/chat/completions", &body).await;
    assert!(answer.status == 502 || answer.status == 503, "{}", answer.text);
    assert_eq!(
        (fleet.retries("lost").await, fleet.server_requests()),
        (2.0, 1),
        "one attempt on the engine and one on the server"
    );
}

#[tokio::test]
async fn request_of_hung_engine_moves_to_a_server() {
    let mut fleet = MixedFleet::start(
        MixedFleet::ANSWER,
        &["--engine-timeout", "0.5", "--engine-hang-timeout", "1.5"],
    )
    .await;
    let answer = fleet
        .answer_after_signal("STOP", "/v1/completions", &json!({"model": "m", "prompt": "hello"}))
        .await;
    assert_eq!(answer.ok()["model"], "theirs");
    fleet.frontend.wait_for_log("reason=the worker hangs");
    assert_eq!(fleet.retries("lost").await, 1.0);
}

/// A mock `trtllm-serve`, modelled on TensorRT-LLM's sources.
///
/// It keeps all blocks of 32 tokens and reports each of them once. Images have hashes of the mock's
/// own, which are listed with each block that contains a part of them. In place of an image's
/// tokens, blocks have a number that is not a token.
#[derive(Default)]
struct MockTrtllm {
    events: Vec<Value>,
    next_event_id: u64,
    /// The hashes of blocks, by the parent's hash, their tokens and the images in them.
    blocks: HashMap<(u64, Vec<u64>, String), u64>,
}

impl MockTrtllm {
    /// The image token of the demo's model.
    const IMAGE_TOKEN: u64 = 446;
    /// The number that Qwen2-VL has in TensorRT-LLM in place of image tokens: one more than the
    /// vocabulary.
    const IMAGE_FILLER: u64 = 449;

    fn push_event(&mut self, data: &Value) {
        self.events
            .push(json!({"event_id": self.next_event_id, "data": data, "window_size": 4096}));
        self.next_event_id += 1;
    }

    /// Stores a prompt with these hashes of its images. Returns the number of its tokens that were
    /// cached.
    fn store(&mut self, tokens: &[u64], images: &[String]) -> usize {
        let is_image_token = |token: &u64| *token == Self::IMAGE_TOKEN;
        let runs = tokens.chunk_by(|left, right| is_image_token(left) == is_image_token(right));
        let runs = runs.scan(0, |end, run| {
            *end += run.len();
            Some((*end - run.len()..*end, run[0] == Self::IMAGE_TOKEN))
        });
        let images: Vec<_> =
            runs.filter(|(_, is_image)| *is_image).map(|(run, _)| run).zip(images).collect();
        let keys = |begin: usize| {
            let inside =
                images.iter().filter(move |(run, _)| run.start < begin + 32 && run.end > begin);
            let key = move |(run, hash): &(std::ops::Range<usize>, &String)| {
                let offset = begin.saturating_sub(run.start);
                json!({"type": "mm_key", "hash": hash, "start_offset": offset})
            };
            Value::from(inside.map(key).collect::<Vec<_>>())
        };
        let tokens: Vec<u64> = tokens
            .iter()
            .map(|token| if *token == Self::IMAGE_TOKEN { Self::IMAGE_FILLER } else { *token })
            .collect();
        let mut parent = 0;
        let mut cached = 0;
        let mut new = Vec::new();
        let mut first_parent = Value::Null;
        for (chunk, begin) in tokens.chunks(32).zip((0..).step_by(32)) {
            let keys = keys(begin);
            let key = (parent, chunk.to_vec(), keys.to_string());
            let hash = self.blocks.len() as u64 + 1;
            let is_full = chunk.len() == 32;
            match self.blocks.get(&key) {
                Some(known) if new.is_empty() && is_full => {
                    parent = *known;
                    cached += 32;
                }
                _ => {
                    if new.is_empty() && parent > 0 {
                        first_parent = parent.into();
                    }
                    self.blocks.insert(key, hash);
                    let token =
                        |id| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0});
                    let tokens: Vec<Value> = chunk.iter().map(token).collect();
                    new.push(json!({
                        "type": "stored_block",
                        "block_hash": hash,
                        "tokens": tokens,
                        "cache_level": 0,
                        "priority": 35,
                        "mm_keys": keys,
                    }));
                    parent = hash;
                }
            }
        }
        if !new.is_empty() {
            self.push_event(&json!({"type": "stored", "parent_hash": first_parent, "blocks": new}));
        }
        cached.min(tokens.len() - 1)
    }

    /// Returns the mock's hashes of a request's images.
    fn image_hashes(body: &Value) -> Vec<String> {
        use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
        let messages = body["messages"].as_array().into_iter().flatten();
        let parts = messages.filter_map(|message| message["content"].as_array()).flatten();
        let urls = parts.filter_map(|part| part["image_url"]["url"].as_str());
        let hash =
            |url| format!("{:064x}", BuildHasherDefault::<DefaultHasher>::default().hash_one(url));
        urls.map(hash).collect()
    }

    /// Starts a mock server, which tokenizes prompts through `tokenizer`. Returns its state and its
    /// address.
    async fn start(tokenizer: &Server) -> (Arc<Mutex<Self>>, String) {
        use axum::response::IntoResponse;
        use axum::routing::{get, post};
        let state = Arc::new(Mutex::new(Self::default()));
        state
            .lock()
            .expect("not poisoned")
            .push_event(&json!({"type": "created", "num_blocks_per_cache_level": [1000, 0]}));
        let client = tokenizer.client.clone();
        let url = tokenizer.url.clone();
        let chat_state = state.clone();
        let events_state = state.clone();
        let chat = async move |body: String| {
            let mut body: Value = serde_json::from_str(&body).expect("JSON");
            // TensorRT-LLM refuses unknown fields.
            if body.to_string().contains("uuid") {
                return (
                    axum::http::StatusCode::BAD_REQUEST,
                    "{\"message\": \"extra_forbidden\"}".to_owned(),
                )
                    .into_response();
            }
            body = json!({"messages": body["messages"]});
            let request =
                client.post(format!("{url}/tokenize")).header("content-type", "application/json");
            let answer = request.body(body.to_string()).send().await.expect("an answer");
            let text = answer.text().await.expect("text");
            let tokenized: Value = serde_json::from_str(&text).expect("JSON");
            let tokens: Vec<u64> = tokenized["tokens"]
                .as_array()
                .expect("tokens")
                .iter()
                .filter_map(Value::as_u64)
                .collect();
            let images = Self::image_hashes(&body);
            let cached = chat_state.lock().expect("not poisoned").store(&tokens, &images);
            let usage = json!({
                "prompt_tokens": tokens.len(),
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": cached},
            });
            json!({"object": "chat.completion", "choices": [], "usage": usage})
                .to_string()
                .into_response()
        };
        let events = async move || {
            let events = std::mem::take(&mut events_state.lock().expect("not poisoned").events);
            Value::from(events).to_string()
        };
        let app = axum::Router::new()
            .route("/version", get(async || "{\"version\": \"1.3.0\"}"))
            .route(
                "/v1/models",
                get(async || "{\"data\": [{\"id\": \"theirs\", \"object\": \"model\"}]}"),
            )
            .route("/kv_cache_events", post(events))
            .route("/v1/chat/completions", post(chat));
        (state, serve(app).await.replace("vllm+", "trtllm+"))
    }
}

#[tokio::test]
async fn trtllm_events_give_exact_predictions() {
    let tokenizer = start_other_server().await;
    let (first_state, first) = MockTrtllm::start(&tokenizer).await;
    let (_second_state, second) = MockTrtllm::start(&tokenizer).await;
    let frontend = serve_upstreams(&[&first, &second], &[]).await;
    // Returns the state of knowledge of both workers, and the number of their known blocks.
    let knowledge = async || {
        let workers =
            frontend.client.get(format!("{}/workers", frontend.url)).send().await.expect("workers");
        let workers: Value =
            serde_json::from_str(&workers.text().await.expect("text")).expect("JSON");
        let state = |index: usize| {
            workers["workers"][index]["knowledge"].as_str().unwrap_or_default().to_owned()
        };
        assert!(
            workers["workers"][0]["runs"].as_str().is_some_and(|runs| runs.contains("unverified")),
            "{workers}"
        );
        let list = workers["workers"].as_array().expect("a list");
        let blocks = list.iter().filter_map(|worker| worker["known_blocks"].as_u64()).sum::<u64>();
        (state(0), state(1), blocks)
    };
    // Sends a request and waits for its events. Returns its worker, the number of cached blocks,
    // and the number of all blocks.
    let send = async |content: Value| {
        let messages = json!([{"role": "user", "content": content}]);
        let body = json!({"model": "m", "messages": messages, "max_tokens": 1});
        let (.., known) = knowledge().await;
        let answer = frontend.chat(&body).await;
        let cached = answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .expect("a count");
        let overlap = answer.header("x-chiasm-overlap");
        let (held, all) = overlap.split_once('/').expect("X/Y");
        let [held, all] = [held, all].map(|blocks| blocks.parse::<u64>().expect("a number"));
        assert_eq!(held, cached / 32, "{overlap}: {content}");
        wait_for("the request's events", TIMEOUT, async || {
            knowledge().await.2 >= known + all - held
        })
        .await;
        (answer.header("x-chiasm-worker"), held, all)
    };
    let mut homes = HashMap::new();
    for (round, text) in (0..3).flat_map(|round| ["a", "b", "c"].map(|text| (round, text))) {
        let (home, held, all) = send(format!("{text} word after word ").repeat(20).into()).await;
        assert_eq!(
            *homes.entry(text).or_insert_with(|| home.clone()),
            home,
            "{text}, round {round}"
        );
        assert!(all > 2 && (round > 0) == (held == all), "{text}, round {round}: {held}/{all}");
    }
    // Two images of the same size with equal, then with different words: each is known by its hash
    // after its first prompt.
    for (round, name) in (0..3).flat_map(|round| ["dawn", "night"].map(|name| (round, name))) {
        let words = format!(
            "{}{}",
            "what is in this picture? ".repeat(8),
            ["here", "and where", "at what time"][round].repeat(9)
        );
        let (home, held, all) = send(json!([picture(name), {"type": "text", "text": words}])).await;
        assert_eq!(
            *homes.entry(name).or_insert_with(|| home.clone()),
            home,
            "{name}, round {round}"
        );
        assert!(
            if round == 0 { held == 0 } else { held > 3 && held < all },
            "{name}, round {round}: {held}/{all}"
        );
    }
    let (first_knowledge, second_knowledge, _) = knowledge().await;
    assert_eq!((first_knowledge.as_str(), second_knowledge.as_str()), ("exact", "exact"));
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);

    // An event is lost, as with a second reader or a full buffer.
    {
        let mut state = first_state.lock().expect("not poisoned");
        state.next_event_id += 1;
        state.push_event(&json!({"type": "removed", "block_hashes": []}));
    }
    wait_for("approximate knowledge", TIMEOUT, async || knowledge().await.0 == "approximate").await;
    assert_eq!(knowledge().await.1, "exact");
}
