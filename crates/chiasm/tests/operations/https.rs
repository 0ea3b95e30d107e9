//! HTTPS: certificates that are renewed, and clients that speak no TLS.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rcgen::CertifiedKey;
use reqwest::redirect::Policy;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::SOON;
use crate::support::{Server, demo_model, send_signal, wait_for};

/// The files of a certificate.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Puts a new certificate there, and gives a client that trusts it alone.
    fn renew(&self) -> reqwest::Client {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(names).expect("a certificate");
        std::fs::write(self.path("key.pem"), signing_key.serialize_pem()).expect("written");
        std::fs::write(self.path("chain.pem"), cert.pem()).expect("written");
        chiasm::use_ring();
        let trusted = reqwest::Certificate::from_der(cert.der()).expect("a certificate");
        let client = reqwest::Client::builder()
            .no_proxy()
            .redirect(Policy::none())
            .tls_certs_only([trusted]);
        client.build().expect("a client")
    }

    /// A server with this certificate, asked by this client.
    async fn serve(&self, client: reqwest::Client, flags: &[&str]) -> Server {
        let (model, key) =
            (demo_model().display().to_string(), self.path("key.pem").display().to_string());
        let chain = self.path("chain.pem").display().to_string();
        let own = [
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
        let mut server = Server::start(&[&own, flags].concat());
        assert!(server.url.starts_with("https://"), "{}", server.url);
        server.client = client;
        server.wait_ready(1, SOON).await;
        server
    }
}

#[tokio::test]
async fn a_renewed_certificate_is_taken_and_open_connections_stay() {
    let files = Files::new();
    let server = files.serve(files.renew(), &[]).await;
    let ask = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": true, "max_tokens": 8});
    let chunks = server.chat(&ask).await.chunks();
    assert!(chunks.len() > 1, "{chunks:?}");
    // One that is still open when all is done.
    let long = json!({"prompt": "hello", "stream": true, "max_tokens": 8000, "ignore_eos": true});
    let mut long = server.open("/v1/completions", &long).await;
    assert!(long.chunk().await.expect("a first chunk").is_some());

    std::fs::write(files.path("key.pem"), "no key").expect("written");
    let told = server.logged("the new certificate is not taken, the old one stays");
    assert!(told.contains("key.pem has no private key"), "{told}");
    let health = format!("{}/health", server.url);
    assert_eq!(server.client.get(&health).send().await.expect("an answer").status(), 200);
    let renewed = files.renew();
    wait_for("the new certificate", SOON, async || renewed.get(&health).send().await.is_ok()).await;
    server.logged("the certificate has been read again");
    let other = Files::new().renew();
    assert!(other.get(&health).send().await.is_err(), "it trusts another one");
    // Both are on connections of their own that were made under the first one.
    assert_eq!(server.client.get(&health).send().await.expect("an answer").status(), 200);
    assert!(long.chunk().await.expect("a chunk").is_some());
}

#[tokio::test]
async fn hangup_reloads_certificate_and_keys() {
    let files = Files::new();
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
        let asked = client.get(format!("{}/ui/session", server.url)).header("cookie", &cookie);
        asked.send().await.expect("an answer").status().as_u16()
    };
    assert_eq!(session(&first).await, 204);

    // A file that can't be used changes nothing, and the others are taken.
    let renewed = files.renew();
    std::fs::write(&keys, "# none\n").expect("written");
    send_signal(server.pid(), "HUP");
    assert!(
        server
            .logged("the new API keys are not taken, the old ones stay")
            .contains("has no API key")
    );
    assert_eq!(
        models(&renewed, "one").await,
        Some(200),
        "by the new certificate, with the old key"
    );

    std::fs::write(&keys, "two\n").expect("written");
    std::fs::write(files.path("key.pem"), "no key").expect("written");
    send_signal(server.pid(), "HUP");
    server.logged("the API keys have been read again");
    assert!(server.lines_logged("the new certificate is not taken, the old one stays") > 0);
    assert_eq!(models(&renewed, "one").await, Some(401));
    assert_eq!(models(&renewed, "two").await, Some(200));
    assert_eq!(session(&renewed).await, 401, "it was begun with a key that is none any more");
    assert!(server.terminate(SOON).await, "it still ends well");
}

/// What is answered to this until the connection is closed, and how long that takes.
async fn rest(server: &Server, bytes: &[u8]) -> (Vec<u8>, Duration) {
    let started = Instant::now();
    let mut stream =
        TcpStream::connect(server.url.trim_start_matches("https://")).await.expect("a connection");
    stream.write_all(bytes).await.expect("sent");
    let mut answer = Vec::new();
    // One that is reset is closed, too.
    let _ =
        tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await.expect("the end in time");
    (answer, started.elapsed())
}

#[tokio::test]
async fn whoever_speaks_no_tls_costs_nobody_anything() {
    let files = Files::new();
    let deadline = Duration::from_secs(4);
    let server = files.serve(files.renew(), &["--head-timeout", "4"]).await;
    for plain in [&b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"[..], &[0; 5000]] {
        let (answer, time) = rest(&server, plain).await;
        assert!(answer.len() <= 7, "an alert at most: {answer:?}");
        assert!(time < deadline, "{time:?}");
    }
    // Handshakes that do not begin, or do not go on.
    let (silent, begun) = tokio::join!(rest(&server, b""), rest(&server, b"\x16\x03\x01"));
    for (answer, time) in [silent, begun] {
        assert!(answer.is_empty() && time >= deadline, "{answer:?} after {time:?}");
    }
    assert_eq!(server.metric("chiasm_closed_connections_total{cause=\"handshake\"}").await, 4.0);
    wait_for("end", SOON, async || server.metric("chiasm_connections").await == 1.0).await;
}
