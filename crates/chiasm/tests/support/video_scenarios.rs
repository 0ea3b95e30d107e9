//! Ten more scenarios, with videos that are planned from their containers.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, Expect};
use serde_json::{Value, json};

use super::scenario_run::Request;
use super::scripted_videos::video;

/// A text of many blocks.
const LONG_TEXT: &str = "The committee met on a rainy day to hear about the films of the year. \
    Each film was shown without its sound, and nobody was allowed to speak before the end. Then \
    every member wrote down what had happened in it, from the first scene to the last, and read \
    that aloud to the others. Where two members disagreed, the film was shown again. At the end of \
    the day all reports were put into a box, which is opened once a year. You are to write the \
    report about the film below, as if you had been there.";
const QUESTION: &str = "What happens in this video?";

/// A named sequence of requests.
pub struct VideoScenario {
    pub name: &'static str,
    pub requests: Vec<Request>,
}

impl VideoScenario {
    fn new(name: &'static str, requests: impl IntoIterator<Item = Request>) -> Self {
        Self { name, requests: requests.into_iter().collect() }
    }
}

/// Returns the scenarios for two engines with room for all their blocks. Each opens with different
/// words, so that no scenario hits blocks of another.
pub fn all() -> Vec<VideoScenario> {
    vec![
        VideoScenario::new(
            "1 one video repeated",
            repeated(&[text("Film."), video(1), question()]),
        ),
        VideoScenario::new(
            "2 one video in two conversations",
            [
                ask(&[text("Shared."), video(1), text("Who is in it?")]),
                ask(&[text("Shared."), video(1), text("Where was it filmed?")])
                    .expect(Expect::SharesImages(0)),
                ask(&[text("Shared."), video(1), text("Who is in it?")]).expect(Expect::Repeat(0)),
            ],
        ),
        other_frame_rate(),
        VideoScenario::new(
            "4 two videos, also in another order",
            [
                ask(&[text("Pair."), video(1), video(2), question()]),
                ask(&[text("Pair."), video(1), video(2), question()]).expect(Expect::Repeat(0)),
                ask(&[text("Pair."), video(2), video(1), question()]).expect(Expect::OtherOrder),
                ask(&[text("Pair."), video(1), video(1), question()]).expect(Expect::LessThan(1)),
            ],
        ),
        VideoScenario::new(
            "5 a video and an image",
            [
                ask(&[text("Both."), video(1), image(), question()]),
                ask(&[text("Both."), video(1), image(), question()]).expect(Expect::Repeat(0)),
                ask(&[text("Both."), video(2), image(), question()]).expect(Expect::LessThan(1)),
            ],
        ),
        conversation(),
        VideoScenario::new(
            "7 videos after a long shared text",
            [
                ask(&[text(LONG_TEXT)]),
                ask(&[text(LONG_TEXT), video(1)]).expect(Expect::Extends(0)),
                ask(&[text(LONG_TEXT), video(1)]).expect(Expect::Repeat(1)),
                ask(&[text(LONG_TEXT), video(2)])
                    .expect(Expect::Extends(0))
                    .expect(Expect::LessThan(2)),
                ask(&[text(LONG_TEXT), video(2)]).expect(Expect::Repeat(3)),
            ],
        ),
        separated("8 salted caches", "Secret.", "cache_salt", "a", "b"),
    ]
}

/// Returns the scenario of a video for two adapters with these names.
pub fn adapters(one: &str, other: &str) -> VideoScenario {
    separated("9 two adapters", "Adapted.", "model", one, other)
}

/// Returns the scenario of a video whose blocks are evicted, for one engine. Two prompts of
/// `filler_words` words fill the engine's KV cache.
pub fn eviction(filler_words: usize) -> VideoScenario {
    let question = || ask(&[text("Evicted."), video(1), question()]);
    let filler = |word: &str| ask(&[text(&format!("{word} ").repeat(filler_words))]).evicting();
    VideoScenario::new(
        "10 an evicted video",
        [
            question(),
            question().expect(Expect::Repeat(0)),
            filler("rain"),
            filler("snow"),
            question().expect(Expect::LessThan(1)).evicting(),
            question().expect(Expect::Repeat(4)).evicting(),
        ],
    )
}

/// Returns the scenario of a video with other frames by a request's own settings.
fn other_frame_rate() -> VideoScenario {
    let at_rate = |fps: u64| {
        ask(&[text("Rates."), video(1), question()])
            .with("media_io_kwargs", json!({"video": {"fps": fps}}))
    };
    VideoScenario::new(
        "3 another frame rate",
        [
            ask(&[text("Rates."), video(1), question()]),
            ask(&[text("Rates."), video(1), question()]).expect(Expect::Repeat(0)),
            at_rate(1).expect(Expect::LessThan(1)),
            at_rate(1).expect(Expect::Repeat(2)),
            at_rate(4).expect(Expect::LessThan(3)),
        ],
    )
}

/// Returns the scenario of a conversation about a video, in three turns.
fn conversation() -> VideoScenario {
    let user = |content: Value| json!({"role": "user", "content": content});
    let assistant = |content: &str| json!({"role": "assistant", "content": content});
    let turns = [
        user(json!([text("Talk."), video(1), question()])),
        assistant("A ball falls from a table and rolls to the door."),
        user(json!("Which colour is the ball, and who has pushed it?")),
        assistant("The ball is red, and a cat has pushed it."),
        user(json!([text("Is this the same cat?"), video(2)])),
    ];
    let until = |turn: usize| Request::new(json!(turns[..=turn]));
    VideoScenario::new(
        "6 a conversation about a video",
        [
            until(0),
            until(2).expect(Expect::Extends(0)),
            until(4).expect(Expect::Extends(1)),
            until(4).expect(Expect::Repeat(2)),
        ],
    )
}

/// Returns a scenario of equal prompts whose blocks are kept apart by the values of a field.
fn separated(
    name: &'static str,
    opening: &str,
    field: &str,
    one: &str,
    other: &str,
) -> VideoScenario {
    let with =
        |value: &str| ask(&[text(opening), video(1), question()]).with(field, Value::from(value));
    VideoScenario::new(
        name,
        [
            ask(&[text(opening), video(1), question()]),
            with(one).expect(Expect::Nothing),
            with(one).expect(Expect::Repeat(1)),
            with(other).expect(Expect::Nothing),
            ask(&[text(opening), video(1), question()]).expect(Expect::Repeat(0)),
        ],
    )
}

fn repeated(parts: &[Value]) -> [Request; 2] {
    [ask(parts), ask(parts).expect(Expect::Repeat(0))]
}

/// Returns a request of one message with these parts.
fn ask(parts: &[Value]) -> Request {
    Request::new(json!([{"role": "user", "content": parts}]))
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn question() -> Value {
    text(QUESTION)
}

fn image() -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(DAWN.jpeg));
    json!({"type": "image_url", "image_url": {"url": url}})
}
