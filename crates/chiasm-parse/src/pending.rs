//! A buffer of unparsed text, and a search for the next marker in it.

/// The number of consumed bytes from which the buffer is compacted.
const COMPACT_BYTES: usize = 4 << 10;

/// Text that was received and not parsed yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pending {
    text: String,
    /// The number of bytes at the front that were consumed.
    consumed: usize,
}

impl Pending {
    /// Appends text.
    pub(crate) fn push(&mut self, text: &str) {
        if self.consumed == self.text.len() {
            self.text.clear();
            self.consumed = 0;
        } else if self.consumed >= COMPACT_BYTES.max(self.text.len() / 2) {
            self.text.drain(..self.consumed);
            self.consumed = 0;
        }
        self.text.push_str(text);
    }

    /// Returns the text that was not consumed yet.
    pub(crate) fn rest(&self) -> &str {
        &self.text[self.consumed..]
    }

    /// Returns `true` if all text was consumed.
    pub(crate) fn is_empty(&self) -> bool {
        self.consumed == self.text.len()
    }

    /// Consumes bytes, which have to end at a character boundary.
    pub(crate) fn skip(&mut self, bytes: usize) {
        self.consumed += bytes;
    }
}

/// A set of markers, which are texts that structure an answer.
#[derive(Clone, Debug)]
pub(crate) struct Markers {
    texts: Vec<&'static str>,
    /// The first bytes of the markers.
    first_bytes: Vec<u8>,
}

/// The result of a search for the next marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextMarker {
    /// The number of bytes in which no marker begins, whatever follows. This is where `marker`
    /// begins.
    pub(crate) clear: usize,
    /// The marker. `None` if none is complete yet.
    pub(crate) marker: Option<&'static str>,
}

impl Markers {
    pub(crate) fn new(texts: impl IntoIterator<Item = &'static str>) -> Self {
        let texts: Vec<&str> = texts.into_iter().collect();
        let mut first_bytes: Vec<u8> =
            texts.iter().filter_map(|text| text.bytes().next()).collect();
        first_bytes.sort_unstable();
        first_bytes.dedup();
        Self { texts, first_bytes }
    }

    /// Returns `true` if no marker begins in `text`.
    pub(crate) fn none_begins_in(&self, text: &str) -> bool {
        !text.bytes().any(|byte| self.first_bytes.contains(&byte))
    }

    /// Finds the first marker in `text`, and the longest one if several begin at the same place.
    ///
    /// A marker that more text may turn into a longer one is only found if `is_last` is `true`,
    /// which means that no more text follows.
    pub(crate) fn find(&self, text: &str, is_last: bool) -> NextMarker {
        let bytes = text.as_bytes();
        let may_begin = |at: usize| self.first_bytes.contains(&bytes[at]);
        for at in (0..bytes.len()).filter(|&at| may_begin(at)) {
            let rest = &bytes[at..];
            let is_incomplete =
                |marker: &&str| marker.len() > rest.len() && marker.as_bytes().starts_with(rest);
            if !is_last && self.texts.iter().any(is_incomplete) {
                return NextMarker { clear: at, marker: None };
            }
            let is_here = |marker: &&'static str| rest.starts_with(marker.as_bytes());
            let longest =
                self.texts.iter().copied().filter(is_here).max_by_key(|marker| marker.len());
            if longest.is_some() {
                return NextMarker { clear: at, marker: longest };
            }
        }
        NextMarker { clear: bytes.len(), marker: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(clear: usize, marker: &'static str) -> NextMarker {
        NextMarker { clear, marker: Some(marker) }
    }

    fn not_found(clear: usize) -> NextMarker {
        NextMarker { clear, marker: None }
    }

    #[test]
    fn find_returns_first_longest_marker() {
        let markers = Markers::new(["<a>", "<a>\"", "[b]"]);
        assert_eq!(markers.find("x[b]<a>", false), found(1, "[b]"));
        assert_eq!(markers.find("<a>\"", false), found(0, "<a>\""));
        assert_eq!(markers.find("<a>x", false), found(0, "<a>"));
    }

    #[test]
    fn find_waits_for_possible_marker() {
        let markers = Markers::new(["<a>", "<a>\""]);
        assert_eq!(markers.find("é<a", false), not_found(2));
        assert_eq!(markers.find("é<a", true), not_found(4));
        assert_eq!(markers.find("<a>", false), not_found(0));
        assert_eq!(markers.find("<a>", true), found(0, "<a>"));
        assert_eq!(markers.find("<b<", false), not_found(2));
    }

    #[test]
    fn consumed_text_is_freed() {
        let mut pending = Pending::default();
        for _ in 0..100_000 {
            pending.push("0123456789");
            let consumed = pending.rest().len().saturating_sub(7);
            pending.skip(consumed);
        }
        assert_eq!(pending.rest().len(), 7);
        assert!(pending.text.capacity() < 4 * COMPACT_BYTES);
    }
}
