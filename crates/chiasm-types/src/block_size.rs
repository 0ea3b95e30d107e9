use std::num::NonZeroU32;

/// The number of tokens per KV-cache block, at least 1. Engines use 16 to 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// Creates a block size. Returns `None` for zero.
    pub const fn new(tokens: u32) -> Option<Self> {
        match NonZeroU32::new(tokens) {
            Some(tokens) => Some(Self(tokens)),
            None => None,
        }
    }

    /// Returns the number of tokens per block.
    pub const fn get(self) -> usize {
        self.0.get() as usize
    }
}
