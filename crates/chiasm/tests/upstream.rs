//! Servers of OpenAI's API that somebody else runs, which are given requests as they come.

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

const SOON: Duration = Duration::from_secs(20);

/// A server of one simulated engine, as somebody else would run it.
async fn other() -> Server {
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--served-model-name", "its/own name", "--sim", "1"]);
    server.wait_ready(1, SOON).await;
    server
}

/// A frontend before these addresses.
async fn before(upstreams: &[&str], flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args = vec![model.as_str(), "--served-model-name", "m"];
    for upstream in upstreams {
        args.extend(["--upstream", upstream]);
    }
    let frontend = Server::start(&[&args, flags].concat());
    frontend.wait_ready(upstreams.len() as u64, SOON).await;
    frontend
}

fn picture(name: &str) -> Value {
    let bytes = std::fs::read(format!("{}/assets/images/{name}.jpg", env!("CARGO_MANIFEST_DIR")))
        .expect("a picture");
    json!({"type": "image_url", "image_url": {"url": format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))}})
}

fn ask(name: &str, more: &Value) -> Value {
    let content = json!([picture(name), {"type": "text", "text": "what is in this picture?"}]);
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0});
    body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    body
}

#[tokio::test]
async fn what_a_server_was_sent_brings_more_of_it_there() {
    let others = [other().await, other().await];
    let frontend = before(&[&others[0].url, &format!("{}/v1", others[1].url)], &[]).await;
    let went =
        |answer: &Answer| (answer.header("x-chiasm-worker"), answer.header("x-chiasm-overlap"));
    let mut homes = Vec::new();
    for name in ["dawn", "dusk", "night", "snow"] {
        let answer = frontend.chat(&ask(name, &json!({}))).await;
        assert_eq!(answer.ok()["model"], "its/own name", "the answer is the server's own");
        let (home, overlap) = went(&answer);
        assert!(overlap.starts_with("0/"), "{overlap}");
        homes.push((name, home));
    }
    for (name, home) in &homes {
        let answer = frontend.chat(&ask(name, &json!({"max_tokens": 7}))).await;
        answer.ok();
        let (there, overlap) = went(&answer);
        let (held, all) = overlap.split_once('/').expect("X/Y");
        let [held, all] = [held, all].map(|blocks| blocks.parse::<u32>().expect("a number"));
        // The last block is not full.
        assert_eq!((&there, held), (home, all - 1), "{name} was there: {overlap}");
    }
    assert!(
        homes.iter().any(|(_, home)| home != &homes[0].1),
        "both have something to do: {homes:?}"
    );
    assert!(
        frontend.metric("chiasm_completion_tokens_total").await >= 4.0 * 13.0,
        "usage is read out of the answers"
    );
    // The live page tells why the first one went where it went, and what came of it.
    let why = frontend
        .client
        .get(format!("{}/ui/requests/0", frontend.url))
        .send()
        .await
        .expect("an answer");
    let why: Value = serde_json::from_str(&why.text().await.expect("text")).expect("JSON");
    assert_eq!(
        (why["candidates"].as_array().map(Vec::len), &why["request"]["worker"]),
        (Some(2), &json!(homes[0].1))
    );
    let outcome = &why["request"]["outcome"];
    assert_eq!(
        (&outcome["status"], &outcome["found"]["completion_tokens"]),
        (&json!(200), &json!(6))
    );

    // A stream is passed on as it is.
    let stream = frontend
        .chat(&ask("dawn", &json!({"stream": true, "stream_options": {"include_usage": true}})))
        .await;
    assert_eq!(stream.header("content-type"), "text/event-stream; charset=utf-8");
    assert!(
        stream.text.contains("\"model\":\"its/own name\"")
            && stream.text.ends_with("data: [DONE]\n\n"),
        "{}",
        stream.text
    );
    // What is wrong is the server's to say.
    assert_eq!(frontend.chat(&ask("dawn", &json!({"nonsense": 1}))).await.refused(400), "nonsense");
    assert_eq!(frontend.chat(&json!({"model": "n"})).await.status, 404);
    let body = json!({"model": "m", "prompt": "hello", "max_tokens": 2});
    frontend.post("/v1/completions", &body).await.ok();
    let body =
        json!({"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    assert_eq!(frontend.post("/v1/messages", &body).await.ok()["type"], "message");
}

#[tokio::test]
async fn a_server_that_dies_is_replaced_by_another() {
    let mut others = [other().await, other().await];
    let frontend = before(&[&others[0].url, &others[1].url], &[]).await;
    let answer = frontend.chat(&ask("dawn", &json!({}))).await;
    answer.ok();
    let home = usize::from(answer.header("x-chiasm-worker") == "worker_1");
    others[home].end_by("KILL");
    for _ in 0..3 {
        let answer = frontend.chat(&ask("dawn", &json!({}))).await;
        answer.ok();
        assert_eq!(answer.header("x-chiasm-worker"), format!("worker_{}", 1 - home));
    }
    wait_for("the server to be let go", SOON, async || frontend.ready_workers().await == 1).await;
    others[1 - home].end_by("KILL");
    assert_eq!(frontend.chat(&ask("dawn", &json!({}))).await.status, 503);
}

/// What a stand-in was sent, and what it says.
#[derive(Clone, Default)]
struct Stand {
    heard: Arc<Mutex<Vec<String>>>,
    answer: &'static str,
}

impl Stand {
    /// A server that gives one answer to each request but for its models, and its address. An empty
    /// answer never comes.
    async fn start(answer: &'static str) -> (Self, String) {
        let stand = Self { answer, ..Self::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let serving = stand.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serving.clone().serve(stream));
            }
        });
        (stand, url)
    }

    async fn serve(self, mut stream: TcpStream) {
        let mut heard = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&heard).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head
                    .lines()
                    .find_map(|line| line.strip_prefix("content-length: "))
                    .unwrap_or("0");
                if body.len() >= length.parse().expect("a number") {
                    break;
                }
            }
            if stream.read_buf(&mut heard).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let heard = String::from_utf8(heard).expect("text");
        let told = if heard.starts_with("GET ") {
            let models = json!({"data": [{"id": "theirs"}]}).to_string();
            format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{models}",
                models.len()
            )
        } else {
            self.heard.lock().expect("not poisoned").push(heard);
            if self.answer.is_empty() {
                std::future::pending::<()>().await;
            }
            self.answer.to_owned()
        };
        let _ = stream.write_all(told.as_bytes()).await;
        // The size of the first chunk is never told to its end.
        while told.ends_with("chunked\r\n\r\n") && stream.write_all(&[b'0'; 1 << 16]).await.is_ok()
        {
        }
    }
}

#[tokio::test]
async fn requests_arrive_as_they_came_but_for_the_models_name_and_no_key_of_a_client_does() {
    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/x-own\r\ncontent-length: 6\r\nconnection: close\r\n\r\n{ \"a\"}";
    let (stand, url) = Stand::start(ANSWER).await;
    let key = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(key.path(), "theirs-alone\n").expect("a key");
    let upstream = format!("{url},api-key-file={}", key.path().display());
    let frontend = before(&[&upstream], &["--api-key", "of-clients"]).await;
    let body = r#"{ "temperature": 1.50, "audio": {"x": [1e3, null]}, "model":"m", "tools": [],"messages":[{"role":"user","content":"hi"}] }"#;
    let request = frontend.client.post(format!("{}/v1/chat/completions", frontend.url)).body(body);
    let request = request
        .header("content-type", "application/json")
        .header("authorization", "Bearer of-clients");
    let answer =
        Answer::of(request.header("x-request-id", "r-7").send().await.expect("an answer")).await;
    assert_eq!(
        (answer.status, answer.text.as_str(), answer.header("content-type").as_str()),
        (200, "{ \"a\"}", "application/x-own")
    );
    let heard = stand.heard.lock().expect("not poisoned").remove(0);
    let (head, sent) = heard.split_once("\r\n\r\n").expect("a head");
    assert_eq!(sent, body.replace("\"m\"", "\"theirs\""));
    assert!(
        head.contains("authorization: Bearer theirs-alone") && head.contains("x-request-id: r-7"),
        "{head}"
    );
    assert!(!head.contains("of-clients"), "{head}");
}

#[tokio::test]
async fn an_answer_that_goes_on_and_says_nothing_is_ended() {
    const ENDLESS: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let (_, endless) = Stand::start(ENDLESS).await;
    let frontend = before(&[&endless], &[]).await;
    let answer = frontend
        .chat(&json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}))
        .await;
    assert_eq!(answer.status, 502, "{}", answer.text);
}

#[tokio::test]
async fn servers_that_fail_or_say_nothing_are_no_end_of_others() {
    const FAILS: &str =
        "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\nconnection: close\r\n\r\nboom";
    const TORN: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\nconnection: close\r\n\r\ndata: {}\n\n";
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let (stand, fails) = Stand::start(FAILS).await;
    let well = other().await;
    let frontend = before(&[&fails, &well.url], &["--policy", "round-robin"]).await;
    for _ in 0..4 {
        frontend.chat(&body).await.ok();
    }
    assert!(!stand.heard.lock().expect("not poisoned").is_empty(), "it was tried");
    let alone = before(&[&fails], &[]).await;
    let refused = alone.chat(&body).await;
    assert!(refused.status == 502 || refused.status == 503, "{}", refused.text);

    let (_, silent) = Stand::start("").await;
    let frontend = before(&[&silent], &["--first-token-timeout", "1"]).await;
    assert_eq!(frontend.chat(&body).await.status, 504);

    let (_, torn) = Stand::start(TORN).await;
    let frontend = before(&[&torn], &[]).await;
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

/// Asks the frontend at this path, which is not of the API.
async fn answer_at(frontend: &Server, path: &str) -> Answer {
    Answer::of(
        frontend.client.get(format!("{}{path}", frontend.url)).send().await.expect("an answer"),
    )
    .await
}

/// A server that fails at once looks idle. It costs a handful of tries, and no client anything.
#[tokio::test]
async fn broken_server_does_not_draw_the_traffic() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let well = other().await;
    for (answer, most, reason) in [
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
        let (broken, url) = Stand::start(answer).await;
        let frontend = before(&[&url, &well.url], &["--policy", "round-robin"]).await;
        for _ in 0..30 {
            frontend.chat(&body).await.ok();
        }
        let asked = broken.heard.lock().expect("not poisoned").len();
        assert!((1..=most).contains(&asked), "{answer}: {asked}");
        let workers = answer_at(&frontend, "/workers").await.ok();
        let breaker = &workers["workers"][0]["breaker"];
        assert_ne!(breaker["state"], "closed", "{workers}");
        assert_eq!(breaker["reason"], reason);
        let (alone, url) = Stand::start(answer).await;
        let frontend = before(&[&url], &[]).await;
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
                answer_at(&frontend, "/ready").await.status,
                503,
                "an open breaker is counted out"
            );
        }
        drop(alone);
    }
}

/// Serves a list of models, and says where.
async fn of_models(ids: &[&str]) -> String {
    let models: Vec<Value> = ids.iter().map(|id| json!({"id": id})).collect();
    let models = json!({"data": models}).to_string();
    let list = axum::routing::get(async move || models);
    serve(axum::Router::new().route("/v1/models", list)).await.replace("vllm+", "")
}

#[tokio::test]
async fn a_server_of_other_models_is_told_of_or_refused() {
    let (ours, one, several) = (
        of_models(&["other", "m"]).await,
        of_models(&["llama"]).await,
        of_models(&["llama", "qwen"]).await,
    );
    let model = demo_model().display().to_string();
    let mut args = vec![model.as_str(), "--served-model-name", "m"];
    let lacking = format!("{one},model=gemma");
    for upstream in [&ours, &one, &several, &lacking] {
        args.extend(["--upstream", upstream]);
    }
    let frontend = Server::start(&args);
    frontend.wait_ready(2, SOON).await;
    let cause = frontend.logged_line("none that is called m or ");
    assert!(
        cause.contains(&several)
            && cause.contains("but llama, qwen")
            && cause.contains("model=NAME"),
        "{cause}"
    );
    let cause = frontend.logged_line("it has no model gemma");
    assert!(cause.contains(&one), "{cause}");
    let warned = frontend.logged_line("calls its model otherwise");
    assert!(warned.contains(&one) && warned.contains("llama"), "{warned}");
    let workers =
        frontend.client.get(format!("{}/workers", frontend.url)).send().await.expect("workers");
    let workers: Value = serde_json::from_str(&workers.text().await.expect("text")).expect("JSON");
    let runs = |at: usize| workers["workers"][at]["runs"].as_str().unwrap_or_default().to_owned();
    assert_eq!(
        (runs(0).contains("calls"), runs(1).ends_with("calls llama")),
        (false, true),
        "{workers}"
    );
    assert_eq!(workers["workers"].as_array().map(Vec::len), Some(2), "{workers}");
}

/// What any stand-in for `vllm serve` says of itself.
fn vllm_serve() -> axum::Router {
    use axum::routing::get;
    let models = json!({"data": [{"id": "m", "parent": null, "max_model_len": 4096}]}).to_string();
    let metrics = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000\"} 1.0\n";
    axum::Router::new()
        .route("/version", get(async || "{\"version\": \"0.33.0\"}"))
        .route("/v1/models", get(async move || models))
        .route("/metrics", get(async move || metrics))
}

/// Serves it, and says where.
async fn serve(app: axum::Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("vllm+http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

/// A stand-in for `vllm serve` that makes two tokens of every prompt, and its address.
async fn odd_vllm_serve() -> String {
    use axum::routing::post;
    let choice = json!({"index": 0, "token_ids": [40], "finish_reason": "length", "logprobs": null, "stop_reason": null});
    let event = json!({"choices": [choice], "prompt_token_ids": [1, 2]});
    let generate = async move |body: String| match body.contains("token_ids") {
        true => Ok(format!("data: {event}\n\ndata: [DONE]\n\n")),
        false => Err(axum::http::StatusCode::BAD_REQUEST),
    };
    let chat = async || {
        json!({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}).to_string()
    };
    serve(
        vllm_serve()
            .route("/inference/v1/generate", post(generate))
            .route("/v1/chat/completions", post(chat)),
    )
    .await
}

/// A stand-in for `vllm serve` that has another server answer, what that was sent, and the
/// stand-in's address.
async fn vllm_serve_before(behind: &Server) -> (Arc<Mutex<Vec<String>>>, String) {
    use axum::response::IntoResponse;
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (client, url, hears) =
        (behind.client.clone(), format!("{}/v1/chat/completions", behind.url), heard.clone());
    let chat = async move |body: String| {
        hears.lock().expect("not poisoned").push(body.clone());
        let body = body.replace("\"model\":\"m\"", "\"model\":\"its/own name\"");
        let request = client.post(url).header("content-type", "application/json").body(body);
        let answer = request.send().await.expect("an answer");
        let status = axum::http::StatusCode::from_u16(answer.status().as_u16()).expect("a status");
        (status, answer.text().await.expect("text")).into_response()
    };
    (heard, serve(vllm_serve().route("/v1/chat/completions", axum::routing::post(chat))).await)
}

#[tokio::test]
async fn images_get_names_of_ours_where_a_server_goes_by_names() {
    let behind = other().await;
    let (heard, url) = vllm_serve_before(&behind).await;
    let frontend = before(&[&format!("{url},mode=chat")], &[]).await;
    let heard = || heard.lock().expect("not poisoned").pop().expect("a request");
    let mut names = Vec::new();
    for name in ["dawn", "dusk", "dawn"] {
        let mut body = ask(name, &json!({}));
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
        let mut sent: Value = serde_json::from_str(&heard()).expect("JSON");
        names.push(
            sent["messages"][0]["content"][0]["uuid"].take().as_str().expect("a name").to_owned(),
        );
        body["messages"][0]["content"][0]["uuid"] = Value::Null;
        assert_eq!(sent, body, "nothing else is changed");
    }
    assert!(names[0] == names[2] && names[0] != names[1] && names[0].len() == 64, "{names:?}");

    // Without images it is passed on byte by byte.
    let body =
        r#"{"max_tokens": 2,   "model":"m", "messages": [{"role": "user", "content": "hi"}]}"#;
    let request = frontend.client.post(format!("{}/v1/chat/completions", frontend.url)).body(body);
    Answer::of(request.header("content-type", "application/json").send().await.expect("an answer"))
        .await
        .ok();
    assert_eq!(heard(), body);
    // What is not understood here is the server's to refuse, and gets no names of clients either.
    assert_eq!(frontend.chat(&ask("dawn", &json!({"nonsense": 1}))).await.refused(400), "nonsense");
    let mut odd = ask("dawn", &json!({"nonsense": 1}));
    odd["messages"][0]["content"][0]["image_url"]["uuid"] = "a-clients-own".into();
    heard();
    assert_eq!(frontend.chat(&odd).await.refused(400), "nonsense");
    assert!(!heard().contains("a-clients-own"));
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
}

/// An image part that has a name alone.
fn only_named(uuid: &str) -> Value {
    json!({"type": "image_url", "image_url": null, "uuid": uuid})
}

/// An image part that has a name.
fn with_name(name: &str, uuid: &str) -> Value {
    let mut part = picture(name);
    part["uuid"] = uuid.into();
    part
}

/// Asks about one image, with a key.
async fn ask_about(server: &Server, key: &str, part: &Value) -> Answer {
    let content = json!([part, {"type": "text", "text": "what is in this picture?"}]);
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 60});
    let request =
        server.client.post(format!("{}/v1/chat/completions", server.url)).body(body.to_string());
    let request = request.header("content-type", "application/json").bearer_auth(key);
    Answer::of(request.send().await.expect("an answer")).await
}

/// Returns what a simulated engine says that it saw, without what it had cached.
fn saw(answer: &Answer) -> String {
    let text = answer.ok()["choices"][0]["message"]["content"].take();
    text.as_str().and_then(|text| text.split(';').next()).expect("text").to_owned()
}

#[tokio::test]
async fn media_names_are_private_to_each_client() {
    let behind = other().await;
    let (heard, url) = vllm_serve_before(&behind).await;
    for url in [url.replace("vllm+", ""), format!("{url},mode=chat")] {
        let frontend = before(&[&url], &["--api-key", "k1", "--api-key", "k2"]).await;
        let first = ask_about(&frontend, "k1", &with_name("dawn", "logo")).await;
        let other = ask_about(&frontend, "k2", &only_named("logo")).await;
        assert_eq!(other.refused(400), "messages[0].content[0].image_url", "{url}");
        assert_ne!(
            saw(&ask_about(&frontend, "k2", &with_name("dusk", "logo")).await),
            saw(&first),
            "{url}"
        );
        assert_eq!(
            saw(&ask_about(&frontend, "k1", &only_named("logo")).await),
            saw(&first),
            "{url}"
        );
        let heard = std::mem::take(&mut *heard.lock().expect("not poisoned"));
        assert!(
            heard.len() == 3 && heard.iter().all(|body| !body.contains("logo")),
            "{url}: {}",
            heard.len()
        );
    }
}

#[tokio::test]
async fn named_image_is_answered_by_any_worker_of_a_mixed_fleet() {
    let server = other().await;
    let model = demo_model().display().to_string();
    let mixed = ["--sim", "1", "--upstream", &server.url, "--policy", "round-robin"];
    let frontend =
        Server::start(&[&[model.as_str(), "--served-model-name", "m"], &mixed[..]].concat());
    frontend.wait_ready(2, SOON).await;
    let mut homes = Vec::new();
    for (at, name) in ["dawn", "dusk", "night", "snow"].into_iter().enumerate() {
        let shown = ask_about(&frontend, "k", &with_name(name, name)).await;
        // With one request between them both workers get one that only has a name.
        for _ in 0..1 + at % 2 {
            let named = ask_about(&frontend, "k", &only_named(name)).await;
            assert_eq!(saw(&named), saw(&shown), "{name}");
            homes.push(named.header("x-chiasm-worker"));
        }
    }
    homes.sort();
    homes.dedup();
    assert_eq!(homes.len(), 2, "{homes:?}");
}

#[tokio::test]
async fn image_without_a_type_is_predicted_as_one_with() {
    let behind = other().await;
    let (_, url) = vllm_serve_before(&behind).await;
    let frontend = before(&[&format!("{url},mode=chat")], &[]).await;
    for is_typed in [false, false, true, false] {
        let mut part = picture("dawn");
        if !is_typed {
            part.as_object_mut().expect("an object").remove("type");
        }
        let answer = ask_about(&frontend, "k", &part).await;
        let cached =
            answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        let overlap = answer.header("x-chiasm-overlap");
        let predicted: u64 = overlap.split('/').next().expect("X").parse().expect("a number");
        assert_eq!(predicted, cached / 16, "{overlap}");
    }
}

#[tokio::test]
async fn requests_at_a_server_that_tells_no_load_are_counted() {
    let (_, silent) = Stand::start("").await;
    let frontend = before(&[&silent], &[]).await;
    let running = async |count: f64| {
        let is_so = async || frontend.metric("chiasm_worker_running_requests").await == count;
        wait_for("requests to be counted", SOON, is_so).await;
    };
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let first = frontend.chat(&body);
    let second = frontend.chat(&body);
    let both = futures_util::future::join(first, second);
    tokio::select! {
        _ = both => panic!("the server never answers"),
        () = running(2.0) => {}
    }
    // Their clients are gone.
    running(0.0).await;
}

#[tokio::test]
async fn image_is_as_much_work_by_url_as_in_the_request() {
    let (_, silent) = Stand::start("").await;
    let mut pending = Vec::new();
    for part in [
        picture("dawn"),
        json!({"type": "image_url", "image_url": {"url": "http://192.0.2.1/dawn.jpg"}}),
    ] {
        let frontend = before(&[&silent], &[]).await;
        let known = std::cell::Cell::new(0.0);
        let has_come = async || {
            known.set(frontend.metric("chiasm_worker_pending_tokens").await);
            known.get() > 0.0
        };
        tokio::select! {
            _ = ask_about(&frontend, "k", &part) => panic!("the server never answers"),
            _ = wait_for("work", SOON, has_come) => {}
        }
        pending.push(known.get());
    }
    assert!(pending[0] > 1000.0 && (pending[0] - pending[1]).abs() < 20.0, "{pending:?}");
}

#[tokio::test]
async fn a_server_that_makes_other_prompts_serves_on_and_is_told_of_once() {
    let frontend = before(&[&odd_vllm_serve().await], &[]).await;
    let distrusted = async || frontend.metric("chiasm_distrusted_workers_total").await;
    let text =
        json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
    frontend.chat(&text).await.ok();
    assert_eq!(distrusted().await, 0.0, "prompts without items are what they are");
    for _ in 0..3 {
        frontend.chat(&ask("dawn", &json!({"max_tokens": 1}))).await.ok();
    }
    wait_for("the server to be distrusted", SOON, async || distrusted().await == 1.0).await;
    frontend.logged("was expected to have");
    assert_eq!(frontend.lines_logged("was expected to have"), 1);

    let frontend = before(&[&format!("{},mode=chat", odd_vllm_serve().await)], &[]).await;
    for _ in 0..3 {
        frontend.chat(&ask("dawn", &json!({"max_tokens": 1}))).await.ok();
    }
    let distrusted = async || frontend.metric("chiasm_distrusted_workers_total").await == 1.0;
    wait_for("the server to be distrusted", SOON, distrusted).await;
    frontend.logged("it counts 2 tokens");
    assert_eq!(frontend.lines_logged("it counts 2 tokens in a prompt"), 1);
}

/// A fleet of an engine that is given tokens and a server that is given messages: each has its own
/// prompts, and what one can't do the other does.
#[tokio::test]
async fn engines_and_servers_share_the_work_of_one_fleet() {
    let mut server = other().await;
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
    frontend.wait_ready(2, SOON).await;
    let frontend = &frontend;
    let long = |name: &str, max_tokens: u32| {
        let words = format!("{name} and what comes after ").repeat(200);
        json!({"model": "m", "messages": [{"role": "user", "content": words}], "max_tokens": max_tokens, "temperature": 0})
    };
    let names = ["one", "two", "three", "four", "five", "six"];
    // At once: what is busy is no place for the next one.
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
    let stream = frontend.chat(&ask("dawn", &json!({"stream": true}))).await;
    assert!(stream.text.ends_with("data: [DONE]\n\n"), "{}", stream.text);

    // What is not understood here only a server can be asked, which understands no more.
    let odd = frontend.chat(&ask("dawn", &json!({"nonsense": 1}))).await;
    assert_eq!(
        (odd.refused(400), odd.header("x-chiasm-worker")),
        ("nonsense".to_owned(), server_of(&homes))
    );
    server.end_by("KILL");
    for (name, ..) in &homes {
        assert_eq!(frontend.chat(&long(name, 7)).await.ok()["model"], "m", "{name}");
    }
    assert_eq!(frontend.chat(&ask("dawn", &json!({}))).await.ok()["model"], "m");
    wait_for("the server to be let go", SOON, async || frontend.ready_workers().await == 1).await;
    assert_eq!(frontend.chat(&ask("dawn", &json!({"nonsense": 1}))).await.refused(400), "nonsense");
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
}

/// The server's worker.
fn server_of(homes: &[(&str, String, bool)]) -> String {
    homes.iter().find(|home| home.2).map(|home| home.1.clone()).unwrap_or_default()
}

/// A fleet of an engine that is a process of its own, and takes seconds for a prompt, and a
/// stand-in for a server that is given messages.
struct Mixed {
    frontend: Server,
    address: String,
    engine: Process,
    /// A line for each request that the engine was given.
    given: NamedTempFile,
    stand: Stand,
}

impl Mixed {
    /// What the server says to all.
    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 18\r\nconnection: close\r\n\r\n{\"model\":\"theirs\"}";

    async fn start(answer: &'static str, flags: &[&str]) -> Self {
        let (stand, url) = Stand::start(answer).await;
        let (model, address) =
            (demo_model().display().to_string(), format!("tcp://127.0.0.1:{}", free_port()));
        let args = [&model, "--served-model-name", "m", "--attach", &address, "--upstream", &url];
        let frontend = Server::start(&[&args[..], &["--policy", "round-robin"], flags].concat());
        let given = NamedTempFile::new().expect("a file");
        let engine = Self::engine(&address, &given);
        frontend.wait_ready(2, SOON).await;
        Self { frontend, address, engine, given, stand }
    }

    fn engine(address: &str, given: &NamedTempFile) -> Process {
        let (model, log) = (demo_model().display().to_string(), given.path().display().to_string());
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

    /// Another engine in the place of one that was killed.
    async fn engine_again(&mut self) {
        let alone = async || self.frontend.ready_workers().await == 1;
        wait_for("the engine to be let go", SOON, alone).await;
        self.given = NamedTempFile::new().expect("a file");
        self.engine = Self::engine(&self.address, &self.given);
        self.frontend.wait_ready(2, SOON).await;
    }

    fn heard(&self) -> usize {
        self.stand.heard.lock().expect("not poisoned").len()
    }

    /// Sends a request until the engine has it, which gets this signal then; the answer.
    async fn answer_after(&mut self, signal: &str, path: &str, body: &Value) -> Answer {
        let mut answer = String::new();
        for _ in 0..8 {
            let (url, body) = (format!("{}{path}", self.frontend.url), body.to_string());
            let request = self
                .frontend
                .client
                .post(url)
                .header("content-type", "application/json")
                .body(body);
            let asked =
                tokio::spawn(
                    async move { Answer::of(request.send().await.expect("an answer")).await },
                );
            let is_given = || std::fs::metadata(self.given.path()).expect("a file").len() > 0;
            wait_for("it to be with a worker", SOON, async || asked.is_finished() || is_given())
                .await;
            if is_given() {
                send_signal(self.engine.0.id(), signal);
                return asked.await.expect("an answer");
            }
            answer = asked.await.expect("an answer").text;
        }
        panic!("the engine is not given it: {answer}");
    }

    async fn retries(&self, cause: &str) -> f64 {
        self.frontend.metric(&format!("chiasm_retries_total{{cause=\"{cause}\"}}")).await
    }
}

#[tokio::test]
async fn what_an_engine_dies_with_before_a_token_moves_to_a_server_once() {
    let mut fleet = Mixed::start(Mixed::ANSWER, &["--max-requests", "1"]).await;
    let hi = json!([{"role": "user", "content": "hi"}]);
    let body = json!({"model": "m", "messages": hi, "stream": true, "user": "it's me"});
    let answer = fleet.answer_after("KILL", "/v1/chat/completions", &body).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, r#"{"model":"theirs"}"#));
    let sent = fleet.stand.heard.lock().expect("not poisoned").last().cloned().unwrap_or_default();
    assert!(sent.ends_with(&body.to_string().replace("\"m\"", "\"theirs\"")), "{sent}");
    assert_eq!((fleet.retries("lost").await, fleet.retries("over_budget").await), (1.0, 0.0));
    assert!(fleet.frontend.logged_line("moves=1").contains(&answer.header("x-chiasm-worker")));
    let lines =
        (fleet.frontend.lines_logged("endpoint=\"chat\""), fleet.frontend.lines_logged("moves=1"));
    assert_eq!(lines, (fleet.heard(), 1), "one for each request");

    // As many have moved as may be in flight at once, and few requests have come since.
    fleet.engine_again().await;
    let body = json!({"model": "m", "max_tokens": 6, "messages": hi});
    let answer = fleet.answer_after("KILL", "/v1/messages", &body).await;
    assert_eq!(answer.status, 502, "{}", answer.text);
    assert_eq!((fleet.retries("lost").await, fleet.retries("over_budget").await), (1.0, 1.0));
}

#[tokio::test]
async fn a_request_moves_twice_at_most_whatever_it_moves_between() {
    const FAILS: &str =
        "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\nconnection: close\r\n\r\nboom";
    let mut fleet = Mixed::start(FAILS, &[]).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let answer = fleet.answer_after("KILL", "/v1/chat/completions", &body).await;
    assert!(answer.status == 502 || answer.status == 503, "{}", answer.text);
    assert_eq!(
        (fleet.retries("lost").await, fleet.heard()),
        (2.0, 1),
        "it was with each of them once"
    );
}

#[tokio::test]
async fn what_waits_for_an_engine_that_hangs_moves_to_a_server() {
    let mut fleet =
        Mixed::start(Mixed::ANSWER, &["--engine-timeout", "0.5", "--engine-hang-timeout", "1.5"])
            .await;
    let answer = fleet
        .answer_after("STOP", "/v1/completions", &json!({"model": "m", "prompt": "hello"}))
        .await;
    assert_eq!(answer.ok()["model"], "theirs");
    fleet.frontend.logged("death=it hangs");
    assert_eq!(fleet.retries("lost").await, 1.0);
}

/// A double of `trtllm-serve`, by TensorRT-LLM's sources: it keeps all blocks of 32 tokens, and
/// tells of them once. An image has a hash of the double's own, which stands beside each block with
/// some of it, and numbers that are no tokens in the place of its tokens.
#[derive(Default)]
struct Trtllm {
    events: Vec<Value>,
    next: u64,
    /// Blocks by the hashes of those before them, their tokens and the images in them.
    blocks: HashMap<(u64, Vec<u64>, String), u64>,
}

impl Trtllm {
    /// Of the demo's model: what stands for an image, and what Qwen2-VL has there in TensorRT-LLM,
    /// one more than the vocabulary.
    const MARKER: u64 = 446;
    const OF_IMAGES: u64 = 449;

    fn tell(&mut self, data: &Value) {
        self.events.push(json!({"event_id": self.next, "data": data, "window_size": 4096}));
        self.next += 1;
    }

    /// Takes a prompt in, with these hashes of its images; the tokens of it that were there.
    fn take(&mut self, tokens: &[u64], images: &[String]) -> usize {
        let runs = tokens.chunk_by(|one, other| (*one == Self::MARKER) == (*other == Self::MARKER));
        let runs = runs.scan(0, |end, run| {
            *end += run.len();
            Some((*end - run.len()..*end, run[0] == Self::MARKER))
        });
        let images: Vec<_> =
            runs.filter(|(_, is_image)| *is_image).map(|(run, _)| run).zip(images).collect();
        let keys = |begin: usize| {
            let inside =
                images.iter().filter(move |(run, _)| run.start < begin + 32 && run.end > begin);
            let key = move |(run, hash): &(std::ops::Range<usize>, &String)| json!({"type": "mm_key", "hash": hash, "start_offset": begin.saturating_sub(run.start)});
            Value::from(inside.map(key).collect::<Vec<_>>())
        };
        let tokens: Vec<u64> = tokens
            .iter()
            .map(|token| if *token == Self::MARKER { Self::OF_IMAGES } else { *token })
            .collect();
        let (mut parent, mut cached, mut new) = (0, 0, Vec::new());
        let mut first_parent = Value::Null;
        for (chunk, begin) in tokens.chunks(32).zip((0..).step_by(32)) {
            let keys = keys(begin);
            let key = (parent, chunk.to_vec(), keys.to_string());
            let hash = self.blocks.len() as u64 + 1;
            let is_full = chunk.len() == 32;
            match self.blocks.get(&key) {
                Some(known) if new.is_empty() && is_full => {
                    (parent, cached) = (*known, cached + 32)
                }
                _ => {
                    if new.is_empty() && parent > 0 {
                        first_parent = parent.into();
                    }
                    self.blocks.insert(key, hash);
                    let token = |token| json!({"type": "unique_token", "token_id": token, "token_extra_id": 0});
                    let tokens: Vec<Value> = chunk.iter().map(token).collect();
                    new.push(json!({"type": "stored_block", "block_hash": hash, "tokens": tokens, "cache_level": 0, "priority": 35, "mm_keys": keys}));
                    parent = hash;
                }
            }
        }
        if !new.is_empty() {
            self.tell(&json!({"type": "stored", "parent_hash": first_parent, "blocks": new}));
        }
        cached.min(tokens.len() - 1)
    }

    /// The images of a request, by its own hashes of them.
    fn images(body: &Value) -> Vec<String> {
        use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
        let messages = body["messages"].as_array().into_iter().flatten();
        let parts = messages.filter_map(|message| message["content"].as_array()).flatten();
        let urls = parts.filter_map(|part| part["image_url"]["url"].as_str());
        let hash =
            |url| format!("{:064x}", BuildHasherDefault::<DefaultHasher>::default().hash_one(url));
        urls.map(hash).collect()
    }

    /// Starts one, which counts tokens as another server does; itself, and its address.
    async fn start(behind: &Server) -> (Arc<Mutex<Self>>, String) {
        use axum::response::IntoResponse;
        use axum::routing::{get, post};
        let double = Arc::new(Mutex::new(Self::default()));
        double
            .lock()
            .expect("not poisoned")
            .tell(&json!({"type": "created", "num_blocks_per_cache_level": [1000, 0]}));
        let (client, url) = (behind.client.clone(), behind.url.clone());
        let (answers, tells) = (double.clone(), double.clone());
        let chat = async move |body: String| {
            let mut body: Value = serde_json::from_str(&body).expect("JSON");
            // It forbids fields that it does not know.
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
            let told = request
                .body(body.to_string())
                .send()
                .await
                .expect("an answer")
                .text()
                .await
                .expect("text");
            let told: Value = serde_json::from_str(&told).expect("JSON");
            let tokens: Vec<u64> = told["tokens"]
                .as_array()
                .expect("tokens")
                .iter()
                .filter_map(Value::as_u64)
                .collect();
            let cached = answers.lock().expect("not poisoned").take(&tokens, &Self::images(&body));
            let usage = json!({"prompt_tokens": tokens.len(), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}});
            json!({"object": "chat.completion", "choices": [], "usage": usage})
                .to_string()
                .into_response()
        };
        let events = async move || {
            Value::from(std::mem::take(&mut tells.lock().expect("not poisoned").events)).to_string()
        };
        let app = axum::Router::new()
            .route("/version", get(async || "{\"version\": \"1.3.0\"}"))
            .route(
                "/v1/models",
                get(async || "{\"data\": [{\"id\": \"theirs\", \"object\": \"model\"}]}"),
            )
            .route("/kv_cache_events", post(events))
            .route("/v1/chat/completions", post(chat));
        (double, serve(app).await.replace("vllm+", "trtllm+"))
    }
}

#[tokio::test]
async fn trtllm_serve_is_predicted_by_what_it_tells() {
    let behind = other().await;
    let (one, first) = Trtllm::start(&behind).await;
    let (_two, second) = Trtllm::start(&behind).await;
    let frontend = before(&[&first, &second], &[]).await;
    let knowledge = async || {
        let workers =
            frontend.client.get(format!("{}/workers", frontend.url)).send().await.expect("workers");
        let workers: Value =
            serde_json::from_str(&workers.text().await.expect("text")).expect("JSON");
        let of =
            |at: usize| workers["workers"][at]["knowledge"].as_str().unwrap_or_default().to_owned();
        assert!(
            workers["workers"][0]["runs"].as_str().is_some_and(|runs| runs.contains("unverified")),
            "{workers}"
        );
        (
            of(0),
            of(1),
            workers["workers"]
                .as_array()
                .expect("a list")
                .iter()
                .filter_map(|w| w["known_blocks"].as_u64())
                .sum::<u64>(),
        )
    };
    // Asks, and waits until what came of it is told: where it went, how many blocks were there, and
    // of how many.
    let ask = async |content: Value| {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1});
        let (.., known) = knowledge().await;
        let answer = frontend.chat(&body).await;
        let cached = answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .expect("a count");
        let overlap = answer.header("x-chiasm-overlap");
        let (held, all) = overlap.split_once('/').expect("X/Y");
        let [held, all] = [held, all].map(|blocks| blocks.parse::<u64>().expect("a number"));
        assert_eq!(held, cached / 32, "{overlap}: {content}");
        wait_for("its events", SOON, async || knowledge().await.2 >= known + all - held).await;
        (answer.header("x-chiasm-worker"), held, all)
    };
    let mut homes = HashMap::new();
    for (round, text) in (0..3).flat_map(|round| ["a", "b", "c"].map(|text| (round, text))) {
        let (home, held, all) = ask(format!("{text} word after word ").repeat(20).into()).await;
        assert_eq!(
            *homes.entry(text).or_insert_with(|| home.clone()),
            home,
            "{text}, round {round}"
        );
        assert!(all > 2 && (round > 0) == (held == all), "{text}, round {round}: {held}/{all}");
    }
    // Two images of one size, asked about in the same words and then in others: each is known by
    // its name from its first prompt on.
    for (round, name) in (0..3).flat_map(|round| ["dawn", "night"].map(|name| (round, name))) {
        let words = format!(
            "{}{}",
            "what is in this picture? ".repeat(8),
            ["here", "and where", "at what time"][round].repeat(9)
        );
        let (home, held, all) = ask(json!([picture(name), {"type": "text", "text": words}])).await;
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
    let (of_one, of_two, _) = knowledge().await;
    assert_eq!((of_one.as_str(), of_two.as_str()), ("exact", "exact"));
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);

    // Something was lost: another reader, or a buffer that was full.
    {
        let mut one = one.lock().expect("not poisoned");
        one.next += 1;
        one.tell(&json!({"type": "removed", "block_hashes": []}));
    }
    wait_for("it to be known less of", SOON, async || knowledge().await.0 == "approximate").await;
    assert_eq!(knowledge().await.1, "exact");
}
