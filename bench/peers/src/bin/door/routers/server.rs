//! The upstream that all routers stand before: a server that says what servers of models say, at
//! once or after as long as its prompts take, and keeps account of what its prefix cache held of
//! each request.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use chiasm_kv::event::KvEventBatch;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::routers::answer::Answer;
use crate::routers::cache::Cache;
use crate::routers::kv_events;
use crate::routers::prompt::{Asked, BLOCK, Prompt};
use crate::workload::MODEL;

/// What it tells as the context of its model.
const CONTEXT: usize = 32_768;

/// What was asked of it so far.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Stats {
    pub(crate) requests: u64,
    /// Tokens of all prompts.
    pub(crate) prompt_tokens: u64,
    /// Those that its cache held.
    pub(crate) cached_tokens: u64,
}

struct Upstream {
    /// Tokens that it computes per second; none if it waits for nothing.
    rate: Option<f64>,
    /// Where its KV events and their replay are.
    events: [SocketAddr; 2],
    state: Mutex<State>,
}

struct State {
    cache: Cache,
    stats: Stats,
    /// When all prompts so far are computed, one after the other.
    computed: Instant,
    /// Requests that are being answered, and the blocks of their prompts.
    running: usize,
    in_use: usize,
    batches: mpsc::UnboundedSender<KvEventBatch>,
}

/// Serves at `listen` until it is killed, with a cache of so many blocks. Computes `rate` tokens
/// per second that it does not hold, or all at once. Publishes KV events and their replay at two
/// addresses.
pub(crate) async fn serve(
    listen: SocketAddr,
    blocks: usize,
    rate: Option<f64>,
    events: [SocketAddr; 2],
) -> Result<(), Box<dyn Error>> {
    let (batches, receiver) = mpsc::unbounded_channel();
    let (cache, stats, computed) = (Cache::new(blocks), Stats::default(), Instant::now());
    let state = Mutex::new(State { cache, stats, computed, running: 0, in_use: 0, batches });
    let upstream = Arc::new(Upstream { rate, events, state });
    let listener = TcpListener::bind(listen).await?;
    tokio::select! {
        ended = accept(listener, upstream) => ended,
        ended = kv_events::publish(events, receiver) => ended,
    }
}

async fn accept(listener: TcpListener, upstream: Arc<Upstream>) -> Result<(), Box<dyn Error>> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let upstream = upstream.clone();
        tokio::spawn(async move {
            let answer = service_fn(|request| answer(request, &upstream));
            // A router that closes a connection is no failure.
            drop(http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await);
        });
    }
}

async fn answer(request: Request<Incoming>, upstream: &Upstream) -> Result<Response<Answer>, Infallible> {
    let (head, body) = request.into_parts();
    // Of a request that was broken off nothing is asked.
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let path = head.uri.path();
    let told = match head.method {
        Method::POST => upstream.generate(path, &body).await,
        _ => upstream.tell(path),
    };
    let (status, answer) = told.map_or_else(
        |status| {
            // Whoever looks at its log sees what a router wants and does not get.
            eprintln!("{status} to {} {path}", head.method);
            (status, Answer::whole(json!({"error": {"message": "not here", "code": status.as_u16()}}).to_string()))
        },
        |answer| (StatusCode::OK, answer),
    );
    let kind = match path {
        "/metrics" => "text/plain; version=0.0.4",
        _ if answer.is_streamed => "text/event-stream; charset=utf-8",
        _ => "application/json",
    };
    let mut response = Response::new(answer);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

impl Upstream {
    async fn generate(&self, path: &str, body: &Bytes) -> Result<Answer, StatusCode> {
        let wants_tokens = match path {
            "/v1/chat/completions" => false,
            "/inference/v1/generate" => true,
            _ => return Err(StatusCode::NOT_FOUND),
        };
        let asked: Asked = serde_json::from_slice(body).map_err(|_| StatusCode::BAD_REQUEST)?;
        let prompt = asked.prompt(wants_tokens).ok_or(StatusCode::BAD_REQUEST)?;
        let (cached, ready) = self.take(&prompt);
        let _running = Running::new(self, prompt.tokens.len() / BLOCK);
        if let Some(ready) = ready {
            sleep_until(ready).await;
        }
        if wants_tokens {
            return Ok(Answer::tokens(&prompt, cached, asked.return_token_ids));
        }
        Ok(Answer::chat(&prompt, cached, asked.stream))
    }

    /// The tokens of a prompt that were cached, and when the rest is computed if that takes time.
    fn take(&self, prompt: &Prompt) -> (usize, Option<Instant>) {
        let (blocks, length) = (prompt.blocks(), prompt.tokens.len());
        let mut state = self.state();
        let taken = state.cache.take(&blocks, length);
        state.stats.requests += 1;
        state.stats.prompt_tokens += length as u64;
        state.stats.cached_tokens += taken.cached as u64;
        if let Some(batch) = kv_events::batch(prompt, &blocks, &taken) {
            // The receiver ends with this process.
            drop(state.batches.send(batch));
        }
        let ready = self.rate.map(|rate| {
            let time = Duration::from_secs_f64((length - taken.cached) as f64 / rate);
            state.computed = state.computed.max(Instant::now()) + time;
            state.computed
        });
        (taken.cached, ready)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What routers ask before they use a server, of vLLM's paths and of SGLang's.
    fn tell(&self, path: &str) -> Result<Answer, StatusCode> {
        let state = self.state();
        let told = match path {
            "/health" | "/health_generate" => json!({"status": "ok"}),
            "/v1/models" => {
                let model = json!({"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "root": MODEL,
                    "parent": null, "max_model_len": CONTEXT});
                json!({"object": "list", "data": [model]})
            }
            "/version" => json!({"version": "0.33.0"}),
            "/kv_event_sources" => {
                let [events, replay] = self.events.map(|address| format!("tcp://{address}"));
                json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": events,
                    "replay_endpoint": replay, "topic": ""}})
            }
            "/get_server_info" | "/server_info" => json!({"model_path": MODEL, "served_model_name": MODEL,
                "model_id": MODEL, "tp_size": 1, "dp_size": 1, "version": "0.5", "max_total_num_tokens": state.cache.capacity() * BLOCK,
                "context_length": CONTEXT}),
            "/get_model_info" | "/model_info" => json!({"model_path": MODEL, "served_model_name": MODEL,
                "is_generation": true, "max_context_length": CONTEXT}),
            "/stats" => return Ok(Answer::whole(serde_json::to_vec(&state.stats).unwrap_or_default())),
            "/metrics" => return Ok(Answer::whole(metrics(&state))),
            _ => return Err(StatusCode::NOT_FOUND),
        };
        Ok(Answer::whole(told.to_string()))
    }
}

/// A request that is being answered, with the blocks of its prompt.
struct Running<'a>(&'a Upstream, usize);

impl<'a> Running<'a> {
    fn new(upstream: &'a Upstream, blocks: usize) -> Self {
        let mut state = upstream.state();
        state.running += 1;
        state.in_use += blocks;
        Self(upstream, blocks)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.running -= 1;
        state.in_use -= self.1;
    }
}

/// What a router reads of vLLM's metrics. Prompts are computed one after the other, so all but one
/// wait, and its blocks alone are in use.
fn metrics(State { cache, running: answered, in_use, .. }: &State) -> String {
    let (capacity, running) = (cache.capacity(), (*answered).min(1));
    let waiting = answered - running;
    let usage = *in_use as f64 / (*answered).max(1) as f64 / capacity.max(1) as f64;
    format!(
        "vllm:num_requests_running{{engine=\"0\"}} {running}\nvllm:num_requests_waiting{{engine=\"0\"}} {waiting}\n\
         vllm:kv_cache_usage_perc{{engine=\"0\"}} {usage}\n\
         vllm:cache_config_info{{block_size=\"{BLOCK}\",num_gpu_blocks=\"{capacity}\"}} 1.0\n"
    )
}
