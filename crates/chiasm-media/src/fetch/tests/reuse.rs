//! Tests of conditional requests and of connection reuse.

use super::*;

/// Starts an origin that sends `answers` one after another, on any number of connections. Returns
/// it with a channel of the request heads in lower case.
async fn scripted(answers: &'static [&'static str]) -> (Origin, mpsc::UnboundedReceiver<String>) {
    let (sender, heads) = mpsc::unbounded_channel();
    let next = Arc::new(AtomicUsize::new(0));
    let origin = Origin::start(move |head, mut stream| {
        let sender = sender.clone();
        let next = next.clone();
        async move {
            let mut head = Some(head);
            while let Some(request) = head {
                sender.send(request.to_ascii_lowercase()).unwrap();
                let answer = answers[next.fetch_add(1, Ordering::SeqCst)];
                stream.write_all(answer.as_bytes()).await.unwrap();
                head = read_head(&mut stream).await;
            }
        }
    })
    .await;
    (origin, heads)
}

/// Fetches a URL without a cached answer.
async fn first(fetcher: &Fetcher, url: Url) -> Fetched {
    match fetcher.get(url, None, MAX_BODY_BYTES).await.unwrap() {
        FetchOutcome::Fetched(fetched) => fetched,
        FetchOutcome::NotModified(_) => panic!("a 304 for an unconditional request"),
    }
}

const TAGGED: &str =
    "HTTP/1.1 200 OK\r\netag: \"1\"\r\ncache-control: max-age=60\r\ncontent-length: 3\r\n\r\nabc";

#[tokio::test]
async fn cached_answer_is_revalidated() {
    let (origin, mut heads) = scripted(&[
        TAGGED,
        "HTTP/1.1 304 Not Modified\r\netag: \"1\"\r\ncache-control: max-age=90\r\n\r\n",
        "HTTP/1.1 200 OK\r\netag: \"2\"\r\ncontent-length: 3\r\n\r\ndef",
    ])
    .await;
    let fetcher = open_fetcher();
    let fetched = first(&fetcher, origin.url("/")).await;
    let now = Instant::now().into_std();
    assert_eq!(fetched.bytes, "abc");
    assert!(
        fetched.freshness.may_be_stored()
            && fetched.freshness.is_fresh(now + Duration::from_secs(50))
    );
    assert!(!fetched.freshness.is_fresh(now + Duration::from_secs(61)));

    let FetchOutcome::NotModified(newer) =
        fetcher.get(origin.url("/"), Some(&fetched.freshness), MAX_BODY_BYTES).await.unwrap()
    else {
        panic!("expected a 304");
    };
    let refreshed = fetched.freshness.refreshed(newer);
    assert!(refreshed.is_fresh(now + Duration::from_secs(80)));

    let FetchOutcome::Fetched(changed) =
        fetcher.get(origin.url("/"), Some(&refreshed), MAX_BODY_BYTES).await.unwrap()
    else {
        panic!("expected a new body");
    };
    assert_eq!(changed.bytes, "def");
    assert!(changed.freshness.may_be_stored() && !changed.freshness.is_fresh(now));

    assert!(!heads.recv().await.unwrap().contains("if-none-match"));
    assert!(heads.recv().await.unwrap().contains("if-none-match: \"1\"\r\n"));
    assert!(heads.recv().await.unwrap().contains("if-none-match: \"1\"\r\n"));
    // All requests share one connection.
    assert_eq!(origin.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn not_modified_for_another_url_is_an_error() {
    let (origin, mut heads) = scripted(&[
        TAGGED,
        // The request to another URL carries no tag, so that a 304 is not a valid answer.
        "HTTP/1.1 304 Not Modified\r\netag: \"1\"\r\n\r\n",
    ])
    .await;
    let fetcher = open_fetcher();
    let fetched = first(&fetcher, origin.url("/")).await;
    let error = fetcher
        .get(origin.url("/other"), Some(&fetched.freshness), MAX_BODY_BYTES)
        .await
        .unwrap_err();
    assert_eq!(error, MediaError::OriginStatus { status: 304 });
    heads.recv().await.unwrap();
    assert!(!heads.recv().await.unwrap().contains("if-none-match"));
}

#[tokio::test]
async fn not_modified_with_another_tag_is_refetched() {
    let (origin, mut heads) = scripted(&[
        TAGGED,
        "HTTP/1.1 304 Not Modified\r\netag: \"2\"\r\n\r\n",
        "HTTP/1.1 200 OK\r\netag: \"2\"\r\ncontent-length: 3\r\n\r\ndef",
    ])
    .await;
    // The second request does not count as a redirect.
    let fetcher = fetcher(&MediaConfig { max_redirects: 0, ..config() });
    let fetched = first(&fetcher, origin.url("/")).await;
    let FetchOutcome::Fetched(changed) =
        fetcher.get(origin.url("/"), Some(&fetched.freshness), MAX_BODY_BYTES).await.unwrap()
    else {
        panic!("expected a new body");
    };
    assert_eq!(changed.bytes, "def");
    heads.recv().await.unwrap();
    assert!(heads.recv().await.unwrap().contains("if-none-match"));
    assert!(!heads.recv().await.unwrap().contains("if-none-match"));
}

#[tokio::test]
async fn answer_after_redirect_is_revalidated_at_its_own_url() {
    const FOUND: &str = "HTTP/1.1 302 Found\r\nlocation: /b\r\n\
                         cache-control: max-age=20\r\ncontent-length: 0\r\n\r\n";
    let (origin, mut heads) = scripted(&[
        FOUND,
        TAGGED,
        FOUND,
        "HTTP/1.1 304 Not Modified\r\n\r\n",
        // Now the redirect leads to another URL, where the same tag means another body.
        "HTTP/1.1 302 Found\r\nlocation: /c\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\netag: \"1\"\r\ncontent-length: 3\r\n\r\ndef",
    ])
    .await;
    let fetcher = open_fetcher();
    let fetched = first(&fetcher, origin.url("/a")).await;
    let now = Instant::now().into_std();
    assert!(fetched.freshness.is_fresh(now + Duration::from_secs(10)));
    assert!(!fetched.freshness.is_fresh(now + Duration::from_secs(21)));
    let FetchOutcome::NotModified(newer) =
        fetcher.get(origin.url("/a"), Some(&fetched.freshness), MAX_BODY_BYTES).await.unwrap()
    else {
        panic!("expected a 304");
    };
    let refreshed = fetched.freshness.refreshed(newer);
    assert!(
        refreshed.is_fresh(now + Duration::from_secs(10))
            && !refreshed.is_fresh(now + Duration::from_secs(25))
    );
    let FetchOutcome::Fetched(changed) =
        fetcher.get(origin.url("/a"), Some(&refreshed), MAX_BODY_BYTES).await.unwrap()
    else {
        panic!("expected the body of /c");
    };
    assert_eq!(changed.bytes, "def");
    assert!(!changed.freshness.is_fresh(now));
    for (path, is_conditional) in
        [("/a", false), ("/b", false), ("/a", false), ("/b", true), ("/a", false), ("/c", false)]
    {
        let head = heads.recv().await.unwrap();
        assert!(head.starts_with(&format!("get {path} ")), "{head}");
        assert_eq!(head.contains("if-none-match"), is_conditional, "{head}");
    }
}

#[tokio::test]
async fn answer_transformed_by_a_proxy_is_not_stored() {
    let (origin, _heads) = scripted(&[
        "HTTP/1.1 203 Changed\r\ncache-control: max-age=60\r\ncontent-length: 3\r\n\r\nabc",
    ])
    .await;
    let fetched = first(&open_fetcher(), origin.url("/")).await;
    assert_eq!(fetched.bytes, "abc");
    assert!(!fetched.freshness.may_be_stored());
}

#[tokio::test]
async fn forbidden_urls_are_refused_before_any_request() {
    let fetcher = fetcher(&MediaConfig::default());
    for (url, expected) in [
        ("http://127.0.0.1/", MediaError::AddressForbidden),
        ("http://example.com:8080/", MediaError::PortForbidden),
        ("ftp://example.com/", MediaError::UnsupportedScheme),
        ("http://a@example.com/", MediaError::CredentialsInUrl),
    ] {
        assert_eq!(fetcher.check(&Url::parse(url).unwrap()), Err(expected), "{url}");
    }
    assert_eq!(fetcher.check(&Url::parse("https://example.com/").unwrap()), Ok(()));
}
