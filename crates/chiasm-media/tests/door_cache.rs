//! The door's memory: what is fetched once, what is asked again, what is forgotten, and who shares.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chiasm_media::{
    ByteBudget, Clock, ContentHash, EncodedMedia, Fault, MediaConfig, MediaCounts, MediaDoor,
    MediaError, MediaInput, MediaLimits, MediaName, MediaPart,
};
use chiasm_types::Modality;
use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A GIF of one pixel, and a byte after it that makes it another file.
fn gif(number: u8) -> Vec<u8> {
    [
        b"GIF87a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;",
        &[number][..],
    ]
    .concat()
}

/// What an origin answers at the moment.
#[derive(Clone)]
struct Now {
    status: &'static str,
    headers: &'static str,
    body: Vec<u8>,
}

/// An origin whose one picture can be changed. `If-None-Match: "1"` is answered with 304 while its
/// headers have that tag.
struct Origin {
    url: String,
    state: Arc<State>,
}

struct State {
    now: Mutex<Now>,
    /// Requests so far.
    asked: watch::Sender<usize>,
    /// Bodies so far.
    sent: AtomicUsize,
    /// While this is so, answers wait.
    held: watch::Sender<bool>,
}

impl Origin {
    async fn start(headers: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/a.gif", listener.local_addr().unwrap());
        let now = Mutex::new(Now { status: "200 OK", headers, body: gif(0) });
        let (asked, held) = (watch::Sender::new(0), watch::Sender::new(false));
        let state = Arc::new(State { now, asked, sent: AtomicUsize::new(0), held });
        let origin = Self { url, state: state.clone() };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer_all(stream, state.clone()));
            }
        });
        origin
    }

    fn change(&self, change: impl FnOnce(&mut Now)) {
        change(&mut self.state.now.lock().unwrap());
    }

    fn asked(&self) -> usize {
        *self.state.asked.borrow()
    }

    async fn has_been_asked(&self, times: usize) {
        self.state.asked.subscribe().wait_for(|&asked| asked >= times).await.unwrap();
    }

    fn sent(&self) -> usize {
        self.state.sent.load(Ordering::SeqCst)
    }

    fn hold(&self, held: bool) {
        self.state.held.send_replace(held);
    }

    /// Opens its URL for so many callers, none of whom gets an answer before all have asked.
    async fn opened_at_once(
        &self,
        door: &MediaDoor,
        callers: usize,
    ) -> Vec<Result<EncodedMedia, MediaError>> {
        let before = self.asked();
        self.hold(true);
        let mut all = join_all((0..callers).map(|_| Box::pin(door.open(&self.url))));
        assert!((&mut all).now_or_never().is_none(), "nobody waits for the origin");
        tokio::select! {
            _ = &mut all => panic!("answers before the origin's"),
            () = self.has_been_asked(before + 1) => {}
        }
        self.hold(false);
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
        state.asked.send_modify(|asked| *asked += 1);
        let Now { status, headers, body } = state.now.lock().unwrap().clone();
        state.held.subscribe().wait_for(|held| !held).await.unwrap();
        let known =
            String::from_utf8(head).unwrap().to_lowercase().contains("if-none-match: \"1\"");
        let answer = if known && headers.contains("ETag: \"1\"") {
            format!("HTTP/1.1 304 Not Modified\r\n{headers}\r\n").into_bytes()
        } else {
            state.sent.fetch_add(1, Ordering::SeqCst);
            let head =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
            [head.as_bytes(), &body].concat()
        };
        if stream.write_all(&answer).await.is_err() {
            return;
        }
    }
}

/// More than any test takes.
const MINUTE: Duration = Duration::from_secs(60);

fn config() -> MediaConfig {
    MediaConfig { allow_private_addresses: true, failures_last: MINUTE, ..MediaConfig::default() }
}

fn door() -> MediaDoor {
    MediaDoor::new(config(), ByteBudget::new(10_000_000)).unwrap()
}

async fn content(door: &MediaDoor, url: &str) -> ContentHash {
    door.open(url).await.unwrap().content
}

#[tokio::test]
async fn a_fresh_image_is_fetched_once() {
    let (origin, door) = (Origin::start("Cache-Control: max-age=60\r\n").await, door());
    for _ in 0..5 {
        assert_eq!(content(&door, &origin.url).await, ContentHash::of(&gif(0)));
    }
    assert_eq!(origin.asked(), 1);
    let MediaCounts { fetched, fetched_bytes, fresh, cached_bytes, .. } = door.counts();
    assert_eq!((fetched, fetched_bytes, fresh), (1, gif(0).len() as u64, 4));
    assert!(cached_bytes > 0);
    // Another query is another URL; another fragment is not.
    content(&door, &format!("{}?x=1", origin.url)).await;
    content(&door, &format!("{}#y", origin.url)).await;
    assert_eq!(origin.asked(), 2);
}

#[tokio::test]
async fn a_changed_image_behind_the_same_url_is_noticed() {
    let (origin, door) =
        (Origin::start("ETag: \"1\"\r\nCache-Control: no-cache\r\n").await, door());
    for _ in 0..3 {
        content(&door, &origin.url).await;
    }
    assert_eq!((origin.asked(), origin.sent()), (3, 1), "asked each time, sent once");
    assert_eq!(door.counts().revalidated, 2);
    origin.change(|now| {
        (now.headers, now.body) = ("ETag: \"2\"\r\nCache-Control: no-cache\r\n", gif(1))
    });
    assert_eq!(content(&door, &origin.url).await, ContentHash::of(&gif(1)));
}

#[tokio::test]
async fn what_must_not_be_stored_is_fetched_each_time() {
    let (origin, door) =
        (Origin::start("ETag: \"1\"\r\nCache-Control: no-store\r\n").await, door());
    for _ in 0..3 {
        content(&door, &origin.url).await;
    }
    assert_eq!(origin.sent(), 3);
}

#[tokio::test]
async fn a_minimum_freshness_spares_origins_that_say_nothing() {
    let origin = Origin::start("").await;
    let (config, clock) = (MediaConfig { min_freshness: MINUTE, ..config() }, Clock::default());
    let door = MediaDoor::with_clock(config, ByteBudget::new(10_000_000), clock.clone()).unwrap();
    content(&door, &origin.url).await;
    content(&door, &origin.url).await;
    assert_eq!(origin.asked(), 1);
    clock.advance(MINUTE);
    content(&door, &origin.url).await;
    assert_eq!(origin.asked(), 2);
}

#[tokio::test]
async fn many_who_want_the_same_wait_for_one_fetch() {
    let (origin, door) = (Origin::start("Cache-Control: no-store\r\n").await, door());
    let images: Vec<EncodedMedia> =
        origin.opened_at_once(&door, 200).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(origin.asked(), 1);
    assert!(
        images.iter().all(|image| image.bytes.as_ptr() == images[0].bytes.as_ptr()),
        "in memory once"
    );
    assert_eq!(door.counts().shared, 199);
}

#[tokio::test]
async fn a_failure_is_shared_believed_for_a_moment_and_then_forgotten() {
    let (origin, clock) = (Origin::start("").await, Clock::default());
    let door = MediaDoor::with_clock(config(), ByteBudget::new(10_000_000), clock.clone()).unwrap();
    content(&door, &origin.url).await;
    origin.change(|now| now.status = "500 Oops");
    let errors = origin.opened_at_once(&door, 50).await;
    assert!(errors.iter().all(|error| *error == Err(MediaError::OriginStatus { status: 500 })));
    origin.change(|now| (now.status, now.body) = ("200 OK", gif(1)));
    assert_eq!(door.open(&origin.url).await.unwrap_err().fault(), Fault::OriginFailed);
    assert_eq!(origin.asked(), 2);
    clock.advance(MINUTE);
    assert_eq!(content(&door, &origin.url).await, ContentHash::of(&gif(1)));
    assert_eq!(origin.asked(), 3);
}

fn taken_for(url: &str, modality: Modality) -> MediaPart {
    MediaPart { modality, ..url.to_owned().into() }
}

#[tokio::test]
async fn url_failure_counts_for_its_modality_only() {
    let (origin, door) = (Origin::start("").await, door());
    let text = b"neither of the two".to_vec();
    origin.change(|now| now.body = text.clone());
    assert_eq!(door.open(&origin.url).await.unwrap_err().fault(), Fault::Unsupported);
    let video = door.open(taken_for(&origin.url, Modality::Video)).await.unwrap();
    assert_eq!(video.content, ContentHash::of(&text));
    assert_eq!(door.open(&origin.url).await.unwrap_err().fault(), Fault::Unsupported);
    assert_eq!(origin.asked(), 2, "the failure as an image is still believed");
}

#[tokio::test]
async fn url_failure_keeps_the_content_for_a_revalidation() {
    let (origin, clock) = (Origin::start("ETag: \"1\"\r\n").await, Clock::default());
    let door = MediaDoor::with_clock(config(), ByteBudget::new(10_000_000), clock.clone()).unwrap();
    let first = content(&door, &origin.url).await;
    origin.change(|now| (now.status, now.headers) = ("500 Oops", ""));
    assert_eq!(door.open(&origin.url).await.unwrap_err().fault(), Fault::OriginFailed);
    assert_eq!(origin.sent(), 2);
    origin.change(|now| (now.status, now.headers) = ("200 OK", "ETag: \"1\"\r\n"));
    clock.advance(MINUTE);
    assert_eq!(content(&door, &origin.url).await, first);
    assert_eq!(origin.sent(), 2, "the origin was asked whether it has changed, and sent nothing");
    assert_eq!(door.counts().revalidated, 1);
}

#[tokio::test]
async fn url_failure_as_a_video_leaves_a_fresh_image() {
    let origin = Origin::start("Cache-Control: max-age=3600\r\n").await;
    let limits = MediaLimits { video_bytes: 10, ..config().limits };
    let door =
        MediaDoor::new(MediaConfig { limits, ..config() }, ByteBudget::new(10_000_000)).unwrap();
    let as_video = door.open(taken_for(&origin.url, Modality::Video)).await;
    assert_eq!(as_video.unwrap_err().fault(), Fault::TooLarge);
    content(&door, &origin.url).await;
    let as_video = door.open(taken_for(&origin.url, Modality::Video)).await;
    assert_eq!(as_video.unwrap_err().fault(), Fault::TooLarge);
    content(&door, &origin.url).await;
    assert_eq!(origin.asked(), 2);
}

#[tokio::test]
async fn who_gives_up_does_not_take_the_fetch_away_from_others() {
    let (origin, door) = (Origin::start("").await, door());
    origin.hold(true);
    let leader = {
        let (door, url) = (door.clone(), origin.url.clone());
        tokio::spawn(async move { door.open(url).await })
    };
    origin.has_been_asked(1).await;
    let mut follower = Box::pin(door.open(&origin.url));
    assert!((&mut follower).now_or_never().is_none());
    leader.abort();
    assert!(leader.await.unwrap_err().is_cancelled());
    origin.hold(false);
    assert!(follower.await.is_ok());
    assert_eq!(origin.asked(), 1);
}

#[tokio::test]
async fn without_room_requests_are_refused_and_nothing_stays_behind() {
    let origin = Origin::start("").await;
    origin.change(|now| now.body = [gif(0), vec![0; 50_000]].concat());
    let budget = ByteBudget::new(60_000);
    let door = MediaDoor::new(MediaConfig { cache_bytes: 0, ..config() }, budget.clone()).unwrap();
    let held = door.open(&origin.url).await.unwrap();
    assert_eq!(budget.held(), held.bytes.len() as u64);
    let error = door.open(&origin.url).await.unwrap_err();
    assert_eq!((error.clone(), error.fault()), (MediaError::Busy, Fault::Busy));
    assert_eq!(budget.held(), held.bytes.len() as u64);
    drop(held);
    assert_eq!(budget.held(), 0);
    assert!(door.open(&origin.url).await.is_ok(), "not having had room is not the URL's failure");
}

#[tokio::test]
async fn the_cache_gives_its_memory_back() {
    let budget = ByteBudget::new(1_000_000);
    let door =
        MediaDoor::new(MediaConfig { cache_bytes: 100_000, ..config() }, budget.clone()).unwrap();
    for number in 0..200_u8 {
        let file = [gif(number), vec![0; 10_000]].concat();
        let url = format!(
            "data:;base64,{}",
            base64::Engine::encode(&base64::prelude::BASE64_STANDARD, file)
        );
        door.open(url).await.unwrap();
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
async fn a_uuid_stands_for_what_it_last_came_with_and_for_its_owner_only() {
    let door = door();
    let data = |number| {
        format!(
            "data:;base64,{}",
            base64::Engine::encode(&base64::prelude::BASE64_STANDARD, gif(number))
        )
    };
    let name = |owner: &str| MediaName::new([Some(owner.as_bytes())], "uuid").unwrap();
    assert_eq!(door.open(named(None, name("a"))).await, Err(MediaError::UnknownUuid));
    let first = door.open(named(Some(&data(1)), name("a"))).await.unwrap();
    assert_eq!(door.open(named(None, name("a"))).await.unwrap(), first);
    assert_eq!(door.open(named(None, name("b"))).await.unwrap_err().fault(), Fault::BadRequest);
    // The same name with another image is that image.
    let second = door.open(named(Some(&data(2)), name("a"))).await.unwrap();
    assert_eq!(second.content, ContentHash::of(&gif(2)));
    assert_eq!(door.open(named(None, name("a"))).await.unwrap(), second);
    // What fails does not rename anything.
    assert!(door.open(named(Some("data:;base64,AAAA"), name("a"))).await.is_err());
    assert_eq!(door.open(named(None, name("a"))).await.unwrap(), second);
    assert_eq!((door.counts().named, door.counts().unknown_names), (3, 2));
}
