//! The requests to the fleet: generated workloads and traces.

mod chats;
mod trace;
mod zipf;

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::error::SimulateError;
use crate::sequence::{Image, Piece, Sequence, mix};
use crate::virtual_time::Nanos;
use chats::Chats;
pub(crate) use trace::Trace;
pub use trace::TraceSummary;
use zipf::Zipf;

chiasm_types::every_variant! {
    /// A kind of requests.
    ///
    /// Each prompt begins with the 24 tokens of a chat template. The lengths of answers are
    /// distributed exponentially, with a mean of 150 tokens, between 1 and 1,200. Images have 20 to
    /// 48 patches of 28 pixels along each side, so 400 to 2,304 embeddings, 1,156 on average.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Workload {
        /// An image from a catalogue, then a new question of 20 to 100 tokens.
        SharedImageQa,
        /// Conversations of five turns on average, with an image in the first and in 30 % of the
        /// others. Each turn repeats the whole conversation, including answers, and adds 20 to 150
        /// tokens of text.
        MultiTurnImages,
        /// 50 to 400 tokens of new text, an image from a catalogue, a question. The image's KV
        /// blocks can't be reused, but its embeddings and its tensors can.
        ImageAfterText,
        /// A new image, then a question.
        UniqueImages,
        /// No images: one of 16 system prompts of 1,000 to 3,000 tokens (Zipf, exponent 1), then 50
        /// to 500 tokens of text.
        SharedSystemPrompt,
        /// 30 % of the first, 30 % of the second, 10 % each of the third and the fourth, 20 % of
        /// the fifth.
        Mixed,
    }
}

/// The size of a generated workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkloadSize {
    /// The number of images in the catalogue, per worker of the fleet. Default 32.
    pub images_per_worker: usize,
    /// The Zipf exponent of the images' popularity: the larger, the more unequal. Default 0.9.
    pub zipf_exponent: f64,
    /// The number of open conversations, per worker. Default 64.
    pub chats_per_worker: usize,
}

impl Default for WorkloadSize {
    fn default() -> Self {
        Self { images_per_worker: 32, zipf_exponent: 0.9, chats_per_worker: 64 }
    }
}

/// An arriving request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The time of its arrival in a trace; 0 for generated requests.
    pub(crate) at: Nanos,
    pub(crate) sequence: Sequence,
}

impl Workload {
    /// Returns the name on command lines and in reports.
    fn name(self) -> &'static str {
        match self {
            Self::SharedImageQa => "shared-image-qa",
            Self::MultiTurnImages => "multi-turn-images",
            Self::ImageAfterText => "image-after-text",
            Self::UniqueImages => "unique-images",
            Self::SharedSystemPrompt => "shared-system-prompt",
            Self::Mixed => "mixed",
        }
    }

    /// Returns a list of all names, for error messages.
    pub(crate) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Workload {
    type Err = SimulateError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| SimulateError::UnknownWorkload {
            name: name.to_owned(),
            known: Self::names(),
        })
    }
}

/// The beginning of every prompt.
const TEMPLATE: Piece = Piece::Text { seed: 0x7e_3f_1a_7e, length: 24 };
const SYSTEM_PROMPTS: usize = 16;
const MEAN_ANSWER_TOKENS: f64 = 150.0;
const MAX_ANSWER_TOKENS: f64 = 1200.0;
const QUESTION_TOKENS: RangeInclusive<u32> = 20..=100;

/// Generates a new text.
fn fresh_text(rng: &mut SmallRng, lengths: RangeInclusive<u32>) -> Piece {
    Piece::Text { seed: rng.random(), length: rng.random_range(lengths) }
}

/// Generates an answer.
fn answer(rng: &mut SmallRng) -> Piece {
    let length = (exponential(rng) * MEAN_ANSWER_TOKENS).ceil().clamp(1.0, MAX_ANSWER_TOKENS);
    Piece::Text { seed: rng.random(), length: length as u32 }
}

/// Generates a new image.
fn fresh_image(rng: &mut SmallRng) -> Image {
    image(rng.random())
}

/// Returns the image with this id, whose size follows from the id.
fn image(id: u64) -> Image {
    let side = |bits: u64| 20 + (bits % 29) as u32;
    let bits = mix(id);
    Image { id, embeds: side(bits >> 32) * side(bits & 0xffff_ffff) }
}

/// Draws an exponentially distributed number with mean 1.
pub(crate) fn exponential(rng: &mut SmallRng) -> f64 {
    -(1.0 - rng.random::<f64>()).ln()
}

/// An endless stream of requests. The same seed gives the same requests.
pub(crate) struct Generator {
    workload: Workload,
    rng: SmallRng,
    /// The seed of the catalogue and of the system prompts.
    content_seed: u64,
    images: Zipf,
    systems: Zipf,
    chats: Chats,
}

impl Generator {
    /// Creates a generator for a fleet of this number of workers.
    pub(crate) fn new(workload: Workload, size: &WorkloadSize, workers: usize, seed: u64) -> Self {
        Self {
            workload,
            rng: SmallRng::seed_from_u64(seed),
            content_seed: mix(seed),
            images: Zipf::new(size.images_per_worker.saturating_mul(workers), size.zipf_exponent),
            systems: Zipf::new(SYSTEM_PROMPTS, 1.0),
            chats: Chats::new(size.chats_per_worker.saturating_mul(workers)),
        }
    }

    /// Draws an image of the catalogue.
    fn catalogue_image(&mut self) -> Piece {
        Piece::Image(image(mix(self.content_seed ^ self.images.draw(&mut self.rng) as u64)))
    }

    /// Generates a request.
    fn sequence(&mut self, workload: Workload) -> Sequence {
        match workload {
            Workload::SharedImageQa => {
                let image = self.catalogue_image();
                let rng = &mut self.rng;
                Sequence::new(&[TEMPLATE, image, fresh_text(rng, QUESTION_TOKENS)], answer(rng))
            }
            Workload::MultiTurnImages => self.chats.next_turn(&mut self.rng),
            Workload::ImageAfterText => {
                let image = self.catalogue_image();
                let rng = &mut self.rng;
                let before = fresh_text(rng, 50..=400);
                let question = fresh_text(rng, QUESTION_TOKENS);
                Sequence::new(&[TEMPLATE, before, image, question], answer(rng))
            }
            Workload::UniqueImages => {
                let rng = &mut self.rng;
                let image = Piece::Image(fresh_image(rng));
                Sequence::new(&[TEMPLATE, image, fresh_text(rng, QUESTION_TOKENS)], answer(rng))
            }
            Workload::SharedSystemPrompt => {
                let rng = &mut self.rng;
                let seed = mix(!self.content_seed ^ self.systems.draw(rng) as u64);
                let system = Piece::Text { seed, length: 1000 + (mix(seed) % 2001) as u32 };
                Sequence::new(&[TEMPLATE, system, fresh_text(rng, 50..=500)], answer(rng))
            }
            Workload::Mixed => {
                let workload = match self.rng.random_range(0..10) {
                    0..3 => Workload::SharedImageQa,
                    3..6 => Workload::MultiTurnImages,
                    6 => Workload::ImageAfterText,
                    7 => Workload::UniqueImages,
                    _ => Workload::SharedSystemPrompt,
                };
                self.sequence(workload)
            }
        }
    }
}

impl Iterator for Generator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        Some(Request { at: 0, sequence: self.sequence(self.workload) })
    }
}

#[cfg(test)]
mod tests;
