//! Entries of a server's answer that are unusable.

use std::fmt::Display;

/// The maximum length of the text about an entry and its problem, in characters.
const MAX_TEXT_CHARS: usize = 300;

/// A counter of skipped entries. An answer with thousands of them causes only one log line.
#[derive(Debug, Default)]
pub(crate) struct Skipped {
    count: usize,
    first: String,
}

impl Skipped {
    /// Counts `entry`, which is skipped because of `problem`.
    pub(crate) fn add(&mut self, entry: impl Display, problem: impl Display) {
        if self.count == 0 {
            self.first = format!("{entry}: {problem}").chars().take(MAX_TEXT_CHARS).collect();
        }
        self.count += 1;
    }

    /// Logs the number of entries of `source` since the last call, and the first of them. Logs
    /// nothing if there are none.
    pub(crate) fn log(&mut self, source: impl Display) {
        let Self { count, first } = std::mem::take(self);
        if count > 0 {
            tracing::warn!(%source, count, %first, "skipping unusable entries");
        }
    }

    /// Returns the number of entries since the last [`log`](Self::log).
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.count
    }
}
