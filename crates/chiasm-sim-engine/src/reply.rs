//! The answers of a simulated engine.

use chiasm_types::TokenId;

use crate::image::{ObservedItem, Size};

/// Returns a text that describes what the engine observed. It has a digest of each item's values,
/// so that wrong values change the answer.
///
/// An example is `1 image 280x224 (80 tokens, 9f2c1a07); 64 of 109 prompt tokens were cached`. A
/// video or a recording is an item with the shape of its largest tensor. The LoRA adapter of the
/// request is appended, if it has one: `; by NAME`.
pub(crate) fn text(
    items: &[ObservedItem],
    cached: usize,
    prompt: usize,
    lora: Option<&str>,
) -> String {
    let by = lora.map_or_else(String::new, |name| format!("; by {name}"));
    let noun = if items.iter().all(|item| matches!(item.size, Size::Image { .. })) {
        "image"
    } else {
        "item"
    };
    let observed = match items.len() {
        0 => "no images".to_owned(),
        count => {
            let sizes: Vec<String> = items
                .iter()
                .map(|ObservedItem { size, embeddings, digest }| {
                    let size = match size {
                        Size::Image { width, height } => format!("{width}x{height}"),
                        Size::Other(shape) => {
                            shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
                        }
                    };
                    format!("{size} ({embeddings} tokens, {digest})")
                })
                .collect();
            format!("{count} {noun}{} {}", if count == 1 { "" } else { "s" }, sizes.join(", "))
        }
    };
    format!("{observed}; {cached} of {prompt} prompt tokens were cached{by}")
}

/// Generates the tokens of an answer: the text, then EOS, then from the start again for requests
/// that do not stop at EOS.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    tokens: Vec<TokenId>,
    next: usize,
}

impl Answer {
    pub(crate) fn new(mut tokens: Vec<TokenId>, eos: Option<TokenId>) -> Self {
        tokens.extend(eos);
        if tokens.is_empty() {
            tokens.push(TokenId(0));
        }
        Self { tokens, next: 0 }
    }

    /// Returns the next token that is not `suppressed`.
    pub(crate) fn next(&mut self, suppressed: impl Fn(TokenId) -> bool) -> TokenId {
        for _ in 0..self.tokens.len() {
            let token = self.tokens[self.next % self.tokens.len()];
            self.next += 1;
            if !suppressed(token) {
                return token;
            }
        }
        // The whole answer is suppressed, so any other token is used.
        (0..).map(TokenId).find(|&token| !suppressed(token)).unwrap_or(TokenId(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;

    fn image(width: u64, height: u64, embeddings: usize) -> ObservedItem {
        let digest = Digest::compute(b"");
        ObservedItem { size: Size::Image { width, height }, embeddings, digest }
    }

    #[test]
    fn text_lists_every_image() {
        assert_eq!(text(&[], 0, 12, None), "no images; 0 of 12 prompt tokens were cached");
        assert_eq!(
            text(&[], 0, 12, Some("a")),
            "no images; 0 of 12 prompt tokens were cached; by a"
        );
        assert_eq!(
            text(&[image(280, 224, 80)], 64, 109, None),
            "1 image 280x224 (80 tokens, af1349b9); 64 of 109 prompt tokens were cached"
        );
        assert_eq!(
            text(&[image(280, 224, 80), image(56, 56, 4)], 0, 99, None),
            "2 images 280x224 (80 tokens, af1349b9), 56x56 (4 tokens, af1349b9); \
             0 of 99 prompt tokens were cached"
        );
    }

    #[test]
    fn other_media_are_called_items() {
        let size = Size::Other(vec![96, 1176]);
        let video = ObservedItem { size, embeddings: 24, digest: Digest::compute(b"") };
        assert_eq!(
            text(&[image(56, 56, 4), video], 0, 9, None),
            "2 items 56x56 (4 tokens, af1349b9), 96x1176 (24 tokens, af1349b9); \
             0 of 9 prompt tokens were cached"
        );
    }

    fn take(answer: &mut Answer, count: usize, suppressed: &[u32]) -> Vec<u32> {
        (0..count).map(|_| answer.next(|token| suppressed.contains(&token.0)).0).collect()
    }

    #[test]
    fn answer_restarts_after_eos() {
        let mut answer = Answer::new(vec![TokenId(5), TokenId(6)], Some(TokenId(2)));
        assert_eq!(take(&mut answer, 5, &[]), [5, 6, 2, 5, 6]);
    }

    #[test]
    fn suppressed_tokens_are_skipped() {
        let mut answer = Answer::new(vec![TokenId(5), TokenId(6)], Some(TokenId(2)));
        assert_eq!(take(&mut answer, 4, &[2]), [5, 6, 5, 6]);
        assert_eq!(take(&mut Answer::new(vec![], Some(TokenId(0))), 2, &[0]), [1, 1]);
    }
}
