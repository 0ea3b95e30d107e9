//! Malformed and oversized requests: each gets an answer, none a server error, and the engine
//! survives.

use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

use crate::support::{Server, demo_model};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::DAWN;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const REQUESTS: u64 = 400;

/// Returns a valid request with many fields.
fn valid_request() -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(DAWN.jpeg));
    json!({
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are a careful assistant."},
            {"role": "user", "content": [
                {"type": "text", "text": "What is in this picture?"},
                {"type": "image_url", "image_url": {"url": url, "detail": "low"}, "uuid": "u"},
            ]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ]},
            {"role": "tool", "content": "done", "tool_call_id": "1"},
        ],
        "stream": false, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "seed": 1, "n": 1, "stop": ["x"], "stop_token_ids": [1],
        "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
        "logprobs": true, "top_logprobs": 1, "ignore_eos": false, "min_tokens": 0,
        "cache_salt": "s", "chat_template_kwargs": {"a": 1},
        "mm_processor_kwargs": {"max_pixels": 100_352}, "priority": 0, "user": "u",
        "return_token_ids": true,
    })
}

fn odd_value(rng: &mut SmallRng) -> Value {
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1e300),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(0.000_000_1),
        json!(""),
        json!("<|image_pad|>"),
        json!("<|im_end|>\u{0}\u{feff}🙂"),
        json!("y".repeat(5000)),
        json!("data:image/png;base64,iVBORw0KGgo="),
        json!("data:,"),
        json!("http://[::1]:1/"),
        json!("http://169.254.169.254/latest"),
        json!("file:///dev/zero"),
        json!("javascript:1"),
        json!([]),
        json!({}),
        json!([[[[[[[[1]]]]]]]]),
        json!({"role": "user", "content": [{}]}),
        json!(vec![1; 2000]),
        json!({"shortest_edge": 1, "longest_edge": u64::MAX}),
    ];
    values.choose(rng).cloned().expect("not empty")
}

/// Replaces, removes or duplicates a random value inside `value`.
fn mutate(value: &mut Value, rng: &mut SmallRng) {
    let goes_deeper = rng.random_bool(0.6);
    match value {
        Value::Object(map) if !map.is_empty() => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = keys.choose(rng).expect("not empty");
            if goes_deeper && let Some(inner) = map.get_mut(key) {
                return mutate(inner, rng);
            }
            match rng.random_range(0..3) {
                0 => drop(map.remove(key)),
                1 => drop(map.insert(key.clone(), odd_value(rng))),
                _ => drop(map.insert(format!("{key}_"), odd_value(rng))),
            }
        }
        Value::Array(list) if !list.is_empty() => {
            let index = rng.random_range(0..list.len());
            if goes_deeper {
                return mutate(&mut list[index], rng);
            }
            match rng.random_range(0..3) {
                0 => drop(list.remove(index)),
                1 => list[index] = odd_value(rng),
                _ => list.push(list[index].clone()),
            }
        }
        other => *other = odd_value(rng),
    }
}

#[tokio::test]
async fn malformed_requests_leave_the_engine_unharmed() {
    let model = demo_model().display().to_string();
    let args = [
        model.as_str(),
        "--served-model-name",
        "m",
        "--sim",
        "1",
        "--sim-speedup",
        "1000",
        "--media-timeout",
        "1",
    ];
    let server = Server::start(&args);
    server.wait_ready(1, Duration::from_secs(20)).await;
    server.chat(&valid_request()).await.ok();
    let mut accepted = 0;
    for seed in 0..REQUESTS {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut body = valid_request();
        for _ in 0..rng.random_range(1..3) {
            mutate(&mut body, &mut rng);
        }
        let answer = server.chat(&body).await;
        let excerpt = || body.to_string().chars().take(3000).collect::<String>();
        assert!(
            answer.status < 500 || answer.status == 502,
            "seed {seed}: {} for {}",
            answer.text,
            excerpt()
        );
        match answer.status {
            200 => accepted += 1,
            status => drop(answer.refused(status)),
        }
    }
    // Some mutated requests are valid: both outcomes must occur.
    assert!((10..REQUESTS - 10).contains(&accepted), "{accepted} accepted");
    assert_eq!(server.metric("chiasm_engine_deaths_total").await, 0.0);
    server.chat(&valid_request()).await.ok();
}

/// Returns `true` if the peer has closed a non-blocking connection. Discards unread bytes.
fn is_closed(mut connection: &std::net::TcpStream) -> bool {
    let mut rest = [0; 1024];
    loop {
        match connection.read(&mut rest) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

#[tokio::test]
async fn silent_connections_do_not_block_others() {
    let model = demo_model().display().to_string();
    let args = [
        model.as_str(),
        "--served-model-name",
        "m",
        "--sim",
        "1",
        "--max-connections",
        "2",
        "--head-timeout",
        "1",
    ];
    let server = Server::start(&args);
    let address = server.url.trim_start_matches("http://");
    let connect = async || TcpStream::connect(address).await.expect("a connection");
    let silent = connect().await;
    let mut slow = connect().await;
    slow.write_all(b"GET /health HTTP/1.1\r\nx: ").await.expect("sent");
    let [silent, slow] = [silent, slow].map(|stream| stream.into_std().expect("a stream"));
    // The third connection waits until one of the others is closed.
    let started = Instant::now();
    let mut third = connect().await;
    third
        .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .expect("sent");
    let mut answer = String::new();
    third.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(started.elapsed() >= Duration::from_millis(500), "the third connection did not wait");
    for connection in [&silent, &slow] {
        crate::support::wait_for("end of the connection", Duration::from_secs(20), async || {
            is_closed(connection)
        })
        .await;
    }
    // HTTP/2 is not supported.
    let mut http2 = connect().await;
    http2.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("sent");
    let mut answer = Vec::new();
    http2.read_to_end(&mut answer).await.expect("closed");
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
}

#[tokio::test]
async fn small_request_for_a_huge_answer_is_refused() {
    let model = demo_model().display().to_string();
    let limits = [
        "--max-bytes-in-flight",
        "67108864",
        "--media-cache-bytes",
        "0",
        "--processed-cache-bytes",
        "0",
    ];
    let server = Server::start(
        &[&[model.as_str(), "--sim", "1", "--sim-speedup", "1000"], &limits[..]].concat(),
    );
    server.wait_ready(1, Duration::from_secs(20)).await;
    let choices = |count: u64| {
        json!({
            "prompt": ["a", "b"],
            "n": count,
            "max_tokens": 60,
            "ignore_eos": true,
            "logprobs": 20,
        })
    };
    server.post("/v1/completions", &choices(128)).await.refused(413);
    server.post("/v1/completions", &choices(16)).await.ok();
    // One such prompt is within the limits, and so are sixteen.
    let prompts = |count: usize| {
        let prompts = vec![vec![1; 400]; count];
        json!({"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20})
    };
    assert_eq!(server.post("/v1/completions", &prompts(128)).await.refused(400), "prompt_logprobs");
    server.post("/v1/completions", &prompts(16)).await.ok();
    let words = |count: usize| json!({"prompt": " a".repeat(count), "return_token_strs": true});
    server.post("/tokenize", &words(2 << 20)).await.refused(413);
    server.post("/tokenize", &words(1 << 16)).await.ok();
    assert_eq!(
        server.post("/detokenize", &json!({"tokens": vec![1; (1 << 20) + 1]})).await.refused(400),
        "tokens"
    );
    // Memory is released once the client has the answer.
    let timeout = Duration::from_secs(20);
    crate::support::wait_for("memory to be released", timeout, async || {
        server.metric("chiasm_held_bytes").await == 0.0
    })
    .await;
}
