//! Conversations that grow.

use std::collections::VecDeque;

use rand::Rng;
use rand::rngs::SmallRng;

use super::{TEMPLATE, answer, fresh_image, fresh_text};
use crate::sequence::{Piece, Sequence};

/// Chance that a conversation ends after a turn: five turns on average.
const END: f64 = 0.2;
/// Chance of an image in a turn after the first.
const IMAGE: f64 = 0.3;
/// No further turn once the prompt has so many tokens.
const LONGEST: usize = 12_000;

/// A fixed number of conversations, each waiting for its user. A request is the next turn of one
/// that waited longer than half of them; one that ends gives its place to a new one.
///
/// The order does not depend on how fast the engines answer, so that all policies see the same
/// requests. A turn may therefore come before the answer to the one before it is complete, when a
/// policy is slower than users think.
pub(super) struct Chats {
    chats: VecDeque<Vec<Piece>>,
}

impl Chats {
    /// Fills all places. There must be at least one.
    pub(super) fn new(places: usize) -> Self {
        Self { chats: vec![Vec::new(); places.max(1)].into() }
    }

    pub(super) fn next(&mut self, rng: &mut SmallRng) -> Sequence {
        let at = rng.random_range(0..self.chats.len().div_ceil(2));
        let mut pieces = self.chats.swap_remove_front(at).unwrap_or_default();
        let first = pieces.is_empty();
        if first {
            pieces.push(TEMPLATE);
        }
        if first || rng.random_bool(IMAGE) {
            pieces.push(Piece::Image(fresh_image(rng)));
        }
        pieces.push(fresh_text(rng, 20..=150));
        let answer = answer(rng);
        let sequence = Sequence::new(&pieces, answer);
        pieces.push(answer);
        if rng.random_bool(END) || sequence.prompt() > LONGEST {
            pieces.clear();
        }
        self.chats.push_back(pieces);
        sequence
    }
}
