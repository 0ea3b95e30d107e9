//! A real etcd, which `CHIASM_TEST_ETCD` names.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{send_signal, wait_for};

/// How long it may take to start on a busy machine.
const SOON: Duration = Duration::from_secs(30);
/// The prefix that agents are named below.
const PREFIX: &str = "chiasm/test/";

/// Killed when dropped.
pub struct Etcd {
    child: Child,
    port: u16,
    peer: u16,
    folder: TempDir,
    client: reqwest::Client,
}

impl Etcd {
    pub async fn start() -> Self {
        chiasm::use_ring();
        let [port, peer] = [(); 2]
            .map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"))
            .map(|listener| listener.local_addr().expect("an address").port());
        let folder = tempfile::tempdir().expect("a folder");
        let child = spawn(port, peer, &folder, "first");
        let etcd = Self { child, port, peer, folder, client: reqwest::Client::new() };
        etcd.wait().await;
        etcd
    }

    /// For `--discovery` and `--announce`.
    pub fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}/{PREFIX}", self.port)
    }

    /// `host:port`.
    pub fn server(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn signal(&self, signal: &str) {
        send_signal(self.child.id(), signal);
    }

    /// Starts it again where it was, knowing nothing.
    pub async fn restart_empty(&mut self) {
        self.kill();
        self.child = spawn(self.port, self.peer, &self.folder, "second");
        self.wait().await;
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }

    /// Names an agent, as an operator would who does that by hand.
    pub async fn put(&self, name: &str, address: &str) {
        let value = json!({"address": address}).to_string();
        self.ask(
            "kv/put",
            json!({"key": base64(&format!("{PREFIX}{name}")), "value": base64(&value)}),
        )
        .await;
    }

    pub async fn delete(&self, name: &str) {
        self.ask("kv/deleterange", json!({"key": base64(&format!("{PREFIX}{name}"))})).await;
    }

    async fn ask(&self, call: &str, body: Value) {
        let url = format!("http://127.0.0.1:{}/v3/{call}", self.port);
        let answer = self.client.post(url).body(body.to_string()).send().await.expect("an answer");
        assert!(answer.status().is_success(), "{call}: {}", answer.status());
    }

    async fn wait(&self) {
        let health = format!("http://127.0.0.1:{}/health", self.port);
        let is_healthy = async || {
            self.client.get(&health).send().await.is_ok_and(|answer| answer.status().is_success())
        };
        wait_for("etcd", SOON, is_healthy).await;
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(port: u16, peer: u16, folder: &TempDir, data: &str) -> Child {
    let program = std::env::var_os("CHIASM_TEST_ETCD")
        .expect("CHIASM_TEST_ETCD has to name the etcd to test with");
    let [client, peer] = [port, peer].map(|port| format!("http://127.0.0.1:{port}"));
    let mut etcd = Command::new(program);
    etcd.arg("--data-dir").arg(folder.path().join(data));
    etcd.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    etcd.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    etcd.args(["--initial-cluster", &format!("default={peer}")]);
    etcd.stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd starts")
}

fn base64(text: &str) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(text)
}
