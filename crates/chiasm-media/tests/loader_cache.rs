//! Tests of the loader's caches: freshness, revalidation, failures, single flight and names.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chiasm_media::{
    ByteBudget, Clock, ContentHash, EncodedMedia, Fault, MediaConfig, MediaCounts, MediaError,
    MediaInput, MediaLimits, MediaLoader, MediaName, MediaPart,
};
use chiasm_types::Modality;
use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Returns a GIF of one pixel, made unique by a trailing byte.
fn gif(number: u8) -> Vec<u8> {
    [
        b"GIF87a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;",
        &[number][..],
    ]
    .concat()
}

/// The current answer of an origin.
#[derive(Clone)]
struct Answer {
    status: &'static str,
    headers: &'static str,
    body: Vec<u8>,
}

/// An origin with one picture, which tests can change. It answers `If-None-Match: "1"` with 304
/// while its headers have that tag.
struct Origin {
    url: String,
    state: Arc<State>,
}

struct State {
    answer: Mutex<Answer>,
    /// The number of requests so far.
    requests: watch::Sender<usize>,
    /// The number of bodies sent so far.
    bodies: AtomicUsize,
    /// `true` while answers are held back.
    paused: watch::Sender<bool>,
}

impl Origin {
    async fn start(headers: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/a.gif", listener.local_addr().unwrap());
        let state = Arc::new(State {
            answer: Mutex::new(Answer { status: "200 OK", headers, body: gif(0) }),
            requests: watch::Sender::new(0),
            bodies: AtomicUsize::new(0),
            paused: watch::Sender::new(false),
        });
        let origin = Self { url, state: state.clone() };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer_all(stream, state.clone()));
            }
        });
        origin
    }

    fn change(&self, change: impl FnOnce(&mut Answer)) {
        change(&mut self.state.answer.lock().unwrap());
    }

    fn requests(&self) -> usize {
        *self.state.requests.borrow()
    }

    async fn wait_for_requests(&self, count: usize) {
        self.state.requests.subscribe().wait_for(|&requests| requests >= count).await.unwrap();
    }

    fn bodies(&self) -> usize {
        self.state.bodies.load(Ordering::SeqCst)
    }

    fn set_paused(&self, paused: bool) {
        self.state.paused.send_replace(paused);
    }

    /// Opens the URL for `callers` concurrent callers. The origin answers after all of them wait.
    async fn open_concurrently(
        &self,
        loader: &MediaLoader,
        callers: usize,
    ) -> Vec<Result<EncodedMedia, MediaError>> {
        let before = self.requests();
        self.set_paused(true);
        let mut all = join_all((0..callers).map(|_| Box::pin(loader.open(&self.url))));
        assert!((&mut all).now_or_never().is_none(), "no caller waits for the origin");
        tokio::select! {
            _ = &mut all => panic!("an outcome before the origin's answer"),
            () = self.wait_for_requests(before + 1) => {}
        }
        self.set_paused(false);
        all.await
    }
}

async fn answer_all(mut stream: TcpStream, state: Arc<State>) {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = stream.read_u8().await else { return };
            head.push(byte);
        }
        state.requests.send_modify(|requests| *requests += 1);
        let Answer { status, headers, body } = state.answer.lock().unwrap().clone();
        state.paused.subscribe().wait_for(|paused| !paused).await.unwrap();
        let is_conditional =
            String::from_utf8(head).unwrap().to_lowercase().contains("if-none-match: \"1\"");
        let answer = if is_conditional && headers.contains("ETag: \"1\"") {
            format!("HTTP/1.1 304 Not Modified\r\n{headers}\r\n").into_bytes()
        } else {
            state.bodies.fetch_add(1, Ordering::SeqCst);
            let head =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
            [head.as_bytes(), &body].concat()
        };
        if stream.write_all(&answer).await.is_err() {
            return;
        }
    }
}

/// Longer than any test runs.
const MINUTE: Duration = Duration::from_secs(60);

fn config() -> MediaConfig {
    MediaConfig { allow_private_addresses: true, failure_ttl: MINUTE, ..MediaConfig::default() }
}

fn loader() -> MediaLoader {
    MediaLoader::new(config(), ByteBudget::new(10_000_000)).unwrap()
}

async fn content(loader: &MediaLoader, url: &str) -> ContentHash {
    loader.open(url).await.unwrap().content
}

#[tokio::test]
async fn fresh_image_is_fetched_once() {
    let origin = Origin::start("Cache-Control: max-age=60\r\n").await;
    let loader = loader();
    for _ in 0..5 {
        assert_eq!(content(&loader, &origin.url).await, ContentHash::digest(&gif(0)));
    }
    assert_eq!(origin.requests(), 1);
    let MediaCounts { fetched, fetched_bytes, fresh, cached_bytes, .. } = loader.counts();
    assert_eq!((fetched, fetched_bytes, fresh), (1, gif(0).len() as u64, 4));
    assert!(cached_bytes > 0);
    // URLs that differ in the query are distinct, unlike those that differ in the fragment.
    content(&loader, &format!("{}?x=1", origin.url)).await;
    content(&loader, &format!("{}#y", origin.url)).await;
    assert_eq!(origin.requests(), 2);
}

#[tokio::test]
async fn changed_image_at_the_same_url_is_fetched() {
    let origin = Origin::start("ETag: \"1\"\r\nCache-Control: no-cache\r\n").await;
    let loader = loader();
    for _ in 0..3 {
        content(&loader, &origin.url).await;
    }
    assert_eq!((origin.requests(), origin.bodies()), (3, 1), "revalidated each time, sent once");
    assert_eq!(loader.counts().revalidated, 2);
    origin.change(|answer| {
        answer.headers = "ETag: \"2\"\r\nCache-Control: no-cache\r\n";
        answer.body = gif(1);
    });
    assert_eq!(content(&loader, &origin.url).await, ContentHash::digest(&gif(1)));
}

#[tokio::test]
async fn uncacheable_answer_is_fetched_each_time() {
    let origin = Origin::start("ETag: \"1\"\r\nCache-Control: no-store\r\n").await;
    let loader = loader();
    for _ in 0..3 {
        content(&loader, &origin.url).await;
    }
    assert_eq!(origin.bodies(), 3);
}

#[tokio::test]
async fn min_freshness_applies_without_cache_headers() {
    let origin = Origin::start("").await;
    let config = MediaConfig { min_freshness: MINUTE, ..config() };
    let clock = Clock::default();
    let loader =
        MediaLoader::with_clock(config, ByteBudget::new(10_000_000), clock.clone()).unwrap();
    content(&loader, &origin.url).await;
    content(&loader, &origin.url).await;
    assert_eq!(origin.requests(), 1);
    clock.advance(MINUTE);
    content(&loader, &origin.url).await;
    assert_eq!(origin.requests(), 2);
}

#[tokio::test]
async fn concurrent_callers_share_one_fetch() {
    let origin = Origin::start("Cache-Control: no-store\r\n").await;
    let loader = loader();
    let images: Vec<EncodedMedia> =
        origin.open_concurrently(&loader, 200).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(origin.requests(), 1);
    assert!(
        images.iter().all(|image| image.bytes.as_ptr() == images[0].bytes.as_ptr()),
        "the callers share one copy"
    );
    assert_eq!(loader.counts().shared, 199);
}

#[tokio::test]
async fn failure_is_shared_until_it_expires() {
    let origin = Origin::start("").await;
    let clock = Clock::default();
    let loader =
        MediaLoader::with_clock(config(), ByteBudget::new(10_000_000), clock.clone()).unwrap();
    content(&loader, &origin.url).await;
    origin.change(|answer| answer.status = "500 Oops");
    let errors = origin.open_concurrently(&loader, 50).await;
    assert!(errors.iter().all(|error| *error == Err(MediaError::OriginStatus { status: 500 })));
    origin.change(|answer| {
        answer.status = "200 OK";
        answer.body = gif(1);
    });
    assert_eq!(loader.open(&origin.url).await.unwrap_err().fault(), Fault::OriginFailed);
    assert_eq!(origin.requests(), 2);
    clock.advance(MINUTE);
    assert_eq!(content(&loader, &origin.url).await, ContentHash::digest(&gif(1)));
    assert_eq!(origin.requests(), 3);
}

fn with_modality(url: &str, modality: Modality) -> MediaPart {
    MediaPart { modality, ..url.to_owned().into() }
}

#[tokio::test]
async fn url_failure_applies_only_to_its_modality() {
    let origin = Origin::start("").await;
    let loader = loader();
    let text = b"not an image".to_vec();
    origin.change(|answer| answer.body = text.clone());
    assert_eq!(loader.open(&origin.url).await.unwrap_err().fault(), Fault::Unsupported);
    let video = loader.open(with_modality(&origin.url, Modality::Video)).await.unwrap();
    assert_eq!(video.content, ContentHash::digest(&text));
    assert_eq!(loader.open(&origin.url).await.unwrap_err().fault(), Fault::Unsupported);
    assert_eq!(origin.requests(), 2, "the failure as an image is still cached");
}

#[tokio::test]
async fn url_failure_keeps_content_for_revalidation() {
    let origin = Origin::start("ETag: \"1\"\r\n").await;
    let clock = Clock::default();
    let loader =
        MediaLoader::with_clock(config(), ByteBudget::new(10_000_000), clock.clone()).unwrap();
    let first = content(&loader, &origin.url).await;
    origin.change(|answer| {
        answer.status = "500 Oops";
        answer.headers = "";
    });
    assert_eq!(loader.open(&origin.url).await.unwrap_err().fault(), Fault::OriginFailed);
    assert_eq!(origin.bodies(), 2);
    origin.change(|answer| {
        answer.status = "200 OK";
        answer.headers = "ETag: \"1\"\r\n";
    });
    clock.advance(MINUTE);
    assert_eq!(content(&loader, &origin.url).await, first);
    assert_eq!(origin.bodies(), 2, "the origin confirmed the content and sent no body");
    assert_eq!(loader.counts().revalidated, 1);
}

#[tokio::test]
async fn url_failure_as_video_keeps_the_fresh_image() {
    let origin = Origin::start("Cache-Control: max-age=3600\r\n").await;
    let limits = MediaLimits { video_bytes: 10, ..config().limits };
    let loader =
        MediaLoader::new(MediaConfig { limits, ..config() }, ByteBudget::new(10_000_000)).unwrap();
    let as_video = loader.open(with_modality(&origin.url, Modality::Video)).await;
    assert_eq!(as_video.unwrap_err().fault(), Fault::TooLarge);
    content(&loader, &origin.url).await;
    let as_video = loader.open(with_modality(&origin.url, Modality::Video)).await;
    assert_eq!(as_video.unwrap_err().fault(), Fault::TooLarge);
    content(&loader, &origin.url).await;
    assert_eq!(origin.requests(), 2);
}

#[tokio::test]
async fn cancelled_leader_does_not_cancel_the_fetch() {
    let origin = Origin::start("").await;
    let loader = loader();
    origin.set_paused(true);
    let leader = {
        let loader = loader.clone();
        let url = origin.url.clone();
        tokio::spawn(async move { loader.open(url).await })
    };
    origin.wait_for_requests(1).await;
    let mut follower = Box::pin(loader.open(&origin.url));
    assert!((&mut follower).now_or_never().is_none());
    leader.abort();
    assert!(leader.await.unwrap_err().is_cancelled());
    origin.set_paused(false);
    assert!(follower.await.is_ok());
    assert_eq!(origin.requests(), 1);
}

#[tokio::test]
async fn exhausted_budget_refuses_the_fetch() {
    let origin = Origin::start("").await;
    origin.change(|answer| answer.body = [gif(0), vec![0; 50_000]].concat());
    let budget = ByteBudget::new(60_000);
    let loader =
        MediaLoader::new(MediaConfig { cache_bytes: 0, ..config() }, budget.clone()).unwrap();
    let held = loader.open(&origin.url).await.unwrap();
    assert_eq!(budget.held(), held.bytes.len() as u64);
    let error = loader.open(&origin.url).await.unwrap_err();
    assert_eq!((error.clone(), error.fault()), (MediaError::Busy, Fault::Busy));
    assert_eq!(budget.held(), held.bytes.len() as u64);
    drop(held);
    assert_eq!(budget.held(), 0);
    assert!(
        loader.open(&origin.url).await.is_ok(),
        "a lack of budget is not cached as the URL's failure"
    );
}

#[tokio::test]
async fn evicted_items_release_their_memory() {
    let budget = ByteBudget::new(1_000_000);
    let loader =
        MediaLoader::new(MediaConfig { cache_bytes: 100_000, ..config() }, budget.clone()).unwrap();
    for number in 0..200_u8 {
        let file = [gif(number), vec![0; 10_000]].concat();
        let url = format!(
            "data:;base64,{}",
            base64::Engine::encode(&base64::prelude::BASE64_STANDARD, file)
        );
        loader.open(url).await.unwrap();
        assert!(budget.held() <= 100_000, "{}", budget.held());
    }
    assert!(budget.held() > 50_000);
}

fn named(url: Option<&str>, name: MediaName) -> MediaPart {
    MediaPart {
        source: url.map(|url| MediaInput::Url(url.to_owned().into())),
        name: Some(name),
        modality: Modality::Image,
    }
}

#[tokio::test]
async fn uuid_refers_to_its_owners_latest_item() {
    let loader = loader();
    let data = |number| {
        format!(
            "data:;base64,{}",
            base64::Engine::encode(&base64::prelude::BASE64_STANDARD, gif(number))
        )
    };
    let name = |owner: &str| MediaName::new([Some(owner.as_bytes())], "uuid").unwrap();
    assert_eq!(loader.open(named(None, name("a"))).await, Err(MediaError::UnknownUuid));
    let first = loader.open(named(Some(&data(1)), name("a"))).await.unwrap();
    assert_eq!(loader.open(named(None, name("a"))).await.unwrap(), first);
    assert_eq!(loader.open(named(None, name("b"))).await.unwrap_err().fault(), Fault::BadRequest);
    // A name that comes with another image refers to that image from then on.
    let second = loader.open(named(Some(&data(2)), name("a"))).await.unwrap();
    assert_eq!(second.content, ContentHash::digest(&gif(2)));
    assert_eq!(loader.open(named(None, name("a"))).await.unwrap(), second);
    // A failed part does not rebind its name.
    assert!(loader.open(named(Some("data:;base64,AAAA"), name("a"))).await.is_err());
    assert_eq!(loader.open(named(None, name("a"))).await.unwrap(), second);
    assert_eq!((loader.counts().named, loader.counts().unknown_names), (3, 2));
}
