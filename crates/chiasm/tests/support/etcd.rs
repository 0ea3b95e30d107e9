//! A real etcd server, started from the binary in `CHIASM_TEST_ETCD`.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{send_signal, wait_for};

/// The deadline for etcd's start on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The key prefix under which agents are announced.
const PREFIX: &str = "chiasm/test/";

/// A running etcd. Killed when dropped.
pub struct Etcd {
    child: Child,
    port: u16,
    peer_port: u16,
    folder: TempDir,
    client: reqwest::Client,
}

impl Etcd {
    pub async fn start() -> Self {
        chiasm::install_crypto_provider();
        let [port, peer_port] = [(); 2]
            .map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"))
            .map(|listener| listener.local_addr().expect("an address").port());
        let folder = tempfile::tempdir().expect("a folder");
        let child = spawn(port, peer_port, &folder, "first");
        let etcd = Self { child, port, peer_port, folder, client: reqwest::Client::new() };
        etcd.wait_healthy().await;
        etcd
    }

    /// Returns the URL for `--discovery` and `--announce`.
    pub fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}/{PREFIX}", self.port)
    }

    /// Returns `host:port`.
    pub fn server(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn signal(&self, signal: &str) {
        send_signal(self.child.id(), signal);
    }

    /// Restarts etcd on the same port with an empty store.
    pub async fn restart_empty(&mut self) {
        self.kill();
        self.child = spawn(self.port, self.peer_port, &self.folder, "second");
        self.wait_healthy().await;
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }

    /// Announces an agent, as an operator does by hand.
    pub async fn put(&self, name: &str, address: &str) {
        let value = json!({"address": address}).to_string();
        self.call(
            "kv/put",
            json!({"key": base64(&format!("{PREFIX}{name}")), "value": base64(&value)}),
        )
        .await;
    }

    pub async fn delete(&self, name: &str) {
        self.call("kv/deleterange", json!({"key": base64(&format!("{PREFIX}{name}"))})).await;
    }

    async fn call(&self, path: &str, body: Value) {
        let url = format!("http://127.0.0.1:{}/v3/{path}", self.port);
        let answer = self.client.post(url).body(body.to_string()).send().await.expect("an answer");
        assert!(answer.status().is_success(), "{path}: {}", answer.status());
    }

    async fn wait_healthy(&self) {
        let health = format!("http://127.0.0.1:{}/health", self.port);
        let is_healthy = async || {
            self.client.get(&health).send().await.is_ok_and(|answer| answer.status().is_success())
        };
        wait_for("etcd", TIMEOUT, is_healthy).await;
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Spawns etcd with its data in the subfolder `data_dir` of `folder`.
fn spawn(port: u16, peer_port: u16, folder: &TempDir, data_dir: &str) -> Child {
    let program = std::env::var_os("CHIASM_TEST_ETCD")
        .expect("CHIASM_TEST_ETCD must be the path of the etcd to test with");
    let [client, peer] = [port, peer_port].map(|port| format!("http://127.0.0.1:{port}"));
    let mut etcd = Command::new(program);
    etcd.arg("--data-dir").arg(folder.path().join(data_dir));
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
