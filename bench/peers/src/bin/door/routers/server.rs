//! The upstream of all routers: a server with the interface of servers of models. It answers at
//! once or after the time that its prompts take, and counts the tokens that its prefix cache held.

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
use peers::flags::Flags;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::routers::answer::Answer;
use crate::routers::cache::Cache;
use crate::routers::kv_events;
use crate::routers::prompt::{BLOCK_SIZE, Prompt, RequestBody};
use crate::workload::MODEL;

/// The maximum length of the model's context, in tokens.
const CONTEXT: usize = 32_768;

/// The counts of all requests so far.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Stats {
    pub(crate) requests: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
}

struct Upstream {
    /// The prompt tokens per second; `None` if prompts take no time.
    prefill_rate: Option<f64>,
    /// The addresses of KV events and of their replay.
    events: [SocketAddr; 2],
    state: Mutex<State>,
}

struct State {
    cache: Cache,
    stats: Stats,
    /// The time at which all prompts so far are computed, one after the other.
    computed: Instant,
    /// The number of requests that are being answered, and the number of their prompts' blocks.
    running: usize,
    blocks_in_use: usize,
    batches: mpsc::UnboundedSender<KvEventBatch>,
}

/// Serves until it is killed.
pub(crate) async fn serve(flags: &Flags) -> Result<(), Box<dyn Error>> {
    let events = [flags.parse("--events")?, flags.parse("--replay")?];
    let prefill_rate = flags.find("--prefill-rate").map(str::parse).transpose()?;
    let (batches, receiver) = mpsc::unbounded_channel();
    let state = Mutex::new(State {
        cache: Cache::new(flags.parse("--blocks")?),
        stats: Stats::default(),
        computed: Instant::now(),
        running: 0,
        blocks_in_use: 0,
        batches,
    });
    let upstream = Arc::new(Upstream { prefill_rate, events, state });
    let listener = TcpListener::bind(flags.parse::<SocketAddr>("--listen")?).await?;
    tokio::select! {
        result = accept(listener, upstream) => result,
        result = kv_events::publish(events, receiver) => result,
    }
}

async fn accept(listener: TcpListener, upstream: Arc<Upstream>) -> Result<(), Box<dyn Error>> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let upstream = upstream.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| respond(request, &upstream));
            // A closed connection is no failure.
            drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

async fn respond(
    request: Request<Incoming>,
    upstream: &Upstream,
) -> Result<Response<Answer>, Infallible> {
    let (head, body) = request.into_parts();
    // The body of a broken request is empty.
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let path = head.uri.path();
    let answer = match head.method {
        Method::POST => upstream.generate(path, &body).await,
        _ => upstream.describe(path),
    };
    let status = answer.as_ref().err().copied().unwrap_or(StatusCode::OK);
    let answer = answer.unwrap_or_else(|status| {
        // The log shows requests that are not supported.
        eprintln!("{status} to {} {path}", head.method);
        let error = json!({"error": {"message": "not here", "code": status.as_u16()}});
        Answer::whole(error.to_string())
    });
    let content_type = match path {
        "/metrics" => "text/plain; version=0.0.4",
        _ if answer.is_streamed => "text/event-stream; charset=utf-8",
        _ => "application/json",
    };
    let mut response = Response::new(answer);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    Ok(response)
}

impl Upstream {
    async fn generate(&self, path: &str, body: &Bytes) -> Result<Answer, StatusCode> {
        let has_tokens = match path {
            "/v1/chat/completions" => false,
            "/inference/v1/generate" => true,
            _ => return Err(StatusCode::NOT_FOUND),
        };
        let body: RequestBody =
            serde_json::from_slice(body).map_err(|_| StatusCode::BAD_REQUEST)?;
        let prompt = body.prompt(has_tokens).ok_or(StatusCode::BAD_REQUEST)?;
        let (cached, ready) = self.compute(&prompt);
        let _running = Running::new(self, prompt.tokens.len() / BLOCK_SIZE);
        if let Some(ready) = ready {
            sleep_until(ready).await;
        }
        if has_tokens {
            return Ok(Answer::tokens(&prompt, cached, body.return_token_ids));
        }
        Ok(Answer::chat(&prompt, cached, body.stream))
    }

    /// Returns the number of cached tokens of a prompt, and the time at which the rest is computed
    /// if that takes time.
    fn compute(&self, prompt: &Prompt) -> (usize, Option<Instant>) {
        let blocks = prompt.blocks();
        let length = prompt.tokens.len();
        let mut state = self.state();
        let changes = state.cache.add(&blocks, length);
        state.stats.requests += 1;
        state.stats.prompt_tokens += length as u64;
        state.stats.cached_tokens += changes.cached as u64;
        if let Some(batch) = kv_events::batch(prompt, &blocks, &changes) {
            // The receiver ends with this process.
            drop(state.batches.send(batch));
        }
        let ready = self.prefill_rate.map(|rate| {
            let time = Duration::from_secs_f64((length - changes.cached) as f64 / rate);
            state.computed = state.computed.max(Instant::now()) + time;
            state.computed
        });
        (changes.cached, ready)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the requests of routers about a server, with paths of vLLM and of SGLang.
    fn describe(&self, path: &str) -> Result<Answer, StatusCode> {
        let state = self.state();
        let answer = match path {
            "/health" | "/health_generate" => json!({"status": "ok"}),
            "/v1/models" => json!({"object": "list", "data": [{
                "id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "root": MODEL,
                "parent": null, "max_model_len": CONTEXT
            }]}),
            "/version" => json!({"version": "0.33.0"}),
            "/kv_event_sources" => {
                let [events, replay] = self.events.map(|address| format!("tcp://{address}"));
                json!({"0": {
                    "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": events,
                    "replay_endpoint": replay, "topic": ""
                }})
            }
            "/get_server_info" | "/server_info" => json!({
                "model_path": MODEL, "served_model_name": MODEL, "model_id": MODEL, "tp_size": 1,
                "dp_size": 1, "version": "0.5", "context_length": CONTEXT,
                "max_total_num_tokens": state.cache.capacity * BLOCK_SIZE
            }),
            "/get_model_info" | "/model_info" => json!({
                "model_path": MODEL, "served_model_name": MODEL, "is_generation": true,
                "max_context_length": CONTEXT
            }),
            "/stats" => {
                return Ok(Answer::whole(serde_json::to_vec(&state.stats).unwrap_or_default()));
            }
            "/metrics" => return Ok(Answer::whole(metrics(&state))),
            _ => return Err(StatusCode::NOT_FOUND),
        };
        Ok(Answer::whole(answer.to_string()))
    }
}

/// A request that is being answered, with the number of its prompt's blocks.
struct Running<'a> {
    upstream: &'a Upstream,
    blocks: usize,
}

impl<'a> Running<'a> {
    fn new(upstream: &'a Upstream, blocks: usize) -> Self {
        let mut state = upstream.state();
        state.running += 1;
        state.blocks_in_use += blocks;
        Self { upstream, blocks }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.upstream.state();
        state.running -= 1;
        state.blocks_in_use -= self.blocks;
    }
}

/// Returns the metrics of vLLM that routers read. Prompts are computed one after the other, so at
/// most one request runs, and only its blocks are in use.
fn metrics(state: &State) -> String {
    let running = state.running.min(1);
    let waiting = state.running - running;
    let capacity = state.cache.capacity;
    let mean_blocks = state.blocks_in_use as f64 / state.running.max(1) as f64;
    let usage = mean_blocks / capacity.max(1) as f64;
    let engine = r#"{engine="0"}"#;
    format!(
        "vllm:num_requests_running{engine} {running}\n\
         vllm:num_requests_waiting{engine} {waiting}\n\
         vllm:kv_cache_usage_perc{engine} {usage}\n\
         vllm:cache_config_info{{block_size=\"{BLOCK_SIZE}\",num_gpu_blocks=\"{capacity}\"}} 1.0\n"
    )
}
