//! A client that sends a scenario's requests over HTTP, streamed, as any OpenAI client does.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::CliError;
use crate::scenarios::{Observed, Turn};

/// The maximum number of new tokens per request, enough for the simulated engine's sentence.
const MAX_TOKENS: u32 = 96;

pub(super) struct Player {
    client: reqwest::Client,
    url: String,
}

/// The measured answer to one request.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// The request's number in the scenario, from 1.
    pub(super) request: usize,
    pub(super) worker: String,
    pub(super) overlap: usize,
    pub(super) total: usize,
    pub(super) transfer: String,
    pub(super) images: usize,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) ttft: Duration,
}

/// The server's counts of images.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ImageCounts {
    pub(super) decoded: u64,
    pub(super) cached: u64,
    pub(super) shm: u64,
    pub(super) inline: u64,
}

impl Answer {
    pub(super) fn observed(&self) -> Observed {
        Observed { worker: self.worker.clone(), overlap: self.overlap, total: self.total }
    }
}

impl Player {
    pub(super) fn new(address: SocketAddr) -> Result<Self, CliError> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(30))
            .build()
            .map_err(failed)?;
        Ok(Self { client, url: format!("http://{address}") })
    }

    /// Reads the counts of images from the server's metrics.
    pub(super) async fn image_counts(&self) -> Result<ImageCounts, CliError> {
        let response =
            self.client.get(format!("{}/metrics", self.url)).send().await.map_err(failed)?;
        let text = response.text().await.map_err(failed)?;
        let count = |name: &str| {
            let sample = text.lines().find_map(|line| line.strip_prefix(name));
            sample.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        Ok(ImageCounts {
            decoded: count("chiasm_media_decoded_total "),
            cached: count("chiasm_mm_transfer_total{mode=\"cached\"} "),
            shm: count("chiasm_mm_transfer_total{mode=\"shm\"} "),
            inline: count("chiasm_mm_transfer_total{mode=\"inline\"} "),
        })
    }

    /// Sends one request and reads its whole answer.
    pub(super) async fn play(
        &self,
        turn: &Turn,
        index: usize,
        model: &str,
        origin: &str,
    ) -> Result<Answer, CliError> {
        let mut body = turn.body(model, origin, MAX_TOKENS);
        body["stream"] = true.into();
        body["stream_options"] = serde_json::json!({"include_usage": true});
        let started = Instant::now();
        let mut response = self
            .client
            .post(format!("{}/v1/chat/completions", self.url))
            .header("content-type", "application/json")
            .body(body.to_string())
            .send()
            .await
            .map_err(failed)?;
        if !response.status().is_success() {
            let status = response.status();
            let body = response.text().await.map_err(failed)?;
            return Err(CliError::Demo(format!("{status}: {body}")));
        }
        let header = |name: &str| {
            let value = response.headers().get(name).and_then(|value| value.to_str().ok());
            value
                .map(str::to_owned)
                .ok_or_else(|| CliError::Demo(format!("no {name} in the answer")))
        };
        let overlap = header("x-chiasm-overlap")?;
        let (overlap, total) = overlap
            .split_once('/')
            .and_then(|(overlap, total)| Some((overlap.parse().ok()?, total.parse().ok()?)))
            .ok_or_else(|| CliError::Demo(format!("x-chiasm-overlap is '{overlap}'")))?;
        let mut answer = Answer {
            request: index + 1,
            worker: header("x-chiasm-worker")?,
            overlap,
            total,
            transfer: header("x-chiasm-transfer")?,
            images: turn.images(),
            prompt_tokens: 0,
            cached_tokens: 0,
            ttft: Duration::ZERO,
        };
        let mut buffered = Vec::new();
        while let Some(bytes) = response.chunk().await.map_err(failed)? {
            buffered.extend_from_slice(&bytes);
            while let Some(end) = buffered.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = buffered.drain(..end + 2).collect();
                answer.apply_event(&event, started)?;
            }
        }
        Ok(answer)
    }
}

impl Answer {
    /// Applies one server-sent event of the stream.
    fn apply_event(&mut self, event: &[u8], started: Instant) -> Result<(), CliError> {
        let Some(data) =
            event.trim_ascii().strip_prefix(b"data: ").filter(|data| data != b"[DONE]")
        else {
            return Ok(());
        };
        let chunk: Value =
            serde_json::from_slice(data).map_err(|error| CliError::Demo(error.to_string()))?;
        if let Some(message) = chunk["error"]["message"].as_str() {
            return Err(CliError::Demo(message.to_owned()));
        }
        let text = chunk["choices"][0]["delta"]["content"].as_str();
        if self.ttft.is_zero() && text.is_some_and(|text| !text.is_empty()) {
            self.ttft = started.elapsed();
        }
        if let Some(usage) = chunk.get("usage") {
            self.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or_default();
            self.cached_tokens =
                usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
        }
        Ok(())
    }
}

fn failed(error: reqwest::Error) -> CliError {
    CliError::Demo(error.to_string())
}
