//! Log probabilities of prompt tokens, as vLLM's server writes them.

use chiasm_backend::PromptLogprobs;
use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

/// The value for negative infinity, which JSON can't represent. vLLM and OpenAI use the same value.
pub(super) const MIN_LOGPROB: f32 = -9999.0;

/// The character that an incomplete character is decoded to.
const REPLACEMENT: char = '\u{FFFD}';
/// The maximum number of preceding tokens that are searched for the start of a character.
pub(super) const MAX_CONTEXT_TOKENS: usize = 4;

/// The log probabilities of a prompt. They serialize to a list: null for the first token, then an
/// object for each token.
///
/// An object maps token ids to log probabilities: the token's own and those of the likeliest
/// tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptLogprobsBody<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) logprobs: &'a PromptLogprobs,
}

/// A candidate for one position.
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

/// The candidates of one position, which serialize to a map by token id.
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
    /// Returns the candidates of a position, beginning with the prompt's own token.
    ///
    /// A token that occurs twice has the place of the first and the rank of the second occurrence
    /// (`append_logprobs_for_next_position` in `vllm/logprobs.py`).
    pub(super) fn candidates(&self, position: usize) -> Vec<(TokenId, Candidate)> {
        let Some((tokens, logprobs)) = self.logprobs.at(position) else { return Vec::new() };
        let before = position.saturating_sub(MAX_CONTEXT_TOKENS)..position;
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
                    let decoded_token = token_text(self.tokenizer, token, &context);
                    candidates.push((
                        token,
                        Candidate { logprob: logprob.max(MIN_LOGPROB), rank, decoded_token },
                    ));
                }
            }
        }
        candidates
    }
}

/// Returns the text of a token that follows `context`.
///
/// A character that spans several tokens is the text of the last one; the others have no text
/// (`LogprobsProcessor._correct_decoded_token` in `vllm/v1/engine/logprobs.py`).
pub(super) fn token_text(tokenizer: &Tokenizer, token: TokenId, context: &[TokenId]) -> String {
    let own_text =
        |token: TokenId| String::from_utf8_lossy(&tokenizer.token_bytes(token)).into_owned();
    let is_incomplete = |text: &str| text.ends_with(REPLACEMENT);
    let text = own_text(token);
    if !is_incomplete(&text) {
        return text;
    }
    for first in (0..context.len()).rev() {
        let before = &context[first..];
        let whole = tokenizer.decode(&[before, &[token]].concat(), false);
        if is_incomplete(&whole) {
            continue;
        }
        let last_complete = before.iter().rposition(|&token| !is_incomplete(&own_text(token)));
        let complete = &before[..last_complete.map_or(0, |last| last + 1)];
        let shown = tokenizer.decode(complete, false);
        let shared = whole.chars().zip(shown.chars()).take_while(|(a, b)| a == b).count();
        return whole.chars().skip(shared).collect();
    }
    String::new()
}
