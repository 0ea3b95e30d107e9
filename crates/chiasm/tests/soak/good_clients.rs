//! Well-behaved clients that know the correct answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::PICTURES;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::Counts;
use crate::support::origin::Origin;
use crate::support::{Server, client, demo_model};

/// The deadline for a request: `--request-timeout` and a margin for a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

/// The results of all requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    pub(crate) correct: u64,
    pub(crate) errors: u64,
    pub(crate) longest: Duration,
}

/// Clients that send requests until they are stopped.
pub(crate) struct Load {
    clients: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    _origin: Origin,
}

impl Load {
    pub(crate) async fn start(url: &str, clients: u64, seed: u64) -> Self {
        let expected = Arc::new(ExpectedAnswers::record().await);
        let origin = Origin::start().await;
        let stop = Arc::new(AtomicBool::new(false));
        let counts = Arc::new(Counts::default());
        let clients = (0..clients).map(|number| {
            let client = Client {
                url: url.to_owned(),
                pictures_url: origin.url(),
                expected: expected.clone(),
                counts: counts.clone(),
                random: SmallRng::seed_from_u64(seed ^ number),
            };
            tokio::spawn(client.run(stop.clone()))
        });
        Self { clients: clients.collect(), stop, counts, _origin: origin }
    }

    /// Fails if a client got an unexpected answer.
    pub(crate) fn check(&self) {
        assert!(
            !self.clients.iter().any(JoinHandle::is_finished),
            "a client got an unexpected answer"
        );
    }

    pub(crate) async fn stop(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.await.expect("only expected answers");
        }
        self.counts.tally()
    }
}

/// An engine's correct description of each picture, by the picture's index.
struct ExpectedAnswers(HashMap<usize, String>);

impl ExpectedAnswers {
    /// Asks an undisturbed server about each picture.
    async fn record() -> Self {
        let model = demo_model().display().to_string();
        let server = Server::start(&[
            &model,
            "--served-model-name",
            "m",
            "--sim",
            "1",
            "--mm-transfer",
            "off",
        ]);
        server.wait_ready(1, DEADLINE).await;
        let mut descriptions = HashMap::new();
        for (index, picture) in PICTURES.iter().enumerate() {
            let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg));
            let answer = server.chat(&request_body(&[url], 64, false)).await.ok();
            let text = answer["choices"][0]["message"]["content"].as_str().expect("text");
            let first_part = text.split(';').next().unwrap_or_default();
            let description = first_part.strip_prefix("1 image ").expect("one image");
            descriptions.insert(index, description.to_owned());
        }
        Self(descriptions)
    }

    /// Returns the start of the correct answer to a request with these pictures.
    fn prefix(&self, pictures: &[usize]) -> String {
        if pictures.is_empty() {
            return "no images;".to_owned();
        }
        let descriptions: Vec<_> = pictures.iter().map(|index| self.0[index].as_str()).collect();
        let plural = if pictures.len() == 1 { "" } else { "s" };
        format!("{} image{plural} {};", pictures.len(), descriptions.join(", "))
    }
}

fn request_body(urls: &[String], tokens: u32, stream: bool) -> Value {
    let part = |url: &String| json!({"type": "image_url", "image_url": {"url": url}});
    let content: Vec<Value> =
        urls.iter().map(part).chain([json!({"type": "text", "text": "what is it?"})]).collect();
    json!({
        "model": "m",
        "max_tokens": tokens,
        "stream": stream,
        "messages": [{"role": "user", "content": content}],
    })
}

struct Client {
    url: String,
    pictures_url: String,
    expected: Arc<ExpectedAnswers>,
    counts: Arc<Counts>,
    random: SmallRng,
}

impl Client {
    /// Sends requests until `stop` is set.
    async fn run(mut self, stop: Arc<AtomicBool>) {
        let client = client();
        while !stop.load(Ordering::Relaxed) {
            let pictures: Vec<usize> = (0..self.random.random_range(0..=3))
                .map(|_| self.random.random_range(0..PICTURES.len()))
                .collect();
            let url = |&index: &usize| match index % 2 {
                0 => format!("data:image/jpeg;base64,{}", STANDARD.encode(PICTURES[index].jpeg)),
                _ => format!("{}/{}", self.pictures_url, PICTURES[index].name),
            };
            let urls: Vec<_> = pictures.iter().map(url).collect();
            let stream = self.random.random();
            let mut body = request_body(&urls, 128, stream);
            body["cache_salt"] = self.random.random_range(0..50_u32).to_string().into();
            let disconnects = stream && self.random.random_ratio(1, 10);
            self.send(&client, &body, &self.expected.prefix(&pictures), disconnects).await;
            tokio::time::sleep(Duration::from_millis(self.random.random_range(0..30))).await;
        }
    }

    /// Sends one request. Asserts that the answer is correct or a valid error, and arrives in time.
    async fn send(&self, client: &reqwest::Client, body: &Value, prefix: &str, disconnects: bool) {
        let started = Instant::now();
        let request = client
            .post(format!("{}/v1/chat/completions", self.url))
            .header("content-type", "application/json");
        let answer = async {
            let mut response =
                request.body(body.to_string()).send().await.expect("the frontend lives");
            let status = response.status().as_u16();
            if disconnects {
                let _ = response.chunk().await;
                return None;
            }
            Some((status, response.text().await.expect("an orderly end")))
        };
        let answer = tokio::time::timeout(DEADLINE, answer).await.expect("an answer in time");
        self.counts.longest_ms.fetch_max(started.elapsed().as_millis() as u64, Ordering::Relaxed);
        let Some((status, text)) = answer else { return };
        let is_correct = match status {
            200 if body["stream"] == true => is_correct_stream(&text, prefix),
            200 => {
                let answer: Value = serde_json::from_str(&text).expect("JSON");
                let content = answer["choices"][0]["message"]["content"].as_str().expect("text");
                assert!(content.starts_with(prefix), "'{content}' is not '{prefix}'");
                true
            }
            _ => {
                // Engines may be dead, hung or busy, memory and slots may be in use, and the origin
                // may be slow.
                assert!(matches!(status, 429 | 500 | 502 | 503 | 504), "{status}: {text}");
                let error: Value = serde_json::from_str(&text).expect("an error in JSON");
                assert!(
                    error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()),
                    "{text}"
                );
                false
            }
        };
        if is_correct { &self.counts.correct } else { &self.counts.errors }
            .fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns `true` if the stream is complete. Asserts that an incomplete stream has an error event.
fn is_correct_stream(text: &str, prefix: &str) -> bool {
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let events: Vec<Value> = text
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    let content: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    if events.iter().any(|event| event["choices"][0]["finish_reason"].is_string()) {
        assert!(content.starts_with(prefix), "'{content}' is not '{prefix}'");
        return true;
    }
    assert!(
        content.starts_with(prefix) || prefix.starts_with(&content),
        "'{content}' is no part of '{prefix}'"
    );
    assert!(
        events.iter().any(|event| event["error"]["message"].is_string()),
        "no error event: {text}"
    );
    false
}
