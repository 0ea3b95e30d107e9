//! The text and tokens that represent a video in a prompt.

use chiasm_types::TokenRun;

use crate::{Vocabulary, VocabularyError};

/// A part of a video's placeholder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VideoPiece {
    /// A text that is tokenized by itself, such as `<0.5 seconds>`.
    Text {
        /// The text.
        text: String,
        /// `true` if the engine may replace its tokens with embeddings.
        embeds: bool,
    },
    /// A repeated token.
    Tokens(TokenRun),
}

/// Tokenizes the texts of a placeholder. Adjacent equal tokens are joined.
pub(super) fn tokenize(
    pieces: &[VideoPiece],
    vocabulary: &dyn Vocabulary,
) -> Result<Vec<TokenRun>, VocabularyError> {
    let mut runs: Vec<TokenRun> = Vec::new();
    let mut push = |run: TokenRun| match runs.last_mut() {
        Some(last) if last.token == run.token && last.embeds == run.embeds => {
            last.count += run.count;
        }
        _ if run.count == 0 => {}
        _ => runs.push(run),
    };
    for piece in pieces {
        match piece {
            VideoPiece::Tokens(run) => push(*run),
            VideoPiece::Text { text, embeds } => {
                for token in vocabulary.encode(text)? {
                    push(TokenRun { token, count: 1, embeds: *embeds });
                }
            }
        }
    }
    Ok(runs)
}
