//! A cursor over bytes. Like a file, it returns fewer bytes near the end, and none past the end.

/// A read position in a byte slice.
#[derive(Clone)]
pub(crate) struct Reader<'a> {
    data: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    /// Creates a reader at the start of `data`.
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self { data, position: 0 }
    }

    /// Creates a reader at `position`, which may be past the end.
    pub(crate) fn at(data: &'a [u8], position: usize) -> Self {
        Self { data, position }
    }

    /// Returns the offset of the next byte.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// Reads up to `count` bytes: fewer at the end of the data.
    pub(crate) fn up_to(&mut self, count: usize) -> &'a [u8] {
        let start = self.position.min(self.data.len());
        let end = start + count.min(self.data.len() - start);
        self.position += end - start;
        &self.data[start..end]
    }

    /// Reads exactly `count` bytes. Returns `None` if there are fewer, which are skipped.
    pub(crate) fn exactly(&mut self, count: usize) -> Option<&'a [u8]> {
        let bytes = self.up_to(count);
        (bytes.len() == count).then_some(bytes)
    }

    /// Reads `N` bytes, as [`exactly`](Self::exactly) does.
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.exactly(N)?.try_into().ok()
    }

    /// Reads one byte.
    pub(crate) fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Returns `true` if no bytes are left.
    pub(crate) fn is_at_end(&self) -> bool {
        self.position >= self.data.len()
    }

    /// Skips `count` bytes; the position may end up past the end.
    pub(crate) fn skip(&mut self, count: usize) {
        self.position = self.position.saturating_add(count);
    }
}
