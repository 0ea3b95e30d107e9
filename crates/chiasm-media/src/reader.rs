//! A cursor over bytes that reads past the end the way a file does: less, then nothing.

/// Position in a byte slice.
#[derive(Clone)]
pub(crate) struct Reader<'a> {
    data: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self { data, position: 0 }
    }

    /// A reader that starts at `position`, which may lie behind the end.
    pub(crate) fn at(data: &'a [u8], position: usize) -> Self {
        Self { data, position }
    }

    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// Up to `count` bytes: fewer at the end of the data.
    pub(crate) fn up_to(&mut self, count: usize) -> &'a [u8] {
        let start = self.position.min(self.data.len());
        let end = start + count.min(self.data.len() - start);
        self.position += end - start;
        &self.data[start..end]
    }

    /// Exactly `count` bytes, or nothing.
    pub(crate) fn exactly(&mut self, count: usize) -> Option<&'a [u8]> {
        let bytes = self.up_to(count);
        (bytes.len() == count).then_some(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.exactly(N)?.try_into().ok()
    }

    pub(crate) fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.position >= self.data.len()
    }

    /// Moves forward without reading; may move behind the end.
    pub(crate) fn skip(&mut self, count: usize) {
        self.position = self.position.saturating_add(count);
    }
}
