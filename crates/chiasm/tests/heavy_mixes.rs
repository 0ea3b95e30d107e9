//! A light client beside heavy ones: its requests must not wait for theirs.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::{Process, Server, chiasm, client, demo_model, free_port, wait_for};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use chiasm::scenarios::DAWN;
use libjpeg_turbo_rs::{Encoder, PixelFormat};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const TIMEOUT: Duration = Duration::from_secs(20);

async fn serve(extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(1, TIMEOUT).await;
    server
}

/// Encodes a JPEG whose samples are a function of their index.
fn jpeg(width: usize, height: usize, sample: impl Fn(usize) -> u8) -> Vec<u8> {
    let pixels: Vec<u8> = (0..3 * width * height).map(sample).collect();
    Encoder::new(&pixels, width, height, PixelFormat::Rgb).encode().expect("a JPEG")
}

/// Encodes a progressive JPEG of one colour with `scans` scans, which repeats the last scan.
fn bomb(width: usize, height: usize, scans: usize) -> Vec<u8> {
    let pixels = vec![128; 3 * width * height];
    let file = Encoder::new(&pixels, width, height, PixelFormat::Rgb)
        .progressive(true)
        .encode()
        .expect("a JPEG");
    let starts: Vec<_> =
        file.windows(2).enumerate().filter(|(_, pair)| *pair == [0xff, 0xda]).collect();
    let (last, _) = *starts.last().expect("a scan");
    let (head, scan) = file[..file.len() - 2].split_at(last);
    [head, &scan.repeat(scans + 1 - starts.len()), &[0xff, 0xd9]].concat()
}

/// A picture that is available as any number of different files.
struct Picture {
    base64: String,
    next_number: AtomicU64,
}

impl Picture {
    fn new(mut file: Vec<u8>) -> Self {
        // Decoders ignore bytes after the end of a JPEG. A multiple of three bytes encodes without
        // padding, so that more base64 can be appended.
        file.resize(file.len().next_multiple_of(3), 0);
        Self { base64: STANDARD.encode(file), next_number: AtomicU64::default() }
    }

    /// Returns a file that no request has had before.
    fn data_uri(&self) -> String {
        format!("data:image/jpeg;base64,{}{}", self.base64, self.next_suffix())
    }

    /// Returns the last eight characters of a new file.
    fn next_suffix(&self) -> String {
        STANDARD.encode(&self.next_number.fetch_add(1, Ordering::Relaxed).to_be_bytes()[2..])
    }
}

fn images(uris: &[String]) -> Value {
    let parts: Vec<_> =
        uris.iter().map(|uri| json!({"type": "image_url", "image_url": {"url": uri}})).collect();
    json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]})
}

fn text(text: &str) -> Value {
    json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]})
}

#[tokio::test]
async fn small_image_does_not_wait_for_large_ones() {
    let server = serve(&["--max-request-cost", "1000"]).await;
    let small = Picture::new(DAWN.jpeg.to_vec());
    let large = Picture::new(bomb(8000, 6000, 100));
    let all: Vec<_> = (0..6).map(|_| large.data_uri()).collect();
    let url = format!("{}/v1/chat/completions", server.url);
    let body = images(&all).to_string();
    let heavy = client().post(url).header("content-type", "application/json").body(body).send();
    let heavy = tokio::spawn(heavy);
    wait_for("large images", TIMEOUT, async || {
        server.metric("chiasm_cpu_queued_jobs{lane=\"heavy\"}").await >= 1.0
    })
    .await;
    for _ in 0..20 {
        server.chat(&images(&[small.data_uri()])).await.ok();
    }
    assert!(!heavy.is_finished(), "the small images waited for the large ones");
    // Cancelled images leave the queue.
    heavy.abort();
    wait_for("empty queue", TIMEOUT, async || {
        server.metric("chiasm_cpu_queued_jobs{lane=\"heavy\"}").await == 0.0
    })
    .await;
    assert_eq!(server.metric("chiasm_media_decoded_total").await, 20.0);
}

#[tokio::test]
async fn costly_request_is_refused_before_decoding() {
    let server = serve(&["--max-request-cost", "0.25"]).await;
    let body = images(&[Picture::new(bomb(64, 64, 101)).data_uri()]);
    assert_eq!(server.chat(&body).await.refused(413), "messages[0].content[0].image_url");
    server.chat(&images(&[Picture::new(bomb(64, 64, 100)).data_uri()])).await.ok();

    let picture = Picture::new(jpeg(6000, 6000, |_| 128));
    let [first, second] = [(); 2].map(|()| picture.data_uri());
    let both = images(&[first.clone(), second.clone()]);
    let refused = server.chat(&both).await;
    assert!(refused.refused(413).starts_with("messages[0].content["), "{}", refused.text);
    assert_eq!(refused.json()["error"]["code"], "request_too_costly");
    // Each image alone is allowed. An image in the engine's cache costs nothing.
    server.chat(&images(&[first])).await.ok();
    server.chat(&both).await.ok();
}

/// A function that returns the next request body.
type Bodies = Box<dyn Fn() -> Bytes + Send + Sync>;

/// The kind of requests that heavy clients send, as fast as they get answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Workload {
    LargeBodies,
    NestedJson,
    LargeImages,
    ProgressiveBombs,
    ManyMessages,
}

const WORKLOADS: [Workload; 5] = [
    Workload::LargeBodies,
    Workload::NestedJson,
    Workload::LargeImages,
    Workload::ProgressiveBombs,
    Workload::ManyMessages,
];

impl Workload {
    fn bodies(self) -> Bodies {
        let always = |body: String| -> Bodies {
            let body = Bytes::from(body);
            Box::new(move || body.clone())
        };
        let pictures = |count: usize, file: Vec<u8>| -> Bodies {
            let picture = Picture::new(file);
            let uris: Vec<_> = (0..count).map(|_| picture.data_uri()).collect();
            let body = images(&uris).to_string().into_bytes();
            let places: Vec<_> = body
                .windows(2)
                .enumerate()
                .filter(|(_, end)| end == b"\"}")
                .map(|(end, _)| end - 8)
                .collect();
            assert_eq!(places.len(), count);
            // Patches a copy: building bodies from scratch would take CPU time from the server.
            Box::new(move || {
                let mut body = body.clone();
                for place in &places {
                    body[*place..place + 8].copy_from_slice(picture.next_suffix().as_bytes());
                }
                body.into()
            })
        };
        match self {
            Self::LargeBodies => {
                always(text(&"What is the weather like? ".repeat(1_200_000)).to_string())
            }
            Self::NestedJson => {
                let nest = "[".repeat(100) + &"]".repeat(100);
                let nests = vec![nest; 10_000].join(",");
                always(format!("{{\"model\": \"m\", \"metadata\": [{nests}], \"messages\": []}}"))
            }
            // Waves, which don't compress to nothing.
            Self::LargeImages => pictures(2, jpeg(8000, 6000, |at| (at / 40 % 251) as u8)),
            // The maximum number of scans, and more pixels than a camera's.
            Self::ProgressiveBombs => pictures(2, bomb(4000, 4000, 100)),
            Self::ManyMessages => {
                let message = "{\"role\": \"user\", \"content\": \"x\"}";
                always(format!(
                    "{{\"model\": \"m\", \"messages\": [{}]}}",
                    vec![message; 1_000_000].join(",")
                ))
            }
        }
    }
}

/// Clients that send one workload until they are stopped. They share the server's cores, so they
/// run at the lowest priority.
struct HeavyClients {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

const HEAVY_CLIENTS: usize = 4;

/// Sends `body` and returns the answer.
///
/// The body is sent in small pieces: on some machines, no other thread gets the core while the
/// operating system copies a large one.
async fn send_body(address: &str, body: &[u8]) -> String {
    let mut answer = String::new();
    let mut exchange = async || {
        let mut stream = TcpStream::connect(address).await?;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len(),
        );
        stream.write_all(head.as_bytes()).await?;
        for piece in body.chunks(32 << 10) {
            stream.write_all(piece).await?;
        }
        stream.read_to_string(&mut answer).await
    };
    // An answer counts even if the connection breaks afterwards.
    drop(exchange().await);
    answer
}

impl HeavyClients {
    fn start(workload: Workload, server: &Server) -> Self {
        let stop = Arc::new(AtomicBool::default());
        let answers = Arc::new(AtomicU64::default());
        let stopped = stop.clone();
        let answered = answers.clone();
        let address = server.url["http://".len()..].to_owned();
        let bodies = workload.bodies();
        let send_all = async move {
            let send = async || {
                while !stopped.load(Ordering::Relaxed) {
                    let answer = send_body(&address, &bodies()).await;
                    answered
                        .fetch_add(u64::from(answer.starts_with("HTTP/1.1 ")), Ordering::Relaxed);
                }
            };
            futures_util::future::join_all((0..HEAVY_CLIENTS).map(|_| send())).await;
        };
        let thread = std::thread::spawn(move || {
            #[cfg(target_os = "linux")]
            rustix::process::nice(19).expect("a lower priority");
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(send_all);
        });
        Self { stop, answers, thread }
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("no heavy client panicked");
        self.answers.load(Ordering::Relaxed)
    }
}

/// The minimum number of timed requests.
const MIN_REQUESTS: usize = 500;
/// The minimum duration of a measurement, during which several heavy requests start and end.
const MIN_DURATION: Duration = Duration::from_secs(5);

/// The sorted latencies of a client's sequential requests.
struct Latencies(Vec<Duration>);

impl Latencies {
    async fn measure(server: &Server, body: impl Fn() -> Value) -> Self {
        let mut times = Vec::new();
        let started = Instant::now();
        while times.len() < MIN_REQUESTS || started.elapsed() < MIN_DURATION {
            let body = body();
            let sent_at = Instant::now();
            server.chat(&body).await.ok();
            times.push(sent_at.elapsed());
        }
        times.sort();
        Self(times)
    }

    fn percentile(&self, percent: usize) -> Duration {
        self.0[self.0.len() * percent / 100]
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes, and its times are only meaningful on a quiet machine"]
async fn light_client_keeps_its_latency_beside_heavy_ones() {
    const MAX_RATIO: u32 = 4;
    let model = demo_model().display().to_string();
    let handshake = format!("tcp://127.0.0.1:{}", free_port());
    // The engine is a separate process, so that its steps don't wait for the frontend.
    let engine =
        ["sim-engine", "--handshake", &handshake, "--model", &model, "--sim-speedup", "1000"];
    let _engine = Process(chiasm(&engine).stderr(Stdio::null()).spawn().expect("an engine"));
    let server = Server::start(&[&model, "--served-model-name", "m", "--attach", &handshake]);
    server.wait_ready(1, TIMEOUT).await;
    let small = Picture::new(DAWN.jpeg.to_vec());
    let text_latencies =
        async || Latencies::measure(&server, || text("What is the weather like?")).await;
    let image_latencies =
        async || Latencies::measure(&server, || images(&[small.data_uri()])).await;
    // Warm-up.
    drop([text_latencies().await, image_latencies().await]);
    println!("| beside | light | p50 | p99 | heavy requests |\n|---|---|---|---|---|");
    let mut slow = Vec::new();
    for workload in WORKLOADS {
        // Measured immediately before the workload, because the machine's other load changes.
        let alone = [text_latencies().await, image_latencies().await];
        let heavy = HeavyClients::start(workload, &server);
        // After the first answer, every heavy client has a request in flight.
        wait_for("heavy answer", 3 * TIMEOUT, async || heavy.answers.load(Ordering::Relaxed) > 0)
            .await;
        let beside = [text_latencies().await, image_latencies().await];
        let answers = heavy.stop();
        for ((light, alone), beside) in ["text", "image"].into_iter().zip(&alone).zip(&beside) {
            let ratio = beside.percentile(99).as_secs_f64() / alone.percentile(99).as_secs_f64();
            println!(
                "| {workload:?} | {light} | {:.2?} / {:.2?} | {:.2?} / {:.2?} = {ratio:.1} \
                 | {answers} |",
                beside.percentile(50),
                alone.percentile(50),
                beside.percentile(99),
                alone.percentile(99),
            );
            if beside.percentile(99) > MAX_RATIO * alone.percentile(99) {
                slow.push((workload, light, ratio));
            }
        }
    }
    assert!(slow.is_empty(), "{slow:?}");
}
