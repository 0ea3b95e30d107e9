//! A light client beside heavy ones: what others ask for must not be what it waits for.

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

const SOON: Duration = Duration::from_secs(20);

async fn serve(extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(1, SOON).await;
    server
}

/// A JPEG whose samples are a function of their place.
fn jpeg(width: usize, height: usize, sample: impl Fn(usize) -> u8) -> Vec<u8> {
    let pixels: Vec<u8> = (0..3 * width * height).map(sample).collect();
    Encoder::new(&pixels, width, height, PixelFormat::Rgb).encode().expect("a JPEG")
}

/// A progressive JPEG of one colour with so many scans, all but the first few of them the same.
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

/// A picture that can be had in as many files of different content as wanted.
struct Picture {
    base64: String,
    next: AtomicU64,
}

impl Picture {
    fn new(mut file: Vec<u8>) -> Self {
        // What follows the end of a JPEG file is nobody's business; so much that base64 can be
        // appended to.
        file.resize(file.len().next_multiple_of(3), 0);
        Self { base64: STANDARD.encode(file), next: AtomicU64::default() }
    }

    /// A file that no request has had before.
    fn data_uri(&self) -> String {
        format!("data:image/jpeg;base64,{}{}", self.base64, self.number())
    }

    /// The last eight characters of such a file.
    fn number(&self) -> String {
        STANDARD.encode(&self.next.fetch_add(1, Ordering::Relaxed).to_be_bytes()[2..])
    }
}

fn images(uris: &[String]) -> Value {
    let parts = uris.iter().map(|uri| json!({"type": "image_url", "image_url": {"url": uri}}));
    json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": parts.collect::<Vec<_>>()}]})
}

fn text(text: &str) -> Value {
    json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]})
}

#[tokio::test]
async fn a_small_image_does_not_wait_for_large_ones() {
    let server = serve(&["--max-request-cost", "1000"]).await;
    let (small, large) = (Picture::new(DAWN.jpeg.to_vec()), Picture::new(bomb(8000, 6000, 100)));
    let all: Vec<_> = (0..6).map(|_| large.data_uri()).collect();
    let (url, body) = (format!("{}/v1/chat/completions", server.url), images(&all).to_string());
    let heavy = client().post(url).header("content-type", "application/json").body(body).send();
    let heavy = tokio::spawn(heavy);
    wait_for("large images", SOON, async || {
        server.metric("chiasm_cpu_queued_jobs{lane=\"heavy\"}").await >= 1.0
    })
    .await;
    for _ in 0..20 {
        server.chat(&images(&[small.data_uri()])).await.ok();
    }
    assert!(!heavy.is_finished(), "the small images came after the large ones");
    // Nobody waits for them any more.
    heavy.abort();
    wait_for("empty queue", SOON, async || {
        server.metric("chiasm_cpu_queued_jobs{lane=\"heavy\"}").await == 0.0
    })
    .await;
    assert_eq!(server.metric("chiasm_media_decoded_total").await, 20.0);
}

#[tokio::test]
async fn what_would_take_too_long_is_refused_before_it_is_done() {
    let server = serve(&["--max-request-cost", "0.25"]).await;
    let question = images(&[Picture::new(bomb(64, 64, 101)).data_uri()]);
    assert_eq!(server.chat(&question).await.refused(413), "messages[0].content[0].image_url");
    server.chat(&images(&[Picture::new(bomb(64, 64, 100)).data_uri()])).await.ok();

    let picture = Picture::new(jpeg(6000, 6000, |_| 128));
    let [first, second] = [(); 2].map(|()| picture.data_uri());
    let both = images(&[first.clone(), second.clone()]);
    let refused = server.chat(&both).await;
    assert!(refused.refused(413).starts_with("messages[0].content["), "{}", refused.text);
    assert_eq!(refused.json()["error"]["code"], "request_too_costly");
    // Each alone may be had, and what the engine then holds costs nothing.
    server.chat(&images(&[first])).await.ok();
    server.chat(&both).await.ok();
}

/// Makes the bodies of requests, one after the other.
type Bodies = Box<dyn Fn() -> Bytes + Send + Sync>;

/// What heavy clients send, as fast as they get answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mix {
    LargeBodies,
    NestedJson,
    LargeImages,
    ProgressiveBombs,
    ManyMessages,
}

const MIXES: [Mix; 5] =
    [Mix::LargeBodies, Mix::NestedJson, Mix::LargeImages, Mix::ProgressiveBombs, Mix::ManyMessages];

impl Mix {
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
            // Made without effort, which would be taken from the server's cores.
            Box::new(move || {
                let mut body = body.clone();
                for place in &places {
                    body[*place..place + 8].copy_from_slice(picture.number().as_bytes());
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
            // Waves, which take some bytes.
            Self::LargeImages => pictures(2, jpeg(8000, 6000, |at| (at / 40 % 251) as u8)),
            // As many scans as are let in, and more pixels than a camera has.
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

/// Clients that send one mix until this is stopped. They share the server's cores, so they give way
/// to whatever else runs.
struct HeavyClients {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

const HEAVY_CLIENTS: usize = 4;

/// What is answered to this body. It is sent in small pieces: while the operating system copies a
/// large one, on some machines no other thread can have the core.
async fn ask(address: &str, body: &[u8]) -> String {
    let mut answer = String::new();
    let mut asked = async || {
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
    // What came before a broken connection counts.
    drop(asked().await);
    answer
}

impl HeavyClients {
    fn start(mix: Mix, server: &Server) -> Self {
        let (stop, answers) = (Arc::new(AtomicBool::default()), Arc::new(AtomicU64::default()));
        let (stopped, answered, address) =
            (stop.clone(), answers.clone(), server.url["http://".len()..].to_owned());
        let bodies = mix.bodies();
        let send_all = async move {
            let send = async || {
                while !stopped.load(Ordering::Relaxed) {
                    let answer = ask(&address, &bodies()).await;
                    answered
                        .fetch_add(u64::from(answer.starts_with("HTTP/1.1 ")), Ordering::Relaxed);
                }
            };
            futures_util::future::join_all((0..HEAVY_CLIENTS).map(|_| send())).await;
        };
        let thread = std::thread::spawn(move || {
            #[cfg(target_os = "linux")]
            rustix::process::nice(19).expect("nicer");
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

/// How many requests are timed, and for how long: several heavy requests come and go meanwhile.
const FEWEST_REQUESTS: usize = 500;
const SHORTEST: Duration = Duration::from_secs(5);

/// Times of one client's requests, one after the other.
struct Times(Vec<Duration>);

impl Times {
    async fn of(server: &Server, body: impl Fn() -> Value) -> Self {
        let (mut times, started) = (Vec::new(), Instant::now());
        while times.len() < FEWEST_REQUESTS || started.elapsed() < SHORTEST {
            let body = body();
            let asked = Instant::now();
            server.chat(&body).await.ok();
            times.push(asked.elapsed());
        }
        times.sort();
        Self(times)
    }

    fn at(&self, percent: usize) -> Duration {
        self.0[self.0.len() * percent / 100]
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes, and its times mean something on a quiet machine only"]
async fn a_light_client_is_served_beside_every_heavy_mix() {
    const MOST: u32 = 4;
    let (model, handshake) =
        (demo_model().display().to_string(), format!("tcp://127.0.0.1:{}", free_port()));
    // An engine of its own: its steps wait for nothing that the frontend does.
    let engine =
        ["sim-engine", "--handshake", &handshake, "--model", &model, "--sim-speedup", "1000"];
    let _engine = Process(chiasm(&engine).stderr(Stdio::null()).spawn().expect("an engine"));
    let server = Server::start(&[&model, "--served-model-name", "m", "--attach", &handshake]);
    server.wait_ready(1, SOON).await;
    let small = Picture::new(DAWN.jpeg.to_vec());
    let text_times = async || Times::of(&server, || text("What is the weather like?")).await;
    let image_times = async || Times::of(&server, || images(&[small.data_uri()])).await;
    // Once for whatever first requests do.
    drop([text_times().await, image_times().await]);
    println!("| beside | light | p50 | p99 | heavy requests |\n|---|---|---|---|---|");
    let mut slow = Vec::new();
    for mix in MIXES {
        // Right before, as the machine's other work changes.
        let alone = [text_times().await, image_times().await];
        let heavy = HeavyClients::start(mix, &server);
        // By then all of its clients have one under way.
        wait_for("heavy answer", 3 * SOON, async || heavy.answers.load(Ordering::Relaxed) > 0)
            .await;
        let beside = [text_times().await, image_times().await];
        let answers = heavy.stop();
        for ((light, alone), beside) in ["text", "image"].into_iter().zip(&alone).zip(&beside) {
            let ratio = beside.at(99).as_secs_f64() / alone.at(99).as_secs_f64();
            println!(
                "| {mix:?} | {light} | {:.2?} / {:.2?} | {:.2?} / {:.2?} = {ratio:.1} | {answers} |",
                beside.at(50),
                alone.at(50),
                beside.at(99),
                alone.at(99),
            );
            if beside.at(99) > MOST * alone.at(99) {
                slow.push((mix, light, ratio));
            }
        }
    }
    assert!(slow.is_empty(), "{slow:?}");
}
