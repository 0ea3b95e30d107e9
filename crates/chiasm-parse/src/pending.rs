//! Text that has come and is not understood yet, and the markers that are looked for in it.

/// Consumed text is dropped once there is so much of it.
const DROPPED: usize = 4 << 10;

/// Text that has come and is not understood yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pending {
    text: String,
    /// Bytes at the front that are done with.
    done: usize,
}

impl Pending {
    pub(crate) fn push(&mut self, text: &str) {
        if self.done == self.text.len() {
            self.text.clear();
            self.done = 0;
        } else if self.done >= DROPPED.max(self.text.len() / 2) {
            self.text.drain(..self.done);
            self.done = 0;
        }
        self.text.push_str(text);
    }

    pub(crate) fn rest(&self) -> &str {
        &self.text[self.done..]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.done == self.text.len()
    }

    /// Is done with so many bytes, which end with a character.
    pub(crate) fn skip(&mut self, bytes: usize) {
        self.done += bytes;
    }
}

/// Texts that structure an answer.
#[derive(Clone, Debug)]
pub(crate) struct Markers {
    texts: Vec<&'static str>,
    /// Bytes that a marker begins with.
    first: Vec<u8>,
}

/// What there is of markers in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The first one: where, and its number.
    Marker { at: usize, number: usize },
    /// None so far, and none that begins within so many bytes.
    Nothing { clear: usize },
}

impl Markers {
    pub(crate) fn new(texts: impl IntoIterator<Item = &'static str>) -> Self {
        let texts: Vec<&str> = texts.into_iter().collect();
        let mut first: Vec<u8> = texts.iter().filter_map(|text| text.bytes().next()).collect();
        first.sort_unstable();
        first.dedup();
        Self { texts, first }
    }

    pub(crate) fn text(&self, number: usize) -> &'static str {
        self.texts[number]
    }

    /// Whether no marker begins in the text.
    pub(crate) fn are_far_from(&self, text: &str) -> bool {
        !text.bytes().any(|byte| self.first.contains(&byte))
    }

    /// Looks for the first marker, of several at one place for the longest. A marker that may
    /// become a longer one with the text that follows is not found yet, unless nothing follows
    /// (`is_last`).
    pub(crate) fn find(&self, text: &str, is_last: bool) -> Found {
        let bytes = text.as_bytes();
        let begins = |at: usize| self.first.contains(&bytes[at]);
        for at in (0..bytes.len()).filter(|&at| begins(at)) {
            let rest = &bytes[at..];
            let may_follow =
                |marker: &&str| marker.len() > rest.len() && marker.as_bytes().starts_with(rest);
            if !is_last && self.texts.iter().any(may_follow) {
                return Found::Nothing { clear: at };
            }
            let here = |(_, marker): &(usize, &&str)| rest.starts_with(marker.as_bytes());
            let longest =
                self.texts.iter().enumerate().filter(here).max_by_key(|(_, marker)| marker.len());
            if let Some((number, _)) = longest {
                return Found::Marker { at, number };
            }
        }
        Found::Nothing { clear: bytes.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_marker_is_found_and_the_longest_at_its_place() {
        let markers = Markers::new(["<a>", "<a>\"", "[b]"]);
        assert_eq!(markers.find("x[b]<a>", false), Found::Marker { at: 1, number: 2 });
        assert_eq!(markers.find("<a>\"", false), Found::Marker { at: 0, number: 1 });
        assert_eq!(markers.find("<a>x", false), Found::Marker { at: 0, number: 0 });
    }

    #[test]
    fn what_may_become_a_marker_is_waited_for() {
        let markers = Markers::new(["<a>", "<a>\""]);
        assert_eq!(markers.find("é<a", false), Found::Nothing { clear: 2 });
        assert_eq!(markers.find("é<a", true), Found::Nothing { clear: 4 });
        assert_eq!(markers.find("<a>", false), Found::Nothing { clear: 0 });
        assert_eq!(markers.find("<a>", true), Found::Marker { at: 0, number: 0 });
        assert_eq!(markers.find("<b<", false), Found::Nothing { clear: 2 });
    }

    #[test]
    fn text_that_is_done_with_does_not_pile_up() {
        let mut pending = Pending::default();
        for _ in 0..100_000 {
            pending.push("0123456789");
            let most = pending.rest().len().saturating_sub(7);
            pending.skip(most);
        }
        assert_eq!(pending.rest().len(), 7);
        assert!(pending.text.capacity() < 4 * DROPPED);
    }
}
