//! Log probabilities of prompt tokens, as vLLM's server writes them.

use chiasm_backend::PromptLogprobs;
use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

/// JSON has no infinity; vLLM and OpenAI write this instead.
pub(super) const LOWEST: f32 = -9999.0;

/// What half a character is decoded to.
const REPLACEMENT: char = '\u{FFFD}';
/// Most tokens that a character is looked for in.
pub(super) const MAX_CONTEXT: usize = 4;

/// A list: null for the first token, then an object for each, of its own log probability and those
/// of the likeliest tokens, by their ids.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptLogprobsBody<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) logprobs: &'a PromptLogprobs,
}

/// What is told of one candidate.
#[derive(Serialize)]
pub(super) struct Candidate {
    pub(super) logprob: f32,
    rank: u32,
    pub(super) decoded_token: String,
}

impl Serialize for PromptLogprobsBody<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let positions = self.logprobs.ranks.len();
        let mut list = to.serialize_seq(Some(positions + 1))?;
        list.serialize_element(&())?;
        for position in 0..positions {
            list.serialize_element(&Position(self.candidates(position)))?;
        }
        list.end()
    }
}

struct Position(Vec<(TokenId, Candidate)>);

impl Serialize for Position {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(self.0.len()))?;
        for (token, candidate) in &self.0 {
            map.serialize_entry(&token.0, candidate)?;
        }
        map.end()
    }
}

impl PromptLogprobsBody<'_> {
    /// The candidates of a position, the token that stands there first. What comes twice has the
    /// place of the first and the rank of the second (`append_logprobs_for_next_position` in
    /// `vllm/logprobs.py`).
    pub(super) fn candidates(&self, position: usize) -> Vec<(TokenId, Candidate)> {
        let Some((tokens, logprobs)) = self.logprobs.at(position) else { return Vec::new() };
        let before = position.saturating_sub(MAX_CONTEXT)..position;
        let context: Vec<TokenId> =
            before.filter_map(|at| self.logprobs.at(at)?.0.first().copied()).collect();
        let mut candidates: Vec<(TokenId, Candidate)> = Vec::with_capacity(tokens.len());
        for (rank, (&token, &logprob)) in (0..).zip(tokens.iter().zip(logprobs)) {
            let rank = if rank == 0 {
                self.logprobs.ranks.get(position).copied().unwrap_or(0)
            } else {
                rank
            };
            match candidates.iter_mut().find(|(known, _)| *known == token) {
                Some((_, candidate)) => candidate.rank = rank,
                None => {
                    let decoded_token = text_of(self.tokenizer, token, &context);
                    candidates.push((
                        token,
                        Candidate { logprob: logprob.max(LOWEST), rank, decoded_token },
                    ));
                }
            }
        }
        candidates
    }
}

/// The text of a token behind others. A character in several tokens is the text of the last of
/// them, and the others have none (`LogprobsProcessor._correct_decoded_token` in
/// `vllm/v1/engine/logprobs.py`).
pub(super) fn text_of(tokenizer: &Tokenizer, token: TokenId, context: &[TokenId]) -> String {
    let alone =
        |token: TokenId| String::from_utf8_lossy(&tokenizer.token_bytes(token)).into_owned();
    let is_half = |text: &str| text.ends_with(REPLACEMENT);
    let text = alone(token);
    if !is_half(&text) {
        return text;
    }
    for first in (0..context.len()).rev() {
        let before = &context[first..];
        let whole = tokenizer.decode(&[before, &[token]].concat(), false);
        if is_half(&whole) {
            continue;
        }
        let told =
            before.iter().rposition(|&token| !is_half(&alone(token))).map_or(0, |last| last + 1);
        let told = tokenizer.decode(&before[..told], false);
        let same =
            whole.chars().zip(told.chars()).take_while(|(ours, theirs)| ours == theirs).count();
        return whole.chars().skip(same).collect();
    }
    String::new()
}
