//! Log probabilities that resemble a model's and are reproducible.

use chiasm_engine::wire::Logprobs;
use chiasm_types::TokenId;

/// The probability of the token at a position. The other tokens share the rest, each with half
/// the probability of the previous one.
const CHOSEN_PROBABILITY: f64 = 0.9;

/// Returns one position per token, with the token itself and its `top` most likely candidates. The
/// token is the first candidate. A `top` of −1 means the whole vocabulary, as in vLLM's
/// `SamplingParams.logprobs`.
pub(crate) fn generate(tokens: &[TokenId], top: i32, vocab_size: u32) -> Logprobs {
    let top = u32::try_from(top).unwrap_or(vocab_size).min(vocab_size);
    let mut result = Logprobs { width: top as usize + 1, ..Logprobs::default() };
    for &token in tokens {
        result.token_ids.push(token);
        result.logprobs.push(CHOSEN_PROBABILITY.ln() as f32);
        result.ranks.push(1);
        for rank in 0..top {
            // The wrap-around visits the whole vocabulary once, so no candidate occurs twice.
            let candidate =
                (u64::from(token.0) + u64::from(rank)) % u64::from(vocab_size.max(token.0 + 1));
            result.token_ids.push(TokenId(candidate as u32));
            result.logprobs.push(match rank {
                0 => CHOSEN_PROBABILITY.ln() as f32,
                _ => {
                    ((1.0 - CHOSEN_PROBABILITY).ln() - f64::from(rank) * std::f64::consts::LN_2)
                        as f32
                }
            });
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn token_leads_its_falling_candidates() {
        let logprobs = generate(&[TokenId(7), TokenId(9)], 3, 10);
        assert_eq!((logprobs.len(), logprobs.width), (2, 4));
        let positions: Vec<_> = logprobs.positions().collect();
        let ids =
            |at: usize| positions[at].token_ids.iter().map(|token| token.0).collect::<Vec<_>>();
        assert_eq!(ids(0), [7, 7, 8, 9]);
        assert_eq!(ids(1), [9, 9, 0, 1]);
        assert_eq!(positions[0].rank, 1);
        assert!(positions[0].logprobs[1..].is_sorted_by(|a, b| a > b));
        let total: f32 = positions[0].logprobs[1..].iter().map(|logprob| logprob.exp()).sum();
        assert!(total <= 1.0, "{total}");
    }

    #[test]
    fn candidates_range_from_zero_to_the_vocabulary() {
        assert_eq!(generate(&[TokenId(7)], 0, 10).token_ids, [TokenId(7)]);
        let all = generate(&[TokenId(7)], -1, 10);
        assert_eq!(all.width, 11);
        assert_eq!(all.token_ids[1..].iter().collect::<HashSet<_>>().len(), 10);
    }
}
