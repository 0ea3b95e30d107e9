//! Entries of a server's answer that name nothing usable.

use std::fmt::Display;

/// The longest text that is kept of an entry and its problem, in characters.
const LONGEST_TEXT: usize = 300;

/// Counts the entries that are skipped, so that one answer with thousands of them is one line in
/// the log.
#[derive(Debug, Default)]
pub(crate) struct Skipped {
    count: usize,
    first: String,
}

impl Skipped {
    /// Counts `entry`, which is skipped because of `problem`.
    pub(crate) fn add(&mut self, entry: impl Display, problem: impl Display) {
        if self.count == 0 {
            self.first = format!("{entry}: {problem}").chars().take(LONGEST_TEXT).collect();
        }
        self.count += 1;
    }

    /// Logs the entries of `source` that were counted since the last call, if there are any: how
    /// many, and the first.
    pub(crate) fn log(&mut self, source: impl Display) {
        let Self { count, first } = std::mem::take(self);
        if count > 0 {
            tracing::warn!(%source, count, %first, "entries that can't be used are skipped");
        }
    }

    /// How many were counted since the last [`log`](Self::log).
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.count
    }
}
