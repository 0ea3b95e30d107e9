//! HTTPS: certificate renewal, and clients without TLS.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rcgen::CertifiedKey;
use reqwest::redirect::Policy;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::TIMEOUT;
use crate::support::{Server, demo_model, send_signal, wait_for};

/// A folder with a certificate chain and its private key.
struct CertificateFiles(TempDir);

impl CertificateFiles {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a new certificate and returns a client that trusts only that one.
    fn renew(&self) -> reqwest::Client {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(names).expect("a certificate");
        std::fs::write(self.path("key.pem"), signing_key.serialize_pem()).expect("written");
        std::fs::write(self.path("chain.pem"), cert.pem()).expect("written");
        chiasm::install_crypto_provider();
        let trusted = reqwest::Certificate::from_der(cert.der()).expect("a certificate");
        let client = reqwest::Client::builder()
            .no_proxy()
            .redirect(Policy::none())
            .tls_certs_only([trusted]);
        client.build().expect("a client")
    }

    /// Starts a server with this certificate, to be accessed through `client`.
    async fn serve(&self, client: reqwest::Client, flags: &[&str]) -> Server {
        let model = demo_model().display().to_string();
        let key = self.path("key.pem").display().to_string();
        let chain = self.path("chain.pem").display().to_string();
        let args = [
            &model,
            "--served-model-name",
            "m",
            "--sim",
            "1",
            "--ssl-certfile",
            &chain,
            "--ssl-keyfile",
            &key,
        ];
        let mut server = Server::start(&[&args, flags].concat());
        assert!(server.url.starts_with("https://"), "{}", server.url);
        server.client = client;
        server.wait_ready(1, TIMEOUT).await;
        server
    }
}

#[tokio::test]
async fn renewed_certificate_keeps_open_connections() {
    let files = CertificateFiles::new();
    let server = files.serve(files.renew(), &[]).await;
    let messages = json!([{"role": "user", "content": "hello"}]);
    let body = json!({"model": "m", "messages": messages, "stream": true, "max_tokens": 8});
    let chunks = server.chat(&body).await.chunks();
    assert!(chunks.len() > 1, "{chunks:?}");
    // A stream that stays open until the end of the test.
    let long = json!({"prompt": "hello", "stream": true, "max_tokens": 8000, "ignore_eos": true});
    let mut long = server.open("/v1/completions", &long).await;
    assert!(long.chunk().await.expect("a first chunk").is_some());

    std::fs::write(files.path("key.pem"), "no key").expect("written");
    let why = server.wait_for_log("the new certificate can't be used; the old one stays in use");
    assert!(why.contains("key.pem has no private key"), "{why}");
    let health = format!("{}/health", server.url);
    assert_eq!(server.client.get(&health).send().await.expect("an answer").status(), 200);
    let renewed = files.renew();
    wait_for("the new certificate", TIMEOUT, async || renewed.get(&health).send().await.is_ok())
        .await;
    server.wait_for_log("the certificate was reloaded");
    let other = CertificateFiles::new().renew();
    assert!(other.get(&health).send().await.is_err(), "this client trusts another certificate");
    // Connections that were opened with the first certificate still work.
    assert_eq!(server.client.get(&health).send().await.expect("an answer").status(), 200);
    assert!(long.chunk().await.expect("a chunk").is_some());
}

#[tokio::test]
async fn hangup_reloads_certificate_with_keys() {
    let files = CertificateFiles::new();
    let first = files.renew();
    let keys = files.path("keys");
    std::fs::write(&keys, "one\n").expect("written");
    let keys_flag = keys.display().to_string();
    let server = files.serve(first.clone(), &["--api-key-file", &keys_flag, "--ui=on"]).await;
    let models = async |client: &reqwest::Client, key: &str| {
        let answer = client.get(format!("{}/v1/models", server.url)).bearer_auth(key).send().await;
        answer.ok().map(|answer| answer.status().as_u16())
    };
    let login = first
        .post(format!("{}/ui/login", server.url))
        .body("key=one")
        .send()
        .await
        .expect("an answer");
    let cookie = login.headers()["set-cookie"]
        .to_str()
        .expect("text")
        .split(';')
        .next()
        .expect("a cookie")
        .to_owned();
    let session = async |client: &reqwest::Client| {
        let request = client.get(format!("{}/ui/session", server.url)).header("cookie", &cookie);
        request.send().await.expect("an answer").status().as_u16()
    };
    assert_eq!(session(&first).await, 204);

    // An invalid file is ignored; the valid one is loaded.
    let renewed = files.renew();
    std::fs::write(&keys, "# none\n").expect("written");
    send_signal(server.pid(), "HUP");
    assert!(
        server
            .wait_for_log("the new API keys can't be used; the old ones stay in use")
            .contains("has no API key")
    );
    assert_eq!(models(&renewed, "one").await, Some(200), "the new certificate with the old key");

    std::fs::write(&keys, "two\n").expect("written");
    std::fs::write(files.path("key.pem"), "no key").expect("written");
    send_signal(server.pid(), "HUP");
    server.wait_for_log("the API keys were reloaded");
    assert!(server.count_logged("the new certificate can't be used; the old one stays in use") > 0);
    assert_eq!(models(&renewed, "one").await, Some(401));
    assert_eq!(models(&renewed, "two").await, Some(200));
    assert_eq!(session(&renewed).await, 401, "the session's key is no longer valid");
    assert!(server.terminate(TIMEOUT).await, "an orderly shutdown");
}

/// Sends `bytes` without TLS. Returns the answer, and the time until the connection is closed.
async fn send_plain(server: &Server, bytes: &[u8]) -> (Vec<u8>, Duration) {
    let started = Instant::now();
    let mut stream =
        TcpStream::connect(server.url.trim_start_matches("https://")).await.expect("a connection");
    stream.write_all(bytes).await.expect("sent");
    let mut answer = Vec::new();
    // A reset counts as closed.
    let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer))
        .await
        .expect("closed in time");
    (answer, started.elapsed())
}

#[tokio::test]
async fn clients_without_tls_are_closed_by_the_deadline() {
    let files = CertificateFiles::new();
    let deadline = Duration::from_secs(4);
    let server = files.serve(files.renew(), &["--head-timeout", "4"]).await;
    for plain in [&b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"[..], &[0; 5000]] {
        let (answer, time) = send_plain(&server, plain).await;
        assert!(answer.len() <= 7, "more than an alert: {answer:?}");
        assert!(time < deadline, "{time:?}");
    }
    // Handshakes that never start or never finish.
    let (silent, partial) =
        tokio::join!(send_plain(&server, b""), send_plain(&server, b"\x16\x03\x01"));
    for (answer, time) in [silent, partial] {
        assert!(answer.is_empty() && time >= deadline, "{answer:?} after {time:?}");
    }
    assert_eq!(server.metric("chiasm_closed_connections_total{cause=\"handshake\"}").await, 4.0);
    wait_for("end", TIMEOUT, async || server.metric("chiasm_connections").await == 1.0).await;
}
