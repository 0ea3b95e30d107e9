//! Clients who ask properly, and know what they have to be told.

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

/// `--request-timeout` and what a busy machine adds: who waits longer is hanging.
const DEADLINE: Duration = Duration::from_secs(30);

/// What clients have been told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    pub(crate) right: u64,
    pub(crate) told: u64,
    pub(crate) longest: Duration,
}

/// A number of clients that ask until they are stopped.
pub(crate) struct Load {
    clients: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    _origin: Origin,
}

impl Load {
    pub(crate) async fn start(url: &str, clients: u64, seed: u64) -> Self {
        let (truth, origin) = (Arc::new(Truth::learn().await), Origin::start().await);
        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(Counts::default()));
        let clients = (0..clients).map(|number| {
            let asking = Asking {
                url: url.to_owned(),
                pictures: origin.url(),
                truth: truth.clone(),
                counts: counts.clone(),
                random: SmallRng::seed_from_u64(seed ^ number),
            };
            tokio::spawn(asking.go_on(stop.clone()))
        });
        Self { clients: clients.collect(), stop, counts, _origin: origin }
    }

    /// Fails if a client has found something wrong.
    pub(crate) fn check(&self) {
        assert!(
            !self.clients.iter().any(JoinHandle::is_finished),
            "a client found something wrong"
        );
    }

    pub(crate) async fn stop(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.await.expect("a client that found nothing wrong");
        }
        self.counts.tally()
    }
}

/// What an engine says of pictures that it saw rightly, in each's own words.
struct Truth(HashMap<usize, String>);

impl Truth {
    async fn learn() -> Self {
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
        let mut words = HashMap::new();
        for (index, picture) in PICTURES.iter().enumerate() {
            let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg));
            let answer = server.chat(&about(&[url], 64, false)).await.ok();
            let text = answer["choices"][0]["message"]["content"].as_str().expect("text");
            let seen = text.split(';').next().unwrap_or_default();
            words.insert(index, seen.strip_prefix("1 image ").expect("one image").to_owned());
        }
        Self(words)
    }

    /// How the answer must begin.
    fn of(&self, pictures: &[usize]) -> String {
        match pictures {
            [] => "no images;".to_owned(),
            _ => {
                let each: Vec<_> = pictures.iter().map(|index| self.0[index].as_str()).collect();
                format!(
                    "{} image{} {};",
                    pictures.len(),
                    if pictures.len() == 1 { "" } else { "s" },
                    each.join(", ")
                )
            }
        }
    }
}

fn about(urls: &[String], tokens: u32, stream: bool) -> Value {
    let part = |url: &String| json!({"type": "image_url", "image_url": {"url": url}});
    let content: Vec<Value> =
        urls.iter().map(part).chain([json!({"type": "text", "text": "what is it?"})]).collect();
    json!({"model": "m", "max_tokens": tokens, "stream": stream, "messages": [{"role": "user", "content": content}]})
}

struct Asking {
    url: String,
    pictures: String,
    truth: Arc<Truth>,
    counts: Arc<Counts>,
    random: SmallRng,
}

impl Asking {
    async fn go_on(mut self, stop: Arc<AtomicBool>) {
        let client = client();
        while !stop.load(Ordering::Relaxed) {
            let pictures: Vec<usize> = (0..self.random.random_range(0..=3))
                .map(|_| self.random.random_range(0..PICTURES.len()))
                .collect();
            let url = |&index: &usize| match index % 2 {
                0 => format!("data:image/jpeg;base64,{}", STANDARD.encode(PICTURES[index].jpeg)),
                _ => format!("{}/{}", self.pictures, PICTURES[index].name),
            };
            let urls: Vec<_> = pictures.iter().map(url).collect();
            let stream = self.random.random();
            let mut body = about(&urls, 128, stream);
            body["cache_salt"] = self.random.random_range(0..50_u32).to_string().into();
            let leaves = stream && self.random.random_ratio(1, 10);
            self.ask(&client, &body, &self.truth.of(&pictures), leaves).await;
            tokio::time::sleep(Duration::from_millis(self.random.random_range(0..30))).await;
        }
    }

    /// Asks once. Answers are right, or say that something is wrong, in time.
    async fn ask(&self, client: &reqwest::Client, body: &Value, expected: &str, leaves: bool) {
        let asked = Instant::now();
        let request = client
            .post(format!("{}/v1/chat/completions", self.url))
            .header("content-type", "application/json");
        let answer = async {
            let mut response =
                request.body(body.to_string()).send().await.expect("the frontend lives");
            let status = response.status().as_u16();
            if leaves {
                let _ = response.chunk().await;
                return None;
            }
            Some((status, response.text().await.expect("an orderly end")))
        };
        let answer = tokio::time::timeout(DEADLINE, answer).await.expect("nobody hangs");
        self.counts.longest_ms.fetch_max(asked.elapsed().as_millis() as u64, Ordering::Relaxed);
        let Some((status, text)) = answer else { return };
        let is_right = match status {
            200 if body["stream"] == true => is_right_stream(&text, expected),
            200 => {
                let answer: Value = serde_json::from_str(&text).expect("JSON");
                let said = answer["choices"][0]["message"]["content"].as_str().expect("text");
                assert!(said.starts_with(expected), "'{said}' is not '{expected}'");
                true
            }
            _ => {
                // Engines die, hang and are busy; memory and slots are taken by others; the origin
                // is as busy as all.
                assert!(matches!(status, 429 | 500 | 502 | 503 | 504), "{status}: {text}");
                let error: Value = serde_json::from_str(&text).expect("an error in JSON");
                assert!(
                    error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()),
                    "{text}"
                );
                false
            }
        };
        if is_right { &self.counts.right } else { &self.counts.told }
            .fetch_add(1, Ordering::Relaxed);
    }
}

/// True if it came to its end; else it must say what happened.
fn is_right_stream(text: &str, expected: &str) -> bool {
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let events: Vec<Value> = text
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    let said: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    if events.iter().any(|event| event["choices"][0]["finish_reason"].is_string()) {
        assert!(said.starts_with(expected), "'{said}' is not '{expected}'");
        return true;
    }
    assert!(
        said.starts_with(expected) || expected.starts_with(&said),
        "'{said}' is not of '{expected}'"
    );
    assert!(
        events.iter().any(|event| event["error"]["message"].is_string()),
        "no word of the error: {text}"
    );
    false
}
