//! What is asked when an earlier answer is known, and what becomes of connections.

use super::*;

/// Sends what it is given as one answer after another, on as many connections as the client likes;
/// tells each head.
async fn scripted(answers: &'static [&'static str]) -> (Origin, mpsc::UnboundedReceiver<String>) {
    let (heads, seen) = mpsc::unbounded_channel();
    let next = Arc::new(AtomicUsize::new(0));
    let origin = Origin::start(move |head, mut stream| {
        let (heads, next) = (heads.clone(), next.clone());
        async move {
            let mut head = Some(head);
            while let Some(asked) = head {
                heads.send(asked.to_ascii_lowercase()).unwrap();
                let answer = answers[next.fetch_add(1, Ordering::SeqCst)];
                stream.write_all(answer.as_bytes()).await.unwrap();
                head = read_head(&mut stream).await;
            }
        }
    })
    .await;
    (origin, seen)
}

async fn first(fetcher: &Fetcher, url: Url) -> Fetched {
    match fetcher.get(url, None, LIMIT).await.unwrap() {
        Answer::New(fetched) => fetched,
        Answer::NotModified(_) => panic!("nobody asked whether it was modified"),
    }
}

const TAGGED: &str =
    "HTTP/1.1 200 OK\r\netag: \"1\"\r\ncache-control: max-age=60\r\ncontent-length: 3\r\n\r\nabc";

#[tokio::test]
async fn a_known_answer_is_asked_about() {
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

    let Answer::NotModified(by) =
        fetcher.get(origin.url("/"), Some(&fetched.freshness), LIMIT).await.unwrap()
    else {
        panic!("it was not modified");
    };
    let known = fetched.freshness.refreshed(by);
    assert!(known.is_fresh(now + Duration::from_secs(80)));

    let Answer::New(changed) = fetcher.get(origin.url("/"), Some(&known), LIMIT).await.unwrap()
    else {
        panic!("it was modified");
    };
    assert_eq!(changed.bytes, "def");
    assert!(changed.freshness.may_be_stored() && !changed.freshness.is_fresh(now));

    assert!(!heads.recv().await.unwrap().contains("if-none-match"));
    assert!(heads.recv().await.unwrap().contains("if-none-match: \"1\"\r\n"));
    assert!(heads.recv().await.unwrap().contains("if-none-match: \"1\"\r\n"));
    // All on one connection.
    assert_eq!(origin.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn not_modified_counts_only_where_it_was_asked() {
    let (origin, mut heads) = scripted(&[
        TAGGED,
        // Another URL is not asked with this one's tag, and so cannot say this.
        "HTTP/1.1 304 Not Modified\r\netag: \"1\"\r\n\r\n",
    ])
    .await;
    let fetcher = open_fetcher();
    let fetched = first(&fetcher, origin.url("/")).await;
    let error =
        fetcher.get(origin.url("/other"), Some(&fetched.freshness), LIMIT).await.unwrap_err();
    assert_eq!(error, MediaError::OriginStatus { status: 304 });
    heads.recv().await.unwrap();
    assert!(!heads.recv().await.unwrap().contains("if-none-match"));
}

#[tokio::test]
async fn not_modified_of_something_else_is_asked_again_plainly() {
    let (origin, mut heads) = scripted(&[
        TAGGED,
        "HTTP/1.1 304 Not Modified\r\netag: \"2\"\r\n\r\n",
        "HTTP/1.1 200 OK\r\netag: \"2\"\r\ncontent-length: 3\r\n\r\ndef",
    ])
    .await;
    // It is no redirect.
    let fetcher = fetcher(&MediaConfig { max_redirects: 0, ..config() });
    let fetched = first(&fetcher, origin.url("/")).await;
    let Answer::New(changed) =
        fetcher.get(origin.url("/"), Some(&fetched.freshness), LIMIT).await.unwrap()
    else {
        panic!("it was modified");
    };
    assert_eq!(changed.bytes, "def");
    heads.recv().await.unwrap();
    assert!(heads.recv().await.unwrap().contains("if-none-match"));
    assert!(!heads.recv().await.unwrap().contains("if-none-match"));
}

#[tokio::test]
async fn an_answer_behind_a_redirect_is_asked_about_where_it_came_from() {
    const FOUND: &str = "HTTP/1.1 302 Found\r\nlocation: /b\r\ncache-control: max-age=20\r\ncontent-length: 0\r\n\r\n";
    let (origin, mut heads) = scripted(&[
        FOUND,
        TAGGED,
        FOUND,
        "HTTP/1.1 304 Not Modified\r\n\r\n",
        // Then it leads elsewhere, where the same tag means something else.
        "HTTP/1.1 302 Found\r\nlocation: /c\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\netag: \"1\"\r\ncontent-length: 3\r\n\r\ndef",
    ])
    .await;
    let fetcher = open_fetcher();
    let fetched = first(&fetcher, origin.url("/a")).await;
    let now = Instant::now().into_std();
    assert!(fetched.freshness.is_fresh(now + Duration::from_secs(10)));
    assert!(!fetched.freshness.is_fresh(now + Duration::from_secs(21)));
    let Answer::NotModified(by) =
        fetcher.get(origin.url("/a"), Some(&fetched.freshness), LIMIT).await.unwrap()
    else {
        panic!("it was not modified");
    };
    let known = fetched.freshness.refreshed(by);
    assert!(
        known.is_fresh(now + Duration::from_secs(10))
            && !known.is_fresh(now + Duration::from_secs(25))
    );
    let Answer::New(changed) = fetcher.get(origin.url("/a"), Some(&known), LIMIT).await.unwrap()
    else {
        panic!("it leads elsewhere");
    };
    assert_eq!(changed.bytes, "def");
    assert!(!changed.freshness.is_fresh(now));
    for (path, asked) in
        [("/a", false), ("/b", false), ("/a", false), ("/b", true), ("/a", false), ("/c", false)]
    {
        let head = heads.recv().await.unwrap();
        assert!(head.starts_with(&format!("get {path} ")), "{head}");
        assert_eq!(head.contains("if-none-match"), asked, "{head}");
    }
}

#[tokio::test]
async fn what_a_proxy_made_is_not_stored() {
    let (origin, _heads) = scripted(&[
        "HTTP/1.1 203 Changed\r\ncache-control: max-age=60\r\ncontent-length: 3\r\n\r\nabc",
    ])
    .await;
    let fetched = first(&open_fetcher(), origin.url("/")).await;
    assert_eq!(fetched.bytes, "abc");
    assert!(!fetched.freshness.may_be_stored());
}

#[tokio::test]
async fn forbidden_urls_are_refused_without_asking() {
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
