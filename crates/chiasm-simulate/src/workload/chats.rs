//! Conversations that grow turn by turn.

use std::collections::VecDeque;

use rand::Rng;
use rand::rngs::SmallRng;

use super::{TEMPLATE, answer, fresh_image, fresh_text};
use crate::sequence::{Piece, Sequence};

/// The probability that a conversation ends after a turn: five turns on average.
const END_PROBABILITY: f64 = 0.2;
/// The probability of an image in a turn after the first.
const IMAGE_PROBABILITY: f64 = 0.3;
/// The prompt length beyond which a conversation ends.
const MAX_PROMPT_TOKENS: usize = 12_000;

/// A fixed number of open conversations.
///
/// A request is the next turn of a conversation in the half that has waited longest. A conversation
/// that ends is replaced by a new one.
///
/// The order does not depend on the speed of the engines, so that all policies get the same
/// requests. If a policy is slow, a turn may come before the answer to the previous one is
/// complete.
pub(super) struct Chats {
    chats: VecDeque<Vec<Piece>>,
}

impl Chats {
    /// Creates this number of empty conversations; 0 counts as one.
    pub(super) fn new(count: usize) -> Self {
        Self { chats: vec![Vec::new(); count.max(1)].into() }
    }

    /// Generates the next turn.
    pub(super) fn next_turn(&mut self, rng: &mut SmallRng) -> Sequence {
        let at = rng.random_range(0..self.chats.len().div_ceil(2));
        let mut pieces = self.chats.swap_remove_front(at).unwrap_or_default();
        let is_first = pieces.is_empty();
        if is_first {
            pieces.push(TEMPLATE);
        }
        if is_first || rng.random_bool(IMAGE_PROBABILITY) {
            pieces.push(Piece::Image(fresh_image(rng)));
        }
        pieces.push(fresh_text(rng, 20..=150));
        let answer = answer(rng);
        let sequence = Sequence::new(&pieces, answer);
        pieces.push(answer);
        if rng.random_bool(END_PROBABILITY) || sequence.prompt() > MAX_PROMPT_TOKENS {
            pieces.clear();
        }
        self.chats.push_back(pieces);
        sequence
    }
}
