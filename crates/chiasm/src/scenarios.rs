//! Ten small conversations that show what image-aware KV routing must get right. The demo plays
//! them on simulated engines, the tests play them on simulated and on real ones and check what each
//! request expects.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// A picture that is part of the binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Its file name.
    pub name: &'static str,
    /// Its JPEG bytes.
    pub jpeg: &'static [u8],
}

macro_rules! pictures {
    ($($constant:ident = $file:literal),+ $(,)?) => {
        $(
            #[allow(missing_docs)]
            pub const $constant: Picture =
                Picture { name: $file, jpeg: include_bytes!(concat!("../assets/images/", $file)) };
        )+
        /// All of them.
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

/// How a picture is put into a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// The image is part of the request, as a `data:` URI.
    Data(Picture),
    /// The image has an `http://` URL below the address that plays the origin.
    Http(Picture),
}

/// What must be true of a request's overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Nothing in particular: it is new.
    New,
    /// All its full blocks but one at most are there, on the worker of that earlier request.
    Repeat(usize),
    /// It goes on from that earlier request: at least its full blocks but two are there, on its
    /// worker.
    Extends(usize),
    /// Its overlap is less than that of this other request.
    LessThan(usize),
    /// The images are there, but at other places, which makes them useless: at most one block is
    /// found.
    OtherOrder,
    /// The images before the question are those of that earlier request: at least half of the
    /// blocks are there, on its worker.
    SharesImages(usize),
}

/// One request of a scenario.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Its parts in order.
    parts: Vec<Part>,
    /// What must be true of it.
    pub expect: Expect,
}

#[derive(Clone, Debug)]
enum Part {
    Text(&'static str),
    Image(Image),
}

/// Several requests, sent one after the other.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its name in reports.
    pub name: &'static str,
    /// Its requests.
    pub turns: Vec<Turn>,
}

impl Turn {
    /// The body of a chat request. `origin` is where `http://` pictures are, such as
    /// `http://127.0.0.1:9000`.
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

    /// Number of its images.
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

/// The ten scenarios. Each opens with words of its own, so that none finds blocks of another.
pub fn all() -> Vec<Scenario> {
    const LONG: &str = "Tell a short story about a careful assistant who looks at pictures and describes what is in \
        them. The assistant first describes the colours of each picture, then compares the first picture with the \
        second, and at last tells which of these pictures is the brightest.";
    const ASK: &str = "What is in this picture?";
    let repeat = |name, parts: Vec<Part>| Scenario {
        name,
        turns: vec![turn(Expect::New, parts.clone()), turn(Expect::Repeat(0), parts)],
    };
    vec![
        repeat("1 text repeated", vec![text(LONG)]),
        repeat(
            "2 three images repeated",
            vec![text("Three."), data(DAWN), data(NOON), data(DUSK), text(ASK)],
        ),
        repeat("3 one image repeated", vec![text("One."), data(DAWN), text(ASK)]),
        repeat(
            "4 one image twice in a prompt",
            vec![text("Twins."), data(DAWN), data(DAWN), text(ASK)],
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
                turn(Expect::New, [text("Others."), data(DAWN), text(ASK)]),
                turn(Expect::Repeat(0), [text("Others."), data(DAWN), text(ASK)]),
                turn(Expect::LessThan(1), [text("Others."), data(NIGHT), text(ASK)]),
                turn(Expect::LessThan(1), [text("Others."), data(STORM), text(ASK)]),
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
                turn(Expect::New, [text("Order."), data(DAWN), data(STORM), text(ASK)]),
                turn(Expect::OtherOrder, [text("Order."), data(STORM), data(DAWN), text(ASK)]),
            ],
        },
        repeat("9 http image repeated", vec![text("Web."), http(SNOW), text(ASK)]),
        Scenario {
            name: "10 http, then the same file as data",
            turns: vec![
                turn(Expect::New, [text("Either way."), http(DUSK), text(ASK)]),
                turn(Expect::Repeat(0), [text("Either way."), data(DUSK), text(ASK)]),
            ],
        },
    ]
}

/// One answered request, as far as expectations go.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// The worker's name.
    pub worker: String,
    /// Full blocks of the prompt that the worker held.
    pub overlap: usize,
    /// Full blocks of the prompt.
    pub total: usize,
}

/// A request that is not as expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unexpected {
    /// No request was made.
    #[error("nothing was observed")]
    Nothing,
    /// It went to a worker without its blocks.
    #[error("it went to {worker}, the blocks are on {holder}")]
    OtherWorker {
        /// Its worker.
        worker: String,
        /// The worker that has the blocks.
        holder: String,
    },
    /// Its worker held too few of its blocks.
    #[error("overlap {overlap}/{total}, at least {least} expected")]
    TooLittle {
        /// Blocks that the worker held.
        overlap: usize,
        /// Blocks of the prompt.
        total: usize,
        /// Blocks that it should have held.
        least: usize,
    },
    /// Its worker held too many of its blocks.
    #[error("overlap {overlap}/{total}, at most {most} expected")]
    TooMuch {
        /// Blocks that the worker held.
        overlap: usize,
        /// Blocks of the prompt.
        total: usize,
        /// Blocks that it may have held.
        most: usize,
    },
}

impl Expect {
    /// Checks the last of `observed`.
    ///
    /// # Errors
    /// It is not as expected.
    pub fn check(self, observed: &[Observed]) -> Result<(), Unexpected> {
        let Some((now, before)) = observed.split_last() else {
            return Err(Unexpected::Nothing);
        };
        let Observed { overlap, total, .. } = *now;
        let same_worker = |of: &Observed| {
            if now.worker == of.worker {
                return Ok(());
            }
            Err(Unexpected::OtherWorker { worker: now.worker.clone(), holder: of.worker.clone() })
        };
        let at_least = |least: usize| {
            if overlap >= least {
                Ok(())
            } else {
                Err(Unexpected::TooLittle { overlap, total, least })
            }
        };
        let at_most = |most: usize| {
            if overlap <= most { Ok(()) } else { Err(Unexpected::TooMuch { overlap, total, most }) }
        };
        match self {
            Self::New => Ok(()),
            Self::Repeat(of) => same_worker(&before[of]).and(at_least(now.total.saturating_sub(1))),
            Self::Extends(of) => {
                same_worker(&before[of]).and(at_least(before[of].total.saturating_sub(2)))
            }
            Self::LessThan(of) => at_most(before[of].overlap.saturating_sub(1)),
            Self::OtherOrder => at_most(1),
            Self::SharesImages(of) => same_worker(&before[of]).and(at_least(now.total / 2)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(worker: &str, overlap: usize, total: usize) -> Observed {
        Observed { worker: worker.to_owned(), overlap, total }
    }

    #[test]
    fn a_repeat_on_another_worker_or_with_less_overlap_fails() {
        let first = seen("worker_0", 0, 9);
        assert!(Expect::Repeat(0).check(&[first.clone(), seen("worker_0", 8, 9)]).is_ok());
        assert!(Expect::Repeat(0).check(&[first.clone(), seen("worker_0", 7, 9)]).is_err());
        assert!(Expect::Repeat(0).check(&[first, seen("worker_1", 9, 9)]).is_err());
    }

    #[test]
    fn another_image_must_overlap_less() {
        let first = seen("worker_0", 8, 9);
        assert!(Expect::LessThan(0).check(&[first.clone(), seen("worker_0", 1, 9)]).is_ok());
        assert!(Expect::LessThan(0).check(&[first, seen("worker_0", 8, 9)]).is_err());
    }

    #[test]
    fn there_are_ten_and_each_opens_with_words_of_its_own() {
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
