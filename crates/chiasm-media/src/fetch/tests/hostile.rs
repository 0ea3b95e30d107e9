//! Tests of hostile origins: each fetch ends in time, with the right error, and releases its
//! resources.

use super::*;

/// The maximum time that a test waits. Timeouts that must not end a fetch are longer.
const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns a configuration whose timeouts are longer than any test.
fn patient() -> MediaConfig {
    let never = 6 * TEST_TIMEOUT;
    MediaConfig {
        connect_timeout: never,
        first_byte_timeout: never,
        stall_timeout: never,
        total_timeout: never,
        ..config()
    }
}

/// Fetches once. Asserts that the fetch ends in time, and that only its body stays charged.
async fn fetch(limits: &MediaConfig, url: Url) -> Result<Bytes, MediaError> {
    let budget = ByteBudget::new(1 << 20);
    let fetcher = Fetcher::new(limits, budget.clone(), Clock::default()).unwrap();
    let outcome =
        tokio::time::timeout(TEST_TIMEOUT, get(&fetcher, url)).await.expect("an answer in time");
    assert_eq!(budget.held(), outcome.as_ref().map_or(0, Bytes::len) as u64);
    outcome
}

/// Starts an origin that sends `head`, and then `drip` forever with a pause in between.
///
/// Without a pause it sends as fast as the client reads. The channel reports a disconnect.
async fn dripping(
    head: &'static str,
    drip: &'static str,
    pause: Duration,
) -> (Origin, mpsc::UnboundedReceiver<()>) {
    let (sender, closed) = mpsc::unbounded_channel();
    let origin = Origin::start(move |_, mut stream| {
        let sender = sender.clone();
        async move {
            stream.write_all(head.as_bytes()).await.unwrap();
            while stream.write_all(drip.as_bytes()).await.is_ok() {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
            }
            sender.send(()).unwrap();
        }
    })
    .await;
    (origin, closed)
}

#[tokio::test]
async fn announced_length_over_the_limit_is_refused() {
    let origin = Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n").await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::TooManyBytes { limit: 1000 });
}

#[tokio::test]
async fn endless_body_is_cut_off_at_the_limit() {
    let (sender, mut sent_bytes) = mpsc::unbounded_channel();
    let origin = Origin::start(move |_, mut stream| {
        let sender = sender.clone();
        async move {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                .await
                .unwrap();
            let mut sent = 0u64;
            while stream.write_all(b"64\r\n").await.is_ok()
                && stream.write_all(&[b'x'; 100]).await.is_ok()
                && stream.write_all(b"\r\n").await.is_ok()
            {
                sent += 100;
            }
            sender.send(sent).unwrap();
        }
    })
    .await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::TooManyBytes { limit: 1000 });
    // The origin notices the disconnect once the socket buffers are full.
    let sent = sent_bytes.recv().await.unwrap();
    assert!(sent < 64 << 20, "{sent} bytes were sent");
}

#[tokio::test]
async fn truncated_body_is_an_error() {
    let origin =
        Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 100\r\nconnection: close\r\n\r\nhalf")
            .await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::OriginFailed);
}

#[tokio::test]
async fn compressed_body_is_refused_unread() {
    for (encoding, expected) in [
        ("gzip", Err(MediaError::OriginEncoding)),
        ("identity, br", Err(MediaError::OriginEncoding)),
        ("identity\r\ncontent-encoding: gzip", Err(MediaError::OriginEncoding)),
        ("Identity", Ok(Bytes::from("raw"))),
        ("", Ok(Bytes::from("raw"))),
    ] {
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: 3\r\n\r\n");
        let origin = Origin::fixed(head + "raw").await;
        assert_eq!(get(&open_fetcher(), origin.url("/")).await, expected, "{encoding}");
    }
}

#[tokio::test]
async fn slow_origin_times_out_at_every_stage() {
    for answer in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nslow"] {
        let origin = Origin::start(move |_, mut stream| async move {
            stream.write_all(answer.as_bytes()).await.unwrap();
            // Waits until the client disconnects.
            let _ = stream.read_u8().await;
        })
        .await;
        let limits = MediaConfig { total_timeout: Duration::from_millis(50), ..config() };
        let error = get(&fetcher(&limits), origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginTimeout, "{answer:?}");
        assert_eq!(error.fault(), Fault::OriginTimeout);
    }
}

#[tokio::test]
async fn slow_name_lookup_times_out() {
    let never: Lookup = Arc::new(|_| Box::pin(std::future::pending()));
    let limits = MediaConfig { connect_timeout: Duration::from_millis(50), ..config() };
    let fetcher =
        Fetcher::with(&limits, ByteBudget::new(0), Arc::new(|_| true), never, web_roots()).unwrap();
    let error = get(&fetcher, Url::parse("http://slow.test/").unwrap()).await.unwrap_err();
    assert_eq!(error, MediaError::OriginTimeout);
}

const SHORT: Duration = Duration::from_millis(100);
const DRIP: Duration = Duration::from_millis(5);

#[tokio::test]
async fn dripping_head_times_out() {
    for (head, drip) in [
        ("", "H"),
        ("HTTP/1.1 200 OK\r\nx: ", "x"),
        ("HTTP/1.1 200 OK\r\n", "x: y\r\n"),
        ("", "HTTP/1.1 100 Continue\r\n\r\n"),
        ("", "HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"),
    ] {
        let (origin, mut closed) = dripping(head, drip, DRIP).await;
        let limits = MediaConfig { first_byte_timeout: SHORT, ..patient() };
        let error = fetch(&limits, origin.url("/")).await.unwrap_err();
        // The limit for header lines, or an invalid head, may end the fetch first.
        assert!(
            matches!(error, MediaError::OriginTimeout | MediaError::OriginFailed),
            "{drip:?}: {error}"
        );
        tokio::time::timeout(TEST_TIMEOUT, closed.recv()).await.expect("a disconnect").unwrap();
    }
}

#[tokio::test]
async fn endless_interim_answers_time_out() {
    let (origin, mut closed) = dripping("", "HTTP/1.1 100 Continue\r\n\r\n", Duration::ZERO).await;
    let limits = MediaConfig { first_byte_timeout: SHORT, ..patient() };
    assert_eq!(fetch(&limits, origin.url("/")).await.unwrap_err(), MediaError::OriginTimeout);
    tokio::time::timeout(TEST_TIMEOUT, closed.recv()).await.expect("a disconnect").unwrap();
}

#[tokio::test]
async fn dripping_body_times_out() {
    for (head, drip) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", "x"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "1\r\nx\r\n"),
        // The chunk's extension never ends.
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", "x"),
        ("HTTP/1.1 200 OK\r\n\r\n", "x"),
    ] {
        let (origin, mut closed) = dripping(head, drip, DRIP).await;
        // The rate requires 10,000 bytes per 100 ms, and some 20 bytes arrive.
        let limits = MediaConfig { stall_timeout: SHORT, min_body_rate: 100_000, ..patient() };
        assert_eq!(
            fetch(&limits, origin.url("/")).await.unwrap_err(),
            MediaError::OriginTimeout,
            "{head}"
        );
        tokio::time::timeout(TEST_TIMEOUT, closed.recv()).await.expect("a disconnect").unwrap();
    }
}

#[tokio::test]
async fn slow_body_above_the_minimum_rate_is_read() {
    let origin = Origin::start(|_, mut stream| async move {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 120\r\n\r\n").await.unwrap();
        for _ in 0..120 {
            stream.write_all(b"x").await.unwrap();
            tokio::time::sleep(2 * DRIP).await;
        }
    })
    .await;
    // The minimum rate is one byte per second, and the whole body takes longer than a second.
    let limits = MediaConfig { stall_timeout: 10 * SHORT, min_body_rate: 1, ..patient() };
    assert_eq!(fetch(&limits, origin.url("/")).await.unwrap(), "x".repeat(120));
}

#[tokio::test]
async fn wrong_content_length_is_detected() {
    // More bytes arrive than announced: the announced part is the body.
    let origin = Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcdef").await;
    assert_eq!(fetch(&patient(), origin.url("/")).await.unwrap(), "abc");
    // Fewer bytes arrive than announced.
    let origin = Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc").await;
    assert_eq!(fetch(&patient(), origin.url("/")).await.unwrap_err(), MediaError::OriginFailed);
    for length in ["-1", "3x", "3, 4", "0x3", "18446744073709551616", "3\r\ncontent-length: 4"] {
        let origin =
            Origin::fixed(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\nabc")).await;
        assert_eq!(
            fetch(&patient(), origin.url("/")).await.unwrap_err(),
            MediaError::OriginFailed,
            "{length}"
        );
    }
    for length in ["18446744073709551615", "9223372036854775807"] {
        let origin =
            Origin::fixed(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\nabc")).await;
        let error = fetch(&patient(), origin.url("/")).await.unwrap_err();
        assert!(
            matches!(error, MediaError::TooManyBytes { .. } | MediaError::OriginFailed),
            "{length}: {error}"
        );
    }
}

/// Bytes after a body must not become the answer to the next request on the connection.
#[tokio::test]
async fn unsolicited_second_answer_is_discarded() {
    let origin = Origin::fixed(
        "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ntrue\
         HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfalse",
    )
    .await;
    let fetcher = open_fetcher();
    for _ in 0..3 {
        assert_eq!(get(&fetcher, origin.url("/")).await.unwrap(), "true");
    }
    assert_eq!(origin.connections.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn broken_chunks_are_errors() {
    for chunks in [
        "zz\r\nabc\r\n0\r\n\r\n",
        "-3\r\nabc\r\n0\r\n\r\n",
        "ffffffffffffffffff\r\nabc",
        "3\r\nabcdef\r\n0\r\n\r\n",
        "3\nabc\n0\n\n",
        "3\r\nabc\r\n",
        "3\r\nab",
        "\0\0\0",
        "",
    ] {
        let origin =
            Origin::fixed(format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}"))
                .await;
        assert_eq!(
            fetch(&patient(), origin.url("/")).await.unwrap_err(),
            MediaError::OriginFailed,
            "{chunks:?}"
        );
    }
    // A chunk of 2^60 announced bytes counts only by the bytes that arrive.
    let (origin, _closed) = dripping(
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffff\r\n",
        "xxxxxxxxxxxxxxxx",
        Duration::ZERO,
    )
    .await;
    assert_eq!(
        fetch(&patient(), origin.url("/")).await.unwrap_err(),
        MediaError::TooManyBytes { limit: 1000 }
    );
}

#[tokio::test]
async fn endless_chunk_metadata_is_an_error() {
    for (head, drip) in [
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;", "xxxxxxxxxxxxxxxx"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", "x: yyyyyyyyyyyyy\r\n"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", "xxxxxxxxxxxxxxxx"),
    ] {
        let (origin, mut closed) = dripping(head, drip, Duration::ZERO).await;
        let error = fetch(&patient(), origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginFailed, "{head}");
        tokio::time::timeout(TEST_TIMEOUT, closed.recv()).await.expect("a disconnect").unwrap();
    }
}

#[tokio::test]
async fn endless_headers_are_an_error() {
    for (head, drip) in [
        ("HTTP/1.1 200 OK\r\nx: ", "xxxxxxxxxxxxxxxx"),
        ("HTTP/1.1 200 OK\r\n", "x: yyyyyyyyyyyyy\r\n"),
        ("HTTP/1.1 200 ", "OK OK OK OK OK OK "),
        ("HTTP/1.1 200 OK\r\n", "\r"),
    ] {
        let (origin, mut closed) = dripping(head, drip, Duration::ZERO).await;
        let error = fetch(&patient(), origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginFailed, "{head}");
        tokio::time::timeout(TEST_TIMEOUT, closed.recv()).await.expect("a disconnect").unwrap();
    }
    let many = "x: y\r\n".repeat(10_000);
    let origin =
        Origin::fixed(format!("HTTP/1.1 200 OK\r\n{many}content-length: 1\r\n\r\nx")).await;
    assert_eq!(fetch(&patient(), origin.url("/")).await.unwrap_err(), MediaError::OriginFailed);
}

#[tokio::test]
async fn malformed_answer_is_an_error() {
    for answer in [
        "",
        "\r\n",
        "hello",
        "SSH-2.0-OpenSSH_9.9\r\n",
        "HTTP/1.1\r\n\r\n",
        "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/1.1 2000 OK\r\n\r\n",
        "HTTP/9.9 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\n: no name\r\n\r\n",
        "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let origin = Origin::fixed(answer).await;
        assert_eq!(
            fetch(&patient(), origin.url("/")).await.unwrap_err(),
            MediaError::OriginFailed,
            "{answer:?}"
        );
    }
    let origin = Origin::fixed(
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    )
    .await;
    let error = fetch(&patient(), origin.url("/")).await.unwrap_err();
    assert_eq!(error.fault(), Fault::OriginFailed, "{error}");
}

#[tokio::test]
async fn malformed_location_is_refused() {
    let long = format!("/{}", "x".repeat(9000));
    for target in
        [&long, "http://127.0.0.1:99999/", "http://exa mple/", "/\u{ff}", "https:///", "\u{7f}://x"]
    {
        let mut answer = redirect(target).into_bytes();
        if target.starts_with("/\u{ff}") {
            // A byte of Latin-1, which is not valid in a URL.
            let at = answer.windows(2).position(|pair| pair == "\u{ff}".as_bytes()).unwrap();
            answer.splice(at..at + 2, [0xff]);
        }
        let origin = Origin::fixed(answer).await;
        let error = fetch(&patient(), origin.url("/")).await.unwrap_err();
        assert!(
            matches!(error, MediaError::InvalidRedirect | MediaError::OriginFailed),
            "{target}: {error}"
        );
    }
    let origin = Origin::fixed("HTTP/1.1 302 Found\r\nlocation: /a\r\nlocation: /b\r\n\r\n").await;
    assert_eq!(fetch(&patient(), origin.url("/")).await.unwrap_err(), MediaError::InvalidRedirect);

    // Encoded line ends in a `Location` stay encoded, and do not split the next request's head.
    let (sender, mut heads) = mpsc::unbounded_channel();
    let origin = Origin::start(move |head, mut stream| {
        let sender = sender.clone();
        async move {
            let first = head.starts_with("GET / ");
            sender.send(head).unwrap();
            let answer = if first { redirect("/ü%0d%0aevil:%20yes") } else { ok("there") };
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    })
    .await;
    assert_eq!(fetch(&patient(), origin.url("/")).await.unwrap(), "there");
    heads.recv().await.unwrap();
    let head = heads.recv().await.unwrap();
    assert!(head.starts_with("GET /%C3%BC%0d%0aevil:%20yes HTTP/1.1\r\n"), "{head}");
    assert!(!head.contains("\nevil"), "{head}");
}

#[tokio::test]
async fn circular_redirects_end_at_the_limit() {
    let origin = Origin::start(|head, mut stream| async move {
        let answer = redirect(if head.starts_with("GET /a") { "/b" } else { "/a" });
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    for path in ["/a", "/b"] {
        let error = fetch(&patient(), origin.url(path)).await.unwrap_err();
        assert_eq!(error, MediaError::TooManyRedirects { limit: 3 });
    }
    assert_eq!(origin.connections.load(Ordering::SeqCst), 8);
}

#[tokio::test]
async fn slow_redirects_share_one_total_timeout() {
    let origin = Origin::start(|_, mut stream| async move {
        tokio::time::sleep(SHORT / 2).await;
        stream.write_all(redirect("/").as_bytes()).await.unwrap();
    })
    .await;
    let limits = MediaConfig {
        first_byte_timeout: SHORT,
        total_timeout: SHORT,
        max_redirects: 1000,
        ..patient()
    };
    assert_eq!(fetch(&limits, origin.url("/")).await.unwrap_err(), MediaError::OriginTimeout);
}

#[tokio::test]
async fn intermittent_failures_are_not_cached() {
    let count = Arc::new(AtomicUsize::new(0));
    let origin = Origin::start(move |_, mut stream| {
        let round = count.fetch_add(1, Ordering::SeqCst) % 3;
        async move {
            let answer = [
                "HTTP/1.1 404 Not Found\r\ncache-control: max-age=60\r\ncontent-length: 0\r\n\r\n"
                    .to_owned(),
                "HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n".to_owned(),
                ok("fine"),
            ];
            stream.write_all(answer[round].as_bytes()).await.unwrap();
        }
    })
    .await;
    let fetcher = open_fetcher();
    for _ in 0..3 {
        let error = get(&fetcher, origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginStatus { status: 404 });
        let error = get(&fetcher, origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginStatus { status: 500 });
        assert_eq!(get(&fetcher, origin.url("/")).await.unwrap(), "fine");
    }
}

/// Each body of 100 bytes is far below the limit for one body. The budget has room for three.
#[tokio::test]
async fn body_that_exceeds_the_budget_is_refused() {
    let origin = Origin::fixed(ok(&"x".repeat(100))).await;
    let budget = ByteBudget::new(350);
    let fetcher = Fetcher::new(&config(), budget.clone(), Clock::default()).unwrap();
    let mut bodies = Vec::new();
    for _ in 0..3 {
        bodies.push(get(&fetcher, origin.url("/")).await.unwrap());
    }
    assert_eq!(budget.held(), 300);
    let error = get(&fetcher, origin.url("/")).await.unwrap_err();
    assert_eq!((error.clone(), error.fault(), budget.held()), (MediaError::Busy, Fault::Busy, 300));
    bodies.pop();
    get(&fetcher, origin.url("/")).await.unwrap();
    drop(bodies);
    assert_eq!(budget.held(), 0);
}

/// An announced length must not reduce the budget of other fetches.
#[tokio::test]
async fn announced_bytes_are_not_charged() {
    let (origin, mut closed) =
        dripping("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", "x", DRIP).await;
    let budget = ByteBudget::new(1 << 20);
    let fetcher = Arc::new(Fetcher::new(&patient(), budget.clone(), Clock::default()).unwrap());
    let task = tokio::spawn({
        let fetcher = fetcher.clone();
        let url = origin.url("/");
        async move { get(&fetcher, url).await }
    });
    while budget.held() == 0 {
        tokio::time::sleep(DRIP).await;
    }
    assert!(budget.held() < 1000);
    task.abort();
    // Aborting the task cancels the fetch and releases its memory.
    tokio::time::timeout(TEST_TIMEOUT, closed.recv()).await.expect("a disconnect").unwrap();
    assert_eq!(budget.held(), 0);
}

/// A slow origin occupies only its own permits, and other origins get the rest.
#[tokio::test]
async fn slow_origin_does_not_block_other_origins() {
    let slow = Origin::start(|_, mut stream| async move { drop(stream.read_u8().await) }).await;
    let good = Origin::fixed(ok("fine")).await;
    let limits = MediaConfig { max_fetches: 4, max_fetches_per_origin: 3, ..patient() };
    let fetcher = Arc::new(fetcher(&limits));
    let stuck: Vec<_> = (0..10)
        .map(|_| {
            let fetcher = fetcher.clone();
            let url = slow.url("/");
            tokio::spawn(async move { get(&fetcher, url).await })
        })
        .collect();
    while slow.connections.load(Ordering::SeqCst) < 3 {
        tokio::time::sleep(DRIP).await;
    }
    assert_eq!(get(&fetcher, good.url("/")).await.unwrap(), "fine");
    assert_eq!(slow.connections.load(Ordering::SeqCst), 3);
    stuck.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn exhausted_permits_make_the_server_busy() {
    let slow = Origin::start(|_, mut stream| async move { drop(stream.read_u8().await) }).await;
    let good = Origin::fixed(ok("fine")).await;
    let limits = MediaConfig { max_fetches: 1, ..patient() };
    let holder = Arc::new(fetcher(&limits));
    let task = tokio::spawn({
        let fetcher = holder.clone();
        let url = slow.url("/");
        async move { get(&fetcher, url).await }
    });
    while slow.connections.load(Ordering::SeqCst) < 1 {
        tokio::time::sleep(DRIP).await;
    }
    let waiting = holder.limiter.acquire(&good.url("/"), Instant::now() + SHORT).await;
    assert_eq!(waiting.err(), Some(MediaError::Busy));
    task.abort();
    assert_eq!(get(&holder, good.url("/")).await.unwrap(), "fine");
}

#[tokio::test]
async fn extreme_limits_are_clamped() {
    let origin = Origin::fixed(ok("fine")).await;
    let endless = MediaConfig {
        connect_timeout: Duration::MAX,
        first_byte_timeout: Duration::MAX,
        stall_timeout: Duration::MAX,
        total_timeout: Duration::MAX,
        min_body_rate: u64::MAX,
        max_fetches: usize::MAX,
        max_fetches_per_origin: usize::MAX,
        min_freshness: Duration::MAX,
        max_freshness: Duration::MAX,
        ..config()
    };
    let none =
        MediaConfig { max_fetches: 0, max_fetches_per_origin: 0, min_body_rate: 0, ..config() };
    for (limits, fresh) in [(endless, true), (none, false)] {
        let fetcher = fetcher(&limits);
        let outcome = fetcher.get(origin.url("/"), None, MAX_BODY_BYTES).await;
        let Ok(FetchOutcome::Fetched(fetched)) = outcome else { panic!("expected a body") };
        assert_eq!(fetched.bytes, "fine");
        assert_eq!(fetched.freshness.is_fresh(Instant::now().into_std()), fresh);
    }
}
