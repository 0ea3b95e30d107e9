//! A `chiasm` process and an HTTP client for it, set up as a user would.
#![allow(unreachable_pub, reason = "modules of one test binary")]

pub mod adapters;
pub mod etcd;
pub mod event_grammar;
pub mod hostile_origin;
pub mod origin;
pub mod scenario_run;
pub mod scripted_videos;
pub mod stand_ins;
pub mod video_scenarios;
pub mod vllm_serves;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use reqwest::header::HeaderMap;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use serde_json::Value;
use tempfile::TempDir;

/// Returns the demo's model directory. It has no weights, which simulated engines don't need.
pub fn demo_model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/model")
}

/// Returns a command that runs the binary under test.
pub fn chiasm(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chiasm"));
    command.args(args);
    command
}

/// A running `chiasm serve`. Killed when dropped.
pub struct Server {
    child: Child,
    /// `http://127.0.0.1:port` or `https://127.0.0.1:port`.
    pub url: String,
    pub client: reqwest::Client,
    log: Arc<Mutex<Vec<String>>>,
    /// The end of a pause in reading the server's log.
    stalled_until: Arc<Mutex<Option<Instant>>>,
    /// The default state folder, so that tests don't touch the user's own.
    _state: TempDir,
}

impl Server {
    /// Starts `chiasm serve` with `args` on a free port and waits until it listens.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    /// Like [`start`](Self::start), with environment variables that launched engines inherit.
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
        let stalled_until = Arc::new(Mutex::new(None));
        let lines = log.clone();
        let stalls = stalled_until.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let until: Option<Instant> = stalls.lock().expect("not poisoned").take();
                if let Some(pause) =
                    until.and_then(|until| until.checked_duration_since(Instant::now()))
                {
                    std::thread::sleep(pause);
                }
                eprintln!("  | {line}");
                lines.lock().expect("not poisoned").push(line.clone());
                if let Some((_, url)) = line.split_once(" url=http") {
                    let _ = sender.send(format!("http{}", url.trim_end_matches("/v1")));
                }
            }
        });
        let url = url.recv_timeout(Duration::from_secs(60)).expect("the server logs its URL");
        Self { child, url, client: client(), log, stalled_until, _state: state }
    }

    /// Stops reading the server's log for `time`.
    pub fn stall_log(&self, time: Duration) {
        *self.stalled_until.lock().expect("not poisoned") = Some(Instant::now() + time);
    }

    /// Waits for a log line that contains `text`. Returns the part of the last such line after
    /// `text`.
    ///
    /// Lines arrive a little after the event that they report.
    pub fn wait_for_log(&self, text: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let log = self.log.lock().expect("not poisoned");
            if let Some(rest) =
                log.iter().rev().find_map(|line| Some(line.split_once(text)?.1.to_owned()))
            {
                return rest;
            }
            drop(log);
            assert!(Instant::now() < deadline, "no log line with '{text}'");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for a log line that contains `text`. Returns the last such line.
    pub fn wait_for_log_line(&self, text: &str) -> String {
        self.wait_for_log(text);
        let log = self.log.lock().expect("not poisoned");
        log.iter().rev().find(|line| line.contains(text)).cloned().unwrap_or_default()
    }

    /// Returns the number of log lines so far that contain `text`.
    pub fn count_logged(&self, text: &str) -> usize {
        self.log.lock().expect("not poisoned").iter().filter(|line| line.contains(text)).count()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns a field of `/proc/PID/status` that is given in kB, in bytes.
    pub fn status_bytes(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))
            .expect("the process lives");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
            .expect("a field");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    }

    /// Returns the bytes of resident memory, without shared memory.
    pub fn resident(&self) -> u64 {
        self.status_bytes("RssAnon") + self.status_bytes("RssFile")
    }

    /// Waits until exactly `workers` workers are ready; fails after `timeout`.
    pub async fn wait_ready(&self, workers: u64, timeout: Duration) {
        let what = format!("{workers} ready workers");
        wait_for(&what, timeout, async || self.ready_workers().await == workers).await;
    }

    pub async fn ready_workers(&self) -> u64 {
        let Ok(response) = self.client.get(format!("{}/ready", self.url)).send().await else {
            return 0;
        };
        let body: Value = json(response).await;
        body["workers"].as_u64().unwrap_or(0)
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::read(self.open(path, body).await).await
    }

    pub async fn chat(&self, body: &Value) -> Answer {
        self.post("/v1/chat/completions", body).await
    }

    /// Sends a request and returns the response as soon as its head has arrived.
    pub async fn open(&self, path: &str, body: &Value) -> reqwest::Response {
        self.client
            .post(format!("{}{path}", self.url))
            .header("content-type", "application/json")
            .body(body.to_string())
            .send()
            .await
            .expect("the server answers")
    }

    /// Returns the sum of all samples in `/metrics` that start with `name`.
    pub async fn metric(&self, name: &str) -> f64 {
        let response =
            self.client.get(format!("{}/metrics", self.url)).send().await.expect("metrics");
        let text = response.text().await.expect("text");
        let samples = text.lines().filter(|line| line.starts_with(name));
        samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Sends a signal that ends the process, and waits for its exit.
    pub fn signal_and_wait(&mut self, signal: &str) {
        send_signal(self.pid(), signal);
        self.child.wait().expect("the process ends");
    }

    /// Sends SIGTERM. Returns `true` if the process exits with status 0 within `timeout`.
    pub async fn terminate(mut self, timeout: Duration) -> bool {
        send_signal(self.pid(), "TERM");
        let started = Instant::now();
        while started.elapsed() < timeout {
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

/// A child process of the test. Killed when dropped.
pub struct Process(pub Child);

impl Process {
    /// Kills the process and waits for its exit.
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

/// A response whose body was read completely.
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    /// Reads the body of `response` to its end.
    pub async fn read(response: reqwest::Response) -> Self {
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        Self { status, headers, text: response.text().await.expect("a body") }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// Asserts status 200 and returns the body.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    /// Asserts that the request was refused with `status` and a message. Returns `error.param`.
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

    /// Returns the chunks of a streamed chat or completion.
    ///
    /// Asserts that the stream keeps their grammar and ends with `[DONE]`.
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
    chiasm::install_crypto_provider();
    // By default, a connection is dropped when the server reads nothing for 30 s. A busy server may
    // need longer.
    let client = reqwest::Client::builder()
        .no_proxy()
        .timeout(Duration::from_secs(120))
        .tcp_user_timeout(None);
    client.build().expect("a client")
}

pub async fn json(response: reqwest::Response) -> Value {
    serde_json::from_str(&response.text().await.expect("a body")).unwrap_or_default()
}

/// Polls until the condition holds and returns the time that took; fails after `timeout`.
pub async fn wait_for(
    what: &str,
    timeout: Duration,
    condition: impl AsyncFn() -> bool,
) -> Duration {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < timeout, "no {what} within {timeout:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    started.elapsed()
}

/// Sends a signal to a child process. For `STOP`, returns when all of its threads have stopped:
/// until then it may still answer requests.
pub fn send_signal(pid: u32, signal: &str) {
    let status =
        Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status().expect("kill");
    assert!(status.success(), "kill -{signal} {pid}");
    if signal == "STOP" {
        let pid = Pid::from_raw(pid.try_into().expect("a process ID")).expect("a process ID");
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(pid), options).expect("a child of this process");
    }
}

/// Returns a port that is free and outside the range of outgoing connections.
///
/// With a port from that range, an engine that connects to its frontend before the frontend listens
/// could connect to itself and hold the port forever.
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
