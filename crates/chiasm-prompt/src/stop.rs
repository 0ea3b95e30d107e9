//! Stop strings: cuts streamed text at the first stop string, even one split across pieces.

use std::sync::Arc;

use memchr::memmem::Finder;

/// A streaming search for stop strings in a text that arrives in pieces.
///
/// Text is returned as soon as it can no longer be part of a stop string. The rule is vLLM's
/// (`vllm/v1/engine/detokenizer.py`, `check_stop_strings`): the stop string that *ends* first in
/// the text stops it. If several end at the same position, the first of the list does. The result
/// does not depend on how the text is cut into pieces.
///
/// ```
/// use chiasm_prompt::StopStrings;
///
/// let mut stops = StopStrings::new(vec!["\n\n".into()], false);
/// assert_eq!(stops.push("a\n").text, "a"); // the line break may become the stop string
/// assert_eq!(stops.push("b").text, "\nb"); // it did not
/// let step = stops.push("c\n\nd");
/// assert_eq!((step.text.as_str(), step.stopped_by.as_deref()), ("c", Some("\n\n")));
/// ```
///
/// Clones share the list of stop strings.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Arc<[StopString]>,
    include_stop: bool,
    /// The end of the text, which may still be the beginning of a stop string.
    tail: String,
    /// The number of leading bytes of `tail` that were returned already (only with `include_stop`).
    returned: usize,
    stopped: bool,
}

/// A stop string and its searcher. Searchers are built once, as building them for each token would
/// take longer than all other work for that token.
#[derive(Debug)]
struct StopString {
    text: String,
    finder: Finder<'static>,
}

/// The result of pushing one piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// The text that can no longer become part of a stop string.
    pub text: String,
    /// The stop string that ended the text, if any.
    pub stopped_by: Option<String>,
}

impl StopStrings {
    /// Creates a search for `stops`. Empty strings are ignored: they would end every text at once.
    ///
    /// With `include_stop` the stop string itself belongs to the text.
    pub fn new(stops: Vec<String>, include_stop: bool) -> Self {
        let stop_string =
            |text: String| StopString { finder: Finder::new(text.as_bytes()).into_owned(), text };
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).map(stop_string).collect();
        Self { stops, include_stop, tail: String::new(), returned: 0, stopped: false }
    }

    /// Returns `true` if there are no stop strings, so that all text passes unchanged.
    pub fn is_empty(&self) -> bool {
        self.stops.is_empty()
    }

    /// Adds a piece of text. After a stop, all further steps are empty.
    pub fn push(&mut self, text: &str) -> StopStep {
        self.add(text, true)
    }

    /// Adds a piece of text in which no stop string may end: the text of the first `min_tokens`
    /// tokens.
    ///
    /// A stop string that begins in this piece and ends in a later [`push`](Self::push) stops.
    pub fn push_unwatched(&mut self, text: &str) -> String {
        self.add(text, false).text
    }

    /// Ends the text and returns the part that was held back.
    pub fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let text = self.tail[self.returned..].to_owned();
        self.tail.clear();
        self.returned = 0;
        text
    }

    fn add(&mut self, text: &str, watched: bool) -> StopStep {
        if self.stopped || text.is_empty() {
            return StopStep::default();
        }
        if self.stops.is_empty() {
            return StopStep { text: text.to_owned(), stopped_by: None };
        }
        let old_len = self.tail.len();
        self.tail.push_str(text);
        if let Some((begin, stop)) = watched.then(|| self.first_to_end(old_len)).flatten() {
            let end = if self.include_stop { begin + stop.len() } else { begin };
            self.stopped = true;
            // The range is valid with `include_stop` too: the stop string ends after the old text,
            // all of which was returned.
            return StopStep {
                text: self.tail[self.returned..end].to_owned(),
                stopped_by: Some(stop),
            };
        }
        let keep_from = self.tail.len() - self.undecided_len();
        let return_to = if self.include_stop { self.tail.len() } else { keep_from };
        let settled = self.tail[self.returned..return_to].to_owned();
        self.tail.drain(..keep_from);
        self.returned = return_to - keep_from;
        StopStep { text: settled, stopped_by: None }
    }

    /// Returns the start and the text of the stop string that ends first, more than `old_len` bytes
    /// into the tail.
    fn first_to_end(&self, old_len: usize) -> Option<(usize, String)> {
        let mut best: Option<(usize, &String)> = None;
        for StopString { text: stop, finder } in &*self.stops {
            // A match must end after `old_len`, so it begins after `old_len - stop.len()`. That may
            // be within a character, where no match begins.
            let from = (old_len + 1).saturating_sub(stop.len());
            let Some(begin) = finder.find(&self.tail.as_bytes()[from..]).map(|at| at + from) else {
                continue;
            };
            if best.is_none_or(|(other, other_stop)| begin + stop.len() < other + other_stop.len())
            {
                best = Some((begin, stop));
            }
        }
        best.map(|(begin, stop)| (begin, stop.clone()))
    }

    /// Returns the length of the longest suffix of the tail that is a prefix of a stop string.
    fn undecided_len(&self) -> usize {
        let longest = self.stops.iter().map(|stop| stop.text.len() - 1).max().unwrap_or(0);
        let first = self.tail.len().saturating_sub(longest);
        (first..self.tail.len())
            .filter(|at| self.tail.is_char_boundary(*at))
            .find(|at| {
                let suffix = &self.tail[*at..];
                self.stops
                    .iter()
                    .any(|stop| stop.text.len() > suffix.len() && stop.text.starts_with(suffix))
            })
            .map_or(0, |at| self.tail.len() - at)
    }
}

#[cfg(test)]
#[path = "stop/tests.rs"]
mod tests;
