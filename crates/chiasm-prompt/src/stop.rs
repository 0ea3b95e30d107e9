//! Stop strings: cut the text at the first one, even when it comes in pieces.

use std::sync::Arc;

use memchr::memmem::Finder;

/// Watches a text that arrives in pieces for stop strings.
///
/// Text is given back as soon as it can no longer be part of a stop string. Which string stops, and
/// where, is decided as vLLM does (`vllm/v1/engine/detokenizer.py`, `check_stop_strings`): the one
/// that *ends* first in the text, and among those that end at the same place the one that comes
/// first in the list. How the text is cut into pieces makes no difference.
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
/// Clones share what is watched for.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Arc<[Stop]>,
    include_stop: bool,
    /// What was pushed last and may still be the beginning of a stop string.
    tail: String,
    /// How many bytes at the front of `tail` were already given out (only with `include_stop`).
    given: usize,
    stopped: bool,
}

/// A string, and what finds it: to make that anew for each token takes longer than all else that is
/// done with one.
#[derive(Debug)]
struct Stop {
    text: String,
    finder: Finder<'static>,
}

/// What one piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// The text that is settled now.
    pub text: String,
    /// The stop string that ended the text, if one did.
    pub stopped_by: Option<String>,
}

impl StopStrings {
    /// Watches for `stops`. Empty strings are left out: they would end every text before it began.
    ///
    /// `include_stop`: whether the stop string itself belongs to the text.
    pub fn new(stops: Vec<String>, include_stop: bool) -> Self {
        let stop = |text: String| Stop { finder: Finder::new(text.as_bytes()).into_owned(), text };
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).map(stop).collect();
        Self { stops, include_stop, tail: String::new(), given: 0, stopped: false }
    }

    /// Whether there is nothing to watch for, so that all text comes out as it goes in.
    pub fn is_idle(&self) -> bool {
        self.stops.is_empty()
    }

    /// Adds a piece of text. After a stop nothing more comes out.
    pub fn push(&mut self, text: &str) -> StopStep {
        self.add(text, true)
    }

    /// Adds a piece of text within which no stop string may end: that of the first `min_tokens`
    /// tokens.
    ///
    /// A stop string that begins in it and ends in a later [`push`](Self::push) does stop.
    pub fn push_unwatched(&mut self, text: &str) -> String {
        self.add(text, false).text
    }

    /// Ends the text: gives out what was held back.
    pub fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let text = self.tail[self.given..].to_owned();
        self.tail.clear();
        self.given = 0;
        text
    }

    fn add(&mut self, text: &str, watched: bool) -> StopStep {
        if self.stopped || text.is_empty() {
            return StopStep::default();
        }
        if self.stops.is_empty() {
            return StopStep { text: text.to_owned(), stopped_by: None };
        }
        let old = self.tail.len();
        self.tail.push_str(text);
        if let Some((begin, stop)) = watched.then(|| self.first_to_end(old)).flatten() {
            let end = if self.include_stop { begin + stop.len() } else { begin };
            self.stopped = true;
            // With `include_stop` all of the old text was given out, and the stop string ends after
            // it.
            return StopStep {
                text: self.tail[self.given..end].to_owned(),
                stopped_by: Some(stop),
            };
        }
        let keep_from = self.tail.len() - self.undecided_length();
        let give_to = if self.include_stop { self.tail.len() } else { keep_from };
        let settled = self.tail[self.given..give_to].to_owned();
        self.tail.drain(..keep_from);
        self.given = give_to - keep_from;
        StopStep { text: settled, stopped_by: None }
    }

    /// The stop string that ends first, but after `old` bytes of the tail, and where it begins.
    fn first_to_end(&self, old: usize) -> Option<(usize, String)> {
        let mut best: Option<(usize, &String)> = None;
        for Stop { text: stop, finder } in &*self.stops {
            // A match must end behind `old`, so it begins behind `old - len`; that may be within a
            // character, where none begins.
            let from = (old + 1).saturating_sub(stop.len());
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

    /// Length of the longest end of the tail that a stop string begins with.
    fn undecided_length(&self) -> usize {
        let longest = self.stops.iter().map(|stop| stop.text.len() - 1).max().unwrap_or(0);
        let first = self.tail.len().saturating_sub(longest);
        (first..self.tail.len())
            .filter(|at| self.tail.is_char_boundary(*at))
            .find(|at| {
                let end = &self.tail[*at..];
                self.stops
                    .iter()
                    .any(|stop| stop.text.len() > end.len() && stop.text.starts_with(end))
            })
            .map_or(0, |at| self.tail.len() - at)
    }
}

#[cfg(test)]
#[path = "stop/tests.rs"]
mod tests;
