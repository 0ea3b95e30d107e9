//! Connections within TLS: as others, once it is agreed on.

use chiasm_pipeline::cpu::CpuBudget;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion, version};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::tls::tests::Made;

/// A server within TLS, and what is needed to reach it.
struct Encrypted {
    server: Listening,
    made: Made,
}

impl Encrypted {
    async fn with(limits: HttpLimits) -> Self {
        Self::within(limits, PipelineLimits::default()).await
    }

    async fn within(http: HttpLimits, pipeline: PipelineLimits) -> Self {
        let made = Made::chain();
        let certificate = Arc::new(made.load().unwrap());
        Self { server: Listening::within(Some(certificate), http, pipeline).await, made }
    }

    /// A connection whose handshake is done.
    async fn connect(&self, version: &'static SupportedProtocolVersion) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(self.made.root.clone()).unwrap();
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

    /// A connection on which this has been sent.
    async fn sent(&self, bytes: impl AsRef<[u8]>) -> TlsStream<TcpStream> {
        let mut stream = self.connect(&version::TLS13).await;
        stream.write_all(bytes.as_ref()).await.unwrap();
        stream.flush().await.unwrap();
        stream
    }

    async fn answer(&self, request: impl AsRef<[u8]>) -> String {
        rest(self.sent(request).await).await
    }

    fn failed_handshakes(&self) -> u64 {
        self.server.metric("chiasm_closed_connections_total{cause=\"handshake\"}")
    }

    async fn no_connections(&self) {
        wait_for("end of all connections", || self.server.metric("chiasm_connections") == 0).await;
    }
}

#[tokio::test]
async fn requests_are_answered_in_both_versions() {
    let server = Encrypted::with(HttpLimits::default()).await;
    for version in [&version::TLS12, &version::TLS13] {
        let mut stream = server.connect(version).await;
        let tls = stream.get_ref().1;
        assert_eq!(tls.alpn_protocol(), Some(&b"http/1.1"[..]));
        assert_eq!(
            tls.peer_certificates().unwrap().len(),
            2,
            "its own and the authority's between"
        );
        // Several on one connection, the last of which is its end.
        let several = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n".repeat(3) + &get("/health");
        stream.write_all(several.as_bytes()).await.unwrap();
        assert_eq!(rest(stream).await.matches("HTTP/1.1 200").count(), 4);
    }
    server.no_connections().await;
    assert_eq!(server.failed_handshakes(), 0);
}

#[tokio::test]
async fn whoever_does_not_agree_on_tls_is_let_go() {
    let limits = HttpLimits { head_timeout: Duration::from_millis(300), ..HttpLimits::default() };
    let server = Encrypted::with(limits).await;
    let hello = [0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3];
    let beginnings: [&[u8]; 6] =
        [b"", get("/health").as_bytes(), b"\x16", &hello, &[0xff; 100], &[0; 100_000]]
            .map(|bytes: &[u8]| &*bytes.to_vec().leak());
    for (count, bytes) in (1..).zip(beginnings) {
        let mut stream = TcpStream::connect(server.server.address).await.unwrap();
        // It may be closed before all of it is sent.
        let _ = stream.write_all(bytes).await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut answer))
            .await
            .expect("the end in time");
        assert!(answer.len() <= 7, "an alert at most: {answer:?}");
        wait_for("count", || server.failed_handshakes() == count).await;
    }
    // One that leaves at once.
    drop(TcpStream::connect(server.server.address).await.unwrap());
    wait_for("count", || server.failed_handshakes() == 7).await;
    server.no_connections().await;
    assert!(server.answer(get("/health")).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn whoever_is_in_a_handshake_makes_room_and_keeps_up_nobody() {
    let server = Encrypted::with(HttpLimits { connections: 1, ..HttpLimits::default() }).await;
    let silent = server.server.sent("").await;
    wait_for("its place", || server.server.metric("chiasm_connections") == 1).await;
    assert!(server.answer(get("/health")).await.starts_with("HTTP/1.1 200"));
    assert_eq!(server.server.metric("chiasm_closed_connections_total{cause=\"room\"}"), 1);
    drop(silent);

    let plain = TestServer::new(1).await;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let certificate = Some(Arc::new(server.made.load().unwrap()));
    let serving = {
        let server = plain.server.clone();
        tokio::spawn(async move {
            server.serve(listener, certificate, async { drop(stopped.await) }).await
        })
    };
    let _silent = TcpStream::connect(address).await.unwrap();
    let open = || plain.metrics().contains("\nchiasm_connections 1\n");
    wait_for("its place", open).await;
    let started = std::time::Instant::now();
    drop(stop);
    tokio::time::timeout(SOON, serving).await.expect("the end in time").unwrap();
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "its end is waited for: {:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn hellos_wait_for_their_turn_like_all_work_that_costs() {
    let one_thread = PipelineLimits { cpu_threads: 1, ..PipelineLimits::default() };
    let server = Encrypted::within(HttpLimits::default(), one_thread).await;
    let cpu = server.server.server.test.pipeline.cpu.clone();
    let short = || cpu.load().pending[0];
    // Work of others keeps both threads for short work busy.
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = Arc::new(std::sync::Mutex::new(released));
    for _ in 0..2 {
        let (cpu, released) = (cpu.clone(), released.clone());
        tokio::spawn(async move {
            let ticket = CpuBudget::shared().ticket(Duration::from_millis(1)).unwrap();
            cpu.run(&ticket, move || released.lock().unwrap().recv()).await
        });
    }
    let busy = Duration::from_millis(2);
    wait_for("both threads", || short() == busy).await;
    let mut answer = Box::pin(server.answer(get("/health")));
    tokio::select! {
        biased;
        _ = &mut answer => panic!("no thread was free"),
        () = wait_for("the hello's turn", || short() > busy) => {}
    }
    drop(release);
    assert!(answer.await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request() {
    let server = Encrypted::with(HttpLimits::default()).await;
    for (round, fields) in ["", ", \"stream\": true"].into_iter().enumerate() {
        for (politely, aborted) in [(false, 2 * round + 1), (true, 2 * round + 2)] {
            let mut stream = server.sent(completion(fields)).await;
            wait_for("job", || server.server.backend().jobs().len() == aborted).await;
            // Within TLS it says so, and the connection itself stays open.
            if politely {
                stream.get_mut().1.send_close_notify();
                stream.flush().await.unwrap();
                wait_for("abort", || server.server.backend().aborted() == aborted).await;
            }
            drop(stream);
            wait_for("abort", || server.server.backend().aborted() == aborted).await;
        }
    }
    server.no_connections().await;
}

#[tokio::test]
async fn an_answer_that_nobody_reads_ends() {
    let limits = HttpLimits { write_timeout: Duration::from_millis(200), ..HttpLimits::default() };
    let one_request = PipelineLimits { requests: Some(1), ..PipelineLimits::default() };
    let server = Encrypted::within(limits, one_request).await;
    let endless = (0..60_000).fold(Script::tokens(&[40]), |script, _| script.then(0, &[41]));
    server.server.backend().next_job(endless);
    let unread = server.sent(completion(", \"stream\": true, \"return_token_ids\": true")).await;
    let closed = || server.server.metric("chiasm_closed_connections_total{cause=\"unread\"}") == 1;
    wait_for("end", closed).await;
    wait_for("abort", || server.server.backend().aborted() == 1).await;
    server.no_connections().await;
    drop(unread);
}

#[tokio::test]
async fn a_large_body_is_read_whole() {
    let server = Encrypted::with(HttpLimits::default()).await;
    server.server.backend().next_job(Script::tokens(&[40]).finish(Finish::Eos));
    // What the fields before the prompt have is thrown away, but has to be there.
    let user = "u".repeat(5 * LARGE);
    let answer = server.answer(completion(&format!(", \"user\": \"{user}\""))).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    server.no_connections().await;
}
