//! Ten small conversations with the expectations of image-aware KV routing.
//!
//! The demo plays them on simulated engines. The tests play them on simulated and real engines, and
//! check the expectation of each request.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// A picture that is part of the binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picture {
    /// The file name.
    pub name: &'static str,
    /// The JPEG bytes.
    pub jpeg: &'static [u8],
}

macro_rules! pictures {
    ($($constant:ident = $file:literal),+ $(,)?) => {
        $(
            #[allow(missing_docs)]
            pub const $constant: Picture =
                Picture { name: $file, jpeg: include_bytes!(concat!("../assets/images/", $file)) };
        )+
        /// All pictures.
        pub const PICTURES: &[Picture] = &[$($constant),+];
    };
}

pictures! {
    DAWN = "dawn.jpg",
    NOON = "noon.jpg",
    DUSK = "dusk.jpg",
    NIGHT = "night.jpg",
    STORM = "storm.jpg",
    SNOW = "snow.jpg",
}

/// A picture, and the way that a request refers to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// Part of the request, as a `data:` URI.
    Data(Picture),
    /// An `http://` URL on the origin server.
    Http(Picture),
}

/// The expectation of a request's overlap. Numbers are indexes of earlier requests of the scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// A new prompt: no expectation.
    New,
    /// A repeat of an earlier request: its worker holds all full blocks, except at most one.
    Repeat(usize),
    /// A continuation of an earlier request: its worker holds that request's full blocks, except at
    /// most two.
    Extends(usize),
    /// A smaller overlap than that of an earlier request.
    LessThan(usize),
    /// Known images in another order, which makes their blocks useless: at most one block overlaps.
    OtherOrder,
    /// A prompt whose blocks are kept apart from those of all earlier requests: no block overlaps.
    Nothing,
    /// The images of an earlier request before another question: its worker holds at least half of
    /// the blocks.
    SharesImages(usize),
}

/// One request of a scenario.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The content parts, in order.
    parts: Vec<Part>,
    /// The expectation of the overlap.
    pub expect: Expect,
}

#[derive(Clone, Debug)]
enum Part {
    Text(&'static str),
    Image(Image),
}

/// A sequence of requests.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The name in reports.
    pub name: &'static str,
    /// The requests, in order.
    pub turns: Vec<Turn>,
}

impl Turn {
    /// Returns the body of the chat request. `origin` is the base URL of `http://` pictures, such
    /// as `http://127.0.0.1:9000`.
    pub fn body(&self, model: &str, origin: &str, max_tokens: u32) -> Value {
        let content: Vec<Value> = self
            .parts
            .iter()
            .map(|part| match part {
                Part::Text(text) => json!({"type": "text", "text": text}),
                Part::Image(image) => {
                    json!({"type": "image_url", "image_url": {"url": image.url(origin)}})
                }
            })
            .collect();
        json!({
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
        })
    }

    /// Returns the number of images.
    pub fn images(&self) -> usize {
        self.parts.iter().filter(|part| matches!(part, Part::Image(_))).count()
    }
}

impl Image {
    fn url(self, origin: &str) -> String {
        match self {
            Self::Data(picture) => {
                format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg))
            }
            Self::Http(picture) => format!("{origin}/{}", picture.name),
        }
    }
}

fn turn(expect: Expect, parts: impl IntoIterator<Item = Part>) -> Turn {
    Turn { parts: parts.into_iter().collect(), expect }
}

fn text(text: &'static str) -> Part {
    Part::Text(text)
}

fn data(picture: Picture) -> Part {
    Part::Image(Image::Data(picture))
}

fn http(picture: Picture) -> Part {
    Part::Image(Image::Http(picture))
}

/// Returns the ten scenarios. Each opens with different words, so that no scenario hits blocks of
/// another.
pub fn all() -> Vec<Scenario> {
    const LONG_TEXT: &str = "Tell a short story about a careful assistant who looks at pictures \
        and describes what is in them. The assistant first describes the colours of each picture, \
        then compares the first picture with the second, and at last tells which of these \
        pictures is the brightest.";
    const QUESTION: &str = "What is in this picture?";
    let repeat = |name, parts: Vec<Part>| Scenario {
        name,
        turns: vec![turn(Expect::New, parts.clone()), turn(Expect::Repeat(0), parts)],
    };
    vec![
        repeat("1 text repeated", vec![text(LONG_TEXT)]),
        repeat(
            "2 three images repeated",
            vec![text("Three."), data(DAWN), data(NOON), data(DUSK), text(QUESTION)],
        ),
        repeat("3 one image repeated", vec![text("One."), data(DAWN), text(QUESTION)]),
        repeat(
            "4 one image twice in a prompt",
            vec![text("Twins."), data(DAWN), data(DAWN), text(QUESTION)],
        ),
        Scenario {
            name: "5 one, two, three images",
            turns: vec![
                turn(Expect::New, [text("Stairs."), data(DUSK)]),
                turn(Expect::Extends(0), [text("Stairs."), data(DUSK), data(NOON)]),
                turn(Expect::Extends(1), [text("Stairs."), data(DUSK), data(NOON), data(DAWN)]),
                turn(Expect::Repeat(2), [text("Stairs."), data(DUSK), data(NOON), data(DAWN)]),
            ],
        },
        Scenario {
            name: "6 other images of the same size",
            turns: vec![
                turn(Expect::New, [text("Others."), data(DAWN), text(QUESTION)]),
                turn(Expect::Repeat(0), [text("Others."), data(DAWN), text(QUESTION)]),
                turn(Expect::LessThan(1), [text("Others."), data(NIGHT), text(QUESTION)]),
                turn(Expect::LessThan(1), [text("Others."), data(STORM), text(QUESTION)]),
            ],
        },
        Scenario {
            name: "7 same images, another question",
            turns: vec![
                turn(
                    Expect::New,
                    [text("Again."), data(STORM), data(NIGHT), text("Which is the brightest?")],
                ),
                turn(
                    Expect::SharesImages(0),
                    [text("Again."), data(STORM), data(NIGHT), text("Compare them.")],
                ),
            ],
        },
        Scenario {
            name: "8 images in another order",
            turns: vec![
                turn(Expect::New, [text("Order."), data(DAWN), data(STORM), text(QUESTION)]),
                turn(Expect::OtherOrder, [text("Order."), data(STORM), data(DAWN), text(QUESTION)]),
            ],
        },
        repeat("9 http image repeated", vec![text("Web."), http(SNOW), text(QUESTION)]),
        Scenario {
            name: "10 http, then the same file as data",
            turns: vec![
                turn(Expect::New, [text("Either way."), http(DUSK), text(QUESTION)]),
                turn(Expect::Repeat(0), [text("Either way."), data(DUSK), text(QUESTION)]),
            ],
        },
    ]
}

/// The observed routing of an answered request.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// The worker's name.
    pub worker: String,
    /// The number of full prompt blocks that the worker held.
    pub overlap: usize,
    /// The number of full prompt blocks.
    pub total: usize,
}

/// The violation of an expectation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unexpected {
    /// There is no observation.
    #[error("nothing was observed")]
    NoObservation,
    /// The request went to a worker that lacks its blocks.
    #[error("the request went to {worker}, but {holder} has its blocks")]
    OtherWorker {
        /// The request's worker.
        worker: String,
        /// The worker that has the blocks.
        holder: String,
    },
    /// The worker held too few of the request's blocks.
    #[error("overlap {overlap}/{total}, at least {min} expected")]
    TooLittle {
        /// The number of blocks that the worker held.
        overlap: usize,
        /// The number of prompt blocks.
        total: usize,
        /// The minimum overlap.
        min: usize,
    },
    /// The worker held too many of the request's blocks.
    #[error("overlap {overlap}/{total}, at most {max} expected")]
    TooMuch {
        /// The number of blocks that the worker held.
        overlap: usize,
        /// The number of prompt blocks.
        total: usize,
        /// The maximum overlap.
        max: usize,
    },
}

impl Expect {
    /// Checks the last observation against those of the earlier requests.
    ///
    /// # Errors
    /// The last observation violates the expectation.
    pub fn check(self, observed: &[Observed]) -> Result<(), Unexpected> {
        let Some((last, earlier)) = observed.split_last() else {
            return Err(Unexpected::NoObservation);
        };
        let Observed { overlap, total, .. } = *last;
        let same_worker = |other: &Observed| {
            if last.worker == other.worker {
                return Ok(());
            }
            let holder = other.worker.clone();
            Err(Unexpected::OtherWorker { worker: last.worker.clone(), holder })
        };
        let at_least = |min: usize| {
            if overlap >= min { Ok(()) } else { Err(Unexpected::TooLittle { overlap, total, min }) }
        };
        let at_most = |max: usize| {
            if overlap <= max { Ok(()) } else { Err(Unexpected::TooMuch { overlap, total, max }) }
        };
        match self {
            Self::New => Ok(()),
            Self::Repeat(index) => {
                same_worker(&earlier[index]).and(at_least(total.saturating_sub(1)))
            }
            Self::Extends(index) => {
                let min = earlier[index].total.saturating_sub(2);
                same_worker(&earlier[index]).and(at_least(min))
            }
            Self::LessThan(index) => at_most(earlier[index].overlap.saturating_sub(1)),
            Self::OtherOrder => at_most(1),
            Self::Nothing => at_most(0),
            Self::SharesImages(index) => same_worker(&earlier[index]).and(at_least(total / 2)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(worker: &str, overlap: usize, total: usize) -> Observed {
        Observed { worker: worker.to_owned(), overlap, total }
    }

    #[test]
    fn repeat_on_other_worker_or_with_less_overlap_fails() {
        let first = observed("worker_0", 0, 9);
        assert!(Expect::Repeat(0).check(&[first.clone(), observed("worker_0", 8, 9)]).is_ok());
        assert!(Expect::Repeat(0).check(&[first.clone(), observed("worker_0", 7, 9)]).is_err());
        assert!(Expect::Repeat(0).check(&[first, observed("worker_1", 9, 9)]).is_err());
    }

    #[test]
    fn other_image_must_overlap_less() {
        let first = observed("worker_0", 8, 9);
        assert!(Expect::LessThan(0).check(&[first.clone(), observed("worker_0", 1, 9)]).is_ok());
        assert!(Expect::LessThan(0).check(&[first, observed("worker_0", 8, 9)]).is_err());
    }

    #[test]
    fn ten_scenarios_open_with_different_words() {
        let scenarios = all();
        assert_eq!(scenarios.len(), 10);
        let mut openings: Vec<_> = scenarios
            .iter()
            .map(|scenario| match &scenario.turns[0].parts[0] {
                Part::Text(text) => *text,
                Part::Image(_) => panic!("{} opens with an image", scenario.name),
            })
            .collect();
        openings.sort_unstable();
        openings.dedup();
        assert_eq!(openings.len(), 10);
    }
}
