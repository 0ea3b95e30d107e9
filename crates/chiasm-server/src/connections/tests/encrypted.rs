//! Connections with TLS: after the handshake they behave like plain ones.

use chiasm_cpu::CpuBudget;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion, version};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::tls::tests::TestCertificate;

/// A server with TLS, and the certificate needed to reach it.
struct TlsListener {
    server: TestListener,
    certificate: TestCertificate,
}

impl TlsListener {
    async fn with_limits(limits: HttpLimits) -> Self {
        Self::start(limits, PipelineLimits::default()).await
    }

    async fn start(http: HttpLimits, pipeline: PipelineLimits) -> Self {
        let certificate = TestCertificate::chain();
        let loaded = Arc::new(certificate.load().unwrap());
        Self { server: TestListener::start(Some(loaded), http, pipeline).await, certificate }
    }

    /// Connects and completes the handshake.
    async fn connect(&self, version: &'static SupportedProtocolVersion) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.root.clone()).unwrap();
        let mut tls =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_protocol_versions(&[version])
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let stream = TcpStream::connect(self.server.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(tls)).connect(name, stream).await.unwrap()
    }

    /// Opens a connection and sends these bytes.
    async fn send(&self, bytes: impl AsRef<[u8]>) -> TlsStream<TcpStream> {
        let mut stream = self.connect(&version::TLS13).await;
        stream.write_all(bytes.as_ref()).await.unwrap();
        stream.flush().await.unwrap();
        stream
    }

    async fn answer(&self, request: impl AsRef<[u8]>) -> String {
        read_to_end(self.send(request).await).await
    }

    fn failed_handshakes(&self) -> u64 {
        self.server.metric("chiasm_closed_connections_total{cause=\"handshake\"}")
    }

    async fn wait_until_closed(&self) {
        wait_for("end of all connections", || self.server.metric("chiasm_connections") == 0).await;
    }
}

#[tokio::test]
async fn requests_are_answered_with_tls12_or_tls13() {
    let server = TlsListener::with_limits(HttpLimits::default()).await;
    for version in [&version::TLS12, &version::TLS13] {
        let mut stream = server.connect(version).await;
        let tls = stream.get_ref().1;
        assert_eq!(tls.alpn_protocol(), Some(&b"http/1.1"[..]));
        assert_eq!(
            tls.peer_certificates().unwrap().len(),
            2,
            "the server's own and the intermediate authority's"
        );
        // Several requests on one connection; the last one closes it.
        let several = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n".repeat(3) + &get("/health");
        stream.write_all(several.as_bytes()).await.unwrap();
        assert_eq!(read_to_end(stream).await.matches("HTTP/1.1 200").count(), 4);
    }
    server.wait_until_closed().await;
    assert_eq!(server.failed_handshakes(), 0);
}

#[tokio::test]
async fn failed_handshake_closes_connection() {
    let limits = HttpLimits { head_timeout: Duration::from_millis(300), ..HttpLimits::default() };
    let server = TlsListener::with_limits(limits).await;
    let hello = [0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3];
    let beginnings: [&[u8]; 6] =
        [b"", get("/health").as_bytes(), b"\x16", &hello, &[0xff; 100], &[0; 100_000]]
            .map(|bytes: &[u8]| &*bytes.to_vec().leak());
    for (count, bytes) in (1..).zip(beginnings) {
        let mut stream = TcpStream::connect(server.server.address).await.unwrap();
        // The connection may be closed before everything is sent.
        let _ = stream.write_all(bytes).await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut answer))
            .await
            .expect("should end in time");
        assert!(answer.len() <= 7, "an alert at most: {answer:?}");
        wait_for("count", || server.failed_handshakes() == count).await;
    }
    // A client that disconnects at once.
    drop(TcpStream::connect(server.server.address).await.unwrap());
    wait_for("count", || server.failed_handshakes() == 7).await;
    server.wait_until_closed().await;
    assert!(server.answer(get("/health")).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn silent_handshake_blocks_neither_clients_nor_shutdown() {
    let server =
        TlsListener::with_limits(HttpLimits { connections: 1, ..HttpLimits::default() }).await;
    let silent = server.server.send("").await;
    wait_for("open connection", || server.server.metric("chiasm_connections") == 1).await;
    assert!(server.answer(get("/health")).await.starts_with("HTTP/1.1 200"));
    assert_eq!(server.server.metric("chiasm_closed_connections_total{cause=\"room\"}"), 1);
    drop(silent);

    let plain = TestServer::new(1).await;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let certificate = Some(Arc::new(server.certificate.load().unwrap()));
    let serving = {
        let server = plain.server.clone();
        tokio::spawn(async move {
            server.serve(listener, certificate, async { drop(stopped.await) }).await
        })
    };
    let _silent = TcpStream::connect(address).await.unwrap();
    let open = || plain.metrics().contains("\nchiasm_connections 1\n");
    wait_for("open connection", open).await;
    let started = std::time::Instant::now();
    drop(stop);
    tokio::time::timeout(SOON, serving).await.expect("should end in time").unwrap();
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "shutdown waited for the handshake: {:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn client_hello_waits_for_a_cpu_thread() {
    let one_thread = PipelineLimits { cpu_threads: 1, ..PipelineLimits::default() };
    let server = TlsListener::start(HttpLimits::default(), one_thread).await;
    let cpu = server.server.server.test.pipeline.cpu.clone();
    let pending = || cpu.load().pending[0];
    // Other work occupies both threads for short jobs.
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = Arc::new(std::sync::Mutex::new(released));
    for _ in 0..2 {
        let cpu = cpu.clone();
        let released = released.clone();
        tokio::spawn(async move {
            let ticket = CpuBudget::shared().ticket(Duration::from_millis(1)).unwrap();
            cpu.run(&ticket, move || released.lock().unwrap().recv()).await
        });
    }
    let busy = Duration::from_millis(2);
    wait_for("busy threads", || pending() == busy).await;
    let mut answer = Box::pin(server.answer(get("/health")));
    tokio::select! {
        biased;
        _ = &mut answer => panic!("no thread was free"),
        () = wait_for("the queued handshake", || pending() > busy) => {}
    }
    drop(release);
    assert!(answer.await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn disconnect_aborts_request() {
    let server = TlsListener::with_limits(HttpLimits::default()).await;
    for (round, fields) in ["", ", \"stream\": true"].into_iter().enumerate() {
        for (by_alert, aborted) in [(false, 2 * round + 1), (true, 2 * round + 2)] {
            let mut stream = server.send(completion(fields)).await;
            wait_for("job", || server.server.backend().jobs().len() == aborted).await;
            // A `close_notify` alert leaves the connection itself open.
            if by_alert {
                stream.get_mut().1.send_close_notify();
                stream.flush().await.unwrap();
                wait_for("abort", || server.server.backend().aborted() == aborted).await;
            }
            drop(stream);
            wait_for("abort", || server.server.backend().aborted() == aborted).await;
        }
    }
    server.wait_until_closed().await;
}

#[tokio::test]
async fn unread_answer_is_aborted() {
    let limits = HttpLimits { write_timeout: Duration::from_millis(200), ..HttpLimits::default() };
    let one_request = PipelineLimits { requests: Some(1), ..PipelineLimits::default() };
    let server = TlsListener::start(limits, one_request).await;
    let endless = (0..60_000).fold(Script::tokens(&[40]), |script, _| script.then(0, &[41]));
    server.server.backend().next_job(endless);
    let unread = server.send(completion(", \"stream\": true, \"return_token_ids\": true")).await;
    let closed = || server.server.metric("chiasm_closed_connections_total{cause=\"unread\"}") == 1;
    wait_for("end", closed).await;
    wait_for("abort", || server.server.backend().aborted() == 1).await;
    server.wait_until_closed().await;
    drop(unread);
}

#[tokio::test]
async fn large_body_is_read_completely() {
    let server = TlsListener::with_limits(HttpLimits::default()).await;
    server.server.backend().next_job(Script::tokens(&[40]).finish(Finish::Eos));
    // The unused field before the prompt has to be received, too.
    let user = "u".repeat(5 * LARGE_BODY_BYTES);
    let answer = server.answer(completion(&format!(", \"user\": \"{user}\""))).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    server.wait_until_closed().await;
}
