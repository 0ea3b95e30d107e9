//! A `chiasm` process and an HTTP client, as a user has them.
#![allow(unreachable_pub, reason = "modules of one test binary")]

pub mod adapters;
pub mod etcd;
pub mod event_grammar;
pub mod hostile_origin;
pub mod origin;
pub mod scenario_run;
pub mod stand_ins;
pub mod vllm_serves;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use reqwest::header::HeaderMap;
use serde_json::Value;
use tempfile::TempDir;

/// The demo's model directory: no weights, fine for simulated engines.
pub fn demo_model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/model")
}

/// A command line of the binary under test.
pub fn chiasm(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chiasm"));
    command.args(args);
    command
}

/// A running `chiasm serve`. Killed when dropped.
pub struct Server {
    child: Child,
    /// `http://127.0.0.1:port`, or `https:`
    pub url: String,
    pub client: reqwest::Client,
    log: Arc<Mutex<Vec<String>>>,
    /// Until then nobody reads its log.
    stalled: Arc<Mutex<Option<Instant>>>,
    /// Its state folder unless it was told another one: the user's own is none of a test's.
    _state: TempDir,
}

impl Server {
    /// Starts `chiasm serve` with these arguments on a free port and waits until it listens.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    /// The same with variables in its environment, which engines that it launches inherit.
    pub fn start_with(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let state = tempfile::tempdir().expect("a folder");
        let mut child = chiasm(&["serve"])
            .args(args)
            .env("CHIASM_STATE_DIR", state.path())
            .envs(variables.iter().copied())
            .args(if args.contains(&"--") { &[][..] } else { &["--port", "0"][..] })
            .stderr(Stdio::piped())
            .spawn()
            .expect("chiasm starts");
        let stderr = child.stderr.take().expect("stderr is piped");
        let (sender, url) = mpsc::channel();
        let log = Arc::new(Mutex::new(Vec::new()));
        let stalled = Arc::new(Mutex::new(None));
        let (lines, stalls) = (log.clone(), stalled.clone());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let until: Option<Instant> = stalls.lock().expect("not poisoned").take();
                if let Some(rest) =
                    until.and_then(|until| until.checked_duration_since(Instant::now()))
                {
                    std::thread::sleep(rest);
                }
                eprintln!("  | {line}");
                lines.lock().expect("not poisoned").push(line.clone());
                if let Some((_, url)) = line.split_once(" url=http") {
                    let _ = sender.send(format!("http{}", url.trim_end_matches("/v1")));
                }
            }
        });
        let url = url.recv_timeout(Duration::from_secs(60)).expect("it says where it listens");
        Self { child, url, client: client(), log, stalled, _state: state }
    }

    /// Stops reading its log for this long.
    pub fn stall_log(&self, time: Duration) {
        *self.stalled.lock().expect("not poisoned") = Some(Instant::now() + time);
    }

    /// The rest of the last line of its log that has this text in it. Lines are written a little
    /// after what they tell of.
    pub fn logged(&self, text: &str) -> String {
        let patience = Instant::now() + Duration::from_secs(10);
        loop {
            let log = self.log.lock().expect("not poisoned");
            if let Some(rest) =
                log.iter().rev().find_map(|line| Some(line.split_once(text)?.1.to_owned()))
            {
                return rest;
            }
            drop(log);
            assert!(Instant::now() < patience, "nothing was logged with '{text}'");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The last line of its log that has this text in it.
    pub fn logged_line(&self, text: &str) -> String {
        self.logged(text);
        let log = self.log.lock().expect("not poisoned");
        log.iter().rev().find(|line| line.contains(text)).cloned().unwrap_or_default()
    }

    /// Number of lines of its log that have this text in them.
    pub fn lines_logged(&self, text: &str) -> usize {
        self.log.lock().expect("not poisoned").iter().filter(|line| line.contains(text)).count()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A field of `/proc/PID/status` that is a number of kB, in bytes.
    pub fn status_bytes(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))
            .expect("the process lives");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
            .expect("a field");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    }

    /// Bytes of resident memory, without shared memory.
    pub fn resident(&self) -> u64 {
        self.status_bytes("RssAnon") + self.status_bytes("RssFile")
    }

    /// Waits until so many workers are ready.
    pub async fn wait_ready(&self, workers: u64, patience: Duration) {
        let what = format!("{workers} ready workers");
        wait_for(&what, patience, async || self.ready_workers().await == workers).await;
    }

    pub async fn ready_workers(&self) -> u64 {
        let Ok(response) = self.client.get(format!("{}/ready", self.url)).send().await else {
            return 0;
        };
        let body: Value = json(response).await;
        body["workers"].as_u64().unwrap_or(0)
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::of(self.open(path, body).await).await
    }

    pub async fn chat(&self, body: &Value) -> Answer {
        self.post("/v1/chat/completions", body).await
    }

    /// Sends a streaming request and gives the response as soon as its head is there.
    pub async fn open(&self, path: &str, body: &Value) -> reqwest::Response {
        self.client
            .post(format!("{}{path}", self.url))
            .header("content-type", "application/json")
            .body(body.to_string())
            .send()
            .await
            .expect("the server answers")
    }

    /// The sum of a metric's samples that start with `name`.
    pub async fn metric(&self, name: &str) -> f64 {
        let response =
            self.client.get(format!("{}/metrics", self.url)).send().await.expect("metrics");
        let text = response.text().await.expect("text");
        let samples = text.lines().filter(|line| line.starts_with(name));
        samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Sends a signal that ends it, and waits for that.
    pub fn end_by(&mut self, signal: &str) {
        send_signal(self.pid(), signal);
        self.child.wait().expect("it ends");
    }

    /// Sends SIGTERM and waits for the end; true if it ended well within `patience`.
    pub async fn terminate(mut self, patience: Duration) -> bool {
        send_signal(self.pid(), "TERM");
        let started = Instant::now();
        while started.elapsed() < patience {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status.success();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Another process of the test. Killed when dropped.
pub struct Process(pub Child);

impl Process {
    /// Kills it and waits for its end.
    pub fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// A whole answer.
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    pub async fn of(response: reqwest::Response) -> Self {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Self { status, headers, text: response.text().await.expect("a body") }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The body of an answer that must be a success.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    /// `error.param` of an answer that must be refused with this status.
    #[track_caller]
    pub fn refused(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text);
        let error = &self.json()["error"];
        assert!(
            error["message"].as_str().is_some_and(|message| !message.is_empty()),
            "{}",
            self.text
        );
        error["param"].as_str().unwrap_or_default().to_owned()
    }

    pub fn header(&self, name: &str) -> String {
        let value = self.headers.get(name).unwrap_or_else(|| panic!("no {name}"));
        value.to_str().expect("text").to_owned()
    }

    /// The chunks of a streamed answer, which must keep the grammar of chats and completions and
    /// end with `[DONE]`.
    #[track_caller]
    pub fn chunks(&self) -> Vec<Value> {
        event_grammar::chat(&self.text);
        let data: Vec<&str> =
            self.text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        let (last, chunks) = data.split_last().expect("at least one event");
        assert_eq!(*last, "[DONE]");
        chunks.iter().map(|chunk| serde_json::from_str(chunk).expect("JSON")).collect()
    }
}

pub fn client() -> reqwest::Client {
    chiasm::use_ring();
    // The system gives up a connection whose server reads nothing for 30 s by default, which a busy
    // one may do.
    let client = reqwest::Client::builder()
        .no_proxy()
        .timeout(Duration::from_secs(120))
        .tcp_user_timeout(None);
    client.build().expect("a client")
}

pub async fn json(response: reqwest::Response) -> Value {
    serde_json::from_str(&response.text().await.expect("a body")).unwrap_or_default()
}

/// Polls until the condition holds; fails after `patience`.
pub async fn wait_for(
    what: &str,
    patience: Duration,
    condition: impl AsyncFn() -> bool,
) -> Duration {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < patience, "no {what} within {patience:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    started.elapsed()
}

pub fn send_signal(pid: u32, signal: &str) {
    let status =
        Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status().expect("kill");
    assert!(status.success(), "kill -{signal} {pid}");
}

/// A port that was free a moment ago, and that no outgoing connection is given: an engine that
/// looks for its frontend where nobody listens could otherwise be connected to itself, and hold the
/// port for ever.
pub fn free_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .expect("the range of outgoing ports");
    let first: u16 =
        range.split_whitespace().next().and_then(|first| first.parse().ok()).expect("a port");
    let is_free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(|| rand::random_range(first / 2..first))
        .take(1000)
        .find(is_free)
        .expect("a free port")
}
