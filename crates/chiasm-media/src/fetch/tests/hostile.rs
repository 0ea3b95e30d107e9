//! Origins that mean no good: each is given up within its time, with the right error, and leaves
//! nothing behind.

use super::*;

/// No test waits for longer than this, and none of the limits below is this long unless it must not
/// be what ends a fetch.
const PATIENCE: Duration = Duration::from_secs(10);

/// Limits that end a fetch only where a test shortens them.
fn patient() -> MediaConfig {
    let never = 6 * PATIENCE;
    MediaConfig {
        connect_timeout: never,
        first_byte_timeout: never,
        stall_timeout: never,
        total_timeout: never,
        ..config()
    }
}

/// Fetches once, in time, and leaves nothing counted but the body.
async fn fetch(limits: &MediaConfig, url: Url) -> Result<Bytes, MediaError> {
    let budget = ByteBudget::new(1 << 20);
    let fetcher = Fetcher::new(limits, budget.clone(), Clock::default()).unwrap();
    let outcome =
        tokio::time::timeout(PATIENCE, get(&fetcher, url)).await.expect("an answer in time");
    assert_eq!(budget.held(), outcome.as_ref().map_or(0, Bytes::len) as u64);
    outcome
}

/// An origin that sends `head` and then `drop` again and again, as fast as it is taken or after
/// pauses. Says when the other side has hung up.
async fn dripping(
    head: &'static str,
    drop: &'static str,
    pause: Duration,
) -> (Origin, mpsc::UnboundedReceiver<()>) {
    let (closed, seen) = mpsc::unbounded_channel();
    let origin = Origin::start(move |_, mut stream| {
        let closed = closed.clone();
        async move {
            stream.write_all(head.as_bytes()).await.unwrap();
            while stream.write_all(drop.as_bytes()).await.is_ok() {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
            }
            closed.send(()).unwrap();
        }
    })
    .await;
    (origin, seen)
}

#[tokio::test]
async fn an_announced_length_over_the_limit_is_refused_unread() {
    let origin = Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n").await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::TooManyBytes { limit: 1000 });
}

#[tokio::test]
async fn an_endless_body_is_dropped_at_the_limit() {
    let (closed, mut seen) = mpsc::unbounded_channel();
    let origin = Origin::start(move |_, mut stream| {
        let closed = closed.clone();
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
            closed.send(sent).unwrap();
        }
    })
    .await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::TooManyBytes { limit: 1000 });
    // The origin notices, after what the socket's buffers took.
    let sent = seen.recv().await.unwrap();
    assert!(sent < 64 << 20, "{sent} bytes were taken");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_an_error() {
    let origin =
        Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 100\r\nconnection: close\r\n\r\nhalf")
            .await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::OriginFailed);
}

#[tokio::test]
async fn compressed_bodies_are_refused_unread() {
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
async fn a_slow_origin_times_out_wherever_it_is_slow() {
    for answer in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nslow"] {
        let origin = Origin::start(move |_, mut stream| async move {
            stream.write_all(answer.as_bytes()).await.unwrap();
            // Until the other side gives up.
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
async fn a_name_that_does_not_resolve_in_time_is_given_up() {
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
async fn a_head_that_drips_is_given_up() {
    for (head, drop) in [
        ("", "H"),
        ("HTTP/1.1 200 OK\r\nx: ", "x"),
        ("HTTP/1.1 200 OK\r\n", "x: y\r\n"),
        ("", "HTTP/1.1 100 Continue\r\n\r\n"),
        ("", "HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"),
    ] {
        let (origin, mut closed) = dripping(head, drop, DRIP).await;
        let limits = MediaConfig { first_byte_timeout: SHORT, ..patient() };
        let error = fetch(&limits, origin.url("/")).await.unwrap_err();
        // Too many header lines, or no valid head, may be noticed first.
        assert!(
            matches!(error, MediaError::OriginTimeout | MediaError::OriginFailed),
            "{drop:?}: {error}"
        );
        tokio::time::timeout(PATIENCE, closed.recv()).await.expect("it hangs up").unwrap();
    }
}

#[tokio::test]
async fn interim_answers_without_end_are_given_up() {
    let (origin, mut closed) = dripping("", "HTTP/1.1 100 Continue\r\n\r\n", Duration::ZERO).await;
    let limits = MediaConfig { first_byte_timeout: SHORT, ..patient() };
    assert_eq!(fetch(&limits, origin.url("/")).await.unwrap_err(), MediaError::OriginTimeout);
    tokio::time::timeout(PATIENCE, closed.recv()).await.expect("it hangs up").unwrap();
}

#[tokio::test]
async fn a_body_that_drips_is_given_up() {
    for (head, drop) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", "x"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "1\r\nx\r\n"),
        // The chunk's extension and size never end.
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", "x"),
        ("HTTP/1.1 200 OK\r\n\r\n", "x"),
    ] {
        let (origin, mut closed) = dripping(head, drop, DRIP).await;
        // 100,000 bytes per second and 10,000 per 100 ms, of which some 20 come.
        let limits = MediaConfig { stall_timeout: SHORT, min_body_rate: 100_000, ..patient() };
        assert_eq!(
            fetch(&limits, origin.url("/")).await.unwrap_err(),
            MediaError::OriginTimeout,
            "{head}"
        );
        tokio::time::timeout(PATIENCE, closed.recv()).await.expect("it hangs up").unwrap();
    }
}

#[tokio::test]
async fn a_body_that_is_slow_but_not_too_slow_is_read() {
    let origin = Origin::start(|_, mut stream| async move {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 120\r\n\r\n").await.unwrap();
        for _ in 0..120 {
            stream.write_all(b"x").await.unwrap();
            tokio::time::sleep(2 * DRIP).await;
        }
    })
    .await;
    // One byte per second; the whole takes longer than that.
    let limits = MediaConfig { stall_timeout: 10 * SHORT, min_body_rate: 1, ..patient() };
    assert_eq!(fetch(&limits, origin.url("/")).await.unwrap(), "x".repeat(120));
}

#[tokio::test]
async fn lengths_that_lie_are_noticed() {
    // More comes than announced: the announced part is the body.
    let origin = Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcdef").await;
    assert_eq!(fetch(&patient(), origin.url("/")).await.unwrap(), "abc");
    // Less comes than announced.
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

/// What follows a body must not become the answer to the next request on the connection.
#[tokio::test]
async fn an_answer_that_nobody_asked_for_is_not_used() {
    let origin = Origin::fixed(
        "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ntrueHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfalse",
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
    // A chunk of 2^60 bytes is only as large as what comes of it.
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
async fn extensions_and_trailers_of_chunks_are_bounded() {
    for (head, drop) in [
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;", "xxxxxxxxxxxxxxxx"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", "x: yyyyyyyyyyyyy\r\n"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", "xxxxxxxxxxxxxxxx"),
    ] {
        let (origin, mut closed) = dripping(head, drop, Duration::ZERO).await;
        let error = fetch(&patient(), origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginFailed, "{head}");
        tokio::time::timeout(PATIENCE, closed.recv()).await.expect("it hangs up").unwrap();
    }
}

#[tokio::test]
async fn floods_of_headers_are_bounded() {
    for (head, drop) in [
        ("HTTP/1.1 200 OK\r\nx: ", "xxxxxxxxxxxxxxxx"),
        ("HTTP/1.1 200 OK\r\n", "x: yyyyyyyyyyyyy\r\n"),
        ("HTTP/1.1 200 ", "OK OK OK OK OK OK "),
        ("HTTP/1.1 200 OK\r\n", "\r"),
    ] {
        let (origin, mut closed) = dripping(head, drop, Duration::ZERO).await;
        let error = fetch(&patient(), origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginFailed, "{head}");
        tokio::time::timeout(PATIENCE, closed.recv()).await.expect("it hangs up").unwrap();
    }
    let many = "x: y\r\n".repeat(10_000);
    let origin =
        Origin::fixed(format!("HTTP/1.1 200 OK\r\n{many}content-length: 1\r\n\r\nx")).await;
    assert_eq!(fetch(&patient(), origin.url("/")).await.unwrap_err(), MediaError::OriginFailed);
}

#[tokio::test]
async fn what_is_no_answer_is_an_error() {
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
async fn odd_locations_are_refused_or_harmless() {
    let long = format!("/{}", "x".repeat(9000));
    for target in
        [&long, "http://127.0.0.1:99999/", "http://exa mple/", "/\u{ff}", "https:///", "\u{7f}://x"]
    {
        let mut answer = redirect(target).into_bytes();
        if target.starts_with("/\u{ff}") {
            // Latin-1, which no URL is written in.
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

    // Line ends in a redirect stay part of the path, and do not reach the next request's head as
    // such.
    let (heads, mut seen) = mpsc::unbounded_channel();
    let origin = Origin::start(move |head, mut stream| {
        let heads = heads.clone();
        async move {
            let first = head.starts_with("GET / ");
            heads.send(head).unwrap();
            let answer = if first { redirect("/ü%0d%0aevil:%20yes") } else { ok("there") };
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    })
    .await;
    assert_eq!(fetch(&patient(), origin.url("/")).await.unwrap(), "there");
    seen.recv().await.unwrap();
    let head = seen.recv().await.unwrap();
    assert!(head.starts_with("GET /%C3%BC%0d%0aevil:%20yes HTTP/1.1\r\n"), "{head}");
    assert!(!head.contains("\nevil"), "{head}");
}

#[tokio::test]
async fn redirects_in_a_circle_end() {
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
async fn slow_redirects_do_not_add_up() {
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
async fn an_origin_that_fails_now_and_then_is_believed_each_time() {
    let count = Arc::new(AtomicUsize::new(0));
    let origin = Origin::start(move |_, mut stream| {
        let turn = count.fetch_add(1, Ordering::SeqCst) % 3;
        async move {
            let answer = [
                "HTTP/1.1 404 Not Found\r\ncache-control: max-age=60\r\ncontent-length: 0\r\n\r\n"
                    .to_owned(),
                "HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n".to_owned(),
                ok("fine"),
            ];
            stream.write_all(answer[turn].as_bytes()).await.unwrap();
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

/// Bodies of 100 bytes each are far below the limit for one, and of four the last has no room.
#[tokio::test]
async fn bodies_are_read_into_the_budget_or_not_at_all() {
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

/// What is only announced takes nothing from others.
#[tokio::test]
async fn a_body_that_does_not_come_is_not_counted() {
    let (origin, mut closed) =
        dripping("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", "x", DRIP).await;
    let budget = ByteBudget::new(1 << 20);
    let fetcher = Arc::new(Fetcher::new(&patient(), budget.clone(), Clock::default()).unwrap());
    let task = tokio::spawn({
        let (fetcher, url) = (fetcher.clone(), origin.url("/"));
        async move { get(&fetcher, url).await }
    });
    while budget.held() == 0 {
        tokio::time::sleep(DRIP).await;
    }
    assert!(budget.held() < 1000);
    task.abort();
    // Who stops waiting ends the fetch and gives everything back.
    tokio::time::timeout(PATIENCE, closed.recv()).await.expect("it hangs up").unwrap();
    assert_eq!(budget.held(), 0);
}

/// Origins that keep all their turns busy leave those of others alone, and the limit of all holds.
#[tokio::test]
async fn one_slow_origin_does_not_keep_others_waiting() {
    let slow = Origin::start(|_, mut stream| async move { drop(stream.read_u8().await) }).await;
    let good = Origin::fixed(ok("fine")).await;
    let limits = MediaConfig { max_fetches: 4, max_fetches_per_origin: 3, ..patient() };
    let fetcher = Arc::new(fetcher(&limits));
    let stuck: Vec<_> = (0..10)
        .map(|_| {
            let (fetcher, url) = (fetcher.clone(), slow.url("/"));
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
async fn when_all_turns_are_taken_the_server_is_busy() {
    let slow = Origin::start(|_, mut stream| async move { drop(stream.read_u8().await) }).await;
    let good = Origin::fixed(ok("fine")).await;
    let limits = MediaConfig { max_fetches: 1, ..patient() };
    let holder = Arc::new(fetcher(&limits));
    let task = tokio::spawn({
        let (fetcher, url) = (holder.clone(), slow.url("/"));
        async move { get(&fetcher, url).await }
    });
    while slow.connections.load(Ordering::SeqCst) < 1 {
        tokio::time::sleep(DRIP).await;
    }
    let waiting = holder.turns.take(&good.url("/"), Instant::now() + SHORT).await;
    assert_eq!(waiting.err(), Some(MediaError::Busy));
    task.abort();
    assert_eq!(get(&holder, good.url("/")).await.unwrap(), "fine");
}

#[tokio::test]
async fn limits_without_sense_do_no_harm() {
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
        let Ok(Answer::New(fetched)) = fetcher.get(origin.url("/"), None, LIMIT).await else {
            panic!("it is there")
        };
        assert_eq!(fetched.bytes, "fine");
        assert_eq!(fetched.freshness.is_fresh(Instant::now().into_std()), fresh);
    }
}
