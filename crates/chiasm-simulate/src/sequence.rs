//! A compact description of a request's tokens, which are generated when they are needed.

use std::ops::Range;

use chiasm_kv::event::ExtraKey;
use chiasm_kv::{BlockKey, MediaSpan, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, MmHash, TokenId};

/// The token of `<|image_pad|>` in Qwen2.5-VL.
const IMAGE_PAD: TokenId = TokenId(151_655);
/// The number of text tokens, which are below it.
const VOCABULARY: u64 = 150_000;
/// The side, in pixels, of the area of one embedding: 2 · 2 patches of 14 · 14.
const EMBED_SIDE: u64 = 28;
/// The tensor size per embedding: 3 colours and 2 equal frames, one byte each, as Chiasm sends
/// them.
const TENSOR_BYTES_PER_EMBED: u64 = EMBED_SIDE * EMBED_SIDE * 3 * 2;

/// An image, whose id stands for its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) id: u64,
    pub(crate) embeds: u32,
}

impl Image {
    /// Returns the image's identity.
    pub(crate) fn hash(self) -> MmHash {
        let mut digest = [0; 32];
        for (word, bytes) in (0u64..).zip(digest.as_chunks_mut::<8>().0) {
            *bytes = mix(self.id ^ word << 61).to_le_bytes();
        }
        MmHash::new(digest)
    }

    /// Returns the number of pixels.
    pub(crate) fn pixels(self) -> u64 {
        u64::from(self.embeds) * EMBED_SIDE * EMBED_SIDE
    }

    /// Returns the size of the image's tensor.
    pub(crate) fn tensor_bytes(self) -> u64 {
        u64::from(self.embeds) * TENSOR_BYTES_PER_EMBED
    }
}

/// A part of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// The first `length` tokens of an endless text that is determined by the seed.
    Text { seed: u64, length: u32 },
    /// An image, which takes as many placeholder tokens as it has embeddings.
    Image(Image),
}

impl Piece {
    /// Returns the number of tokens.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Text { length, .. } => length as usize,
            Self::Image(image) => image.embeds as usize,
        }
    }
}

/// An image and its position in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) image: Image,
    /// The index of its first token.
    pub(crate) start: usize,
}

impl Item {
    /// Returns the index after its last token.
    pub(crate) fn end(&self) -> usize {
        self.start + self.image.embeds as usize
    }
}

/// A prompt and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sequence {
    pieces: Vec<Piece>,
    items: Vec<Item>,
    prompt: usize,
    len: usize,
}

impl Sequence {
    /// Creates a sequence. The answer must be text. Prompt and answer must have at least one token.
    pub(crate) fn new(prompt: &[Piece], answer: Piece) -> Self {
        let mut items = Vec::new();
        let mut at = 0;
        for piece in prompt {
            if let Piece::Image(image) = *piece {
                items.push(Item { image, start: at });
            }
            at += piece.len();
        }
        let pieces = prompt.iter().copied().chain([answer]).collect();
        Self { pieces, items, prompt: at, len: at + answer.len() }
    }

    /// Returns the number of prompt tokens.
    pub(crate) fn prompt(&self) -> usize {
        self.prompt
    }

    /// Returns the number of answer tokens.
    pub(crate) fn answer(&self) -> usize {
        self.len - self.prompt
    }

    /// Returns the number of tokens that an engine computes: all but the last one, which is only
    /// sampled.
    pub(crate) fn computed(&self) -> usize {
        self.len - 1
    }

    /// Returns the images in prompt order.
    pub(crate) fn items(&self) -> &[Item] {
        &self.items
    }

    /// Appends the tokens of a range to `tokens`.
    pub(crate) fn tokens(&self, range: Range<usize>, tokens: &mut Vec<TokenId>) {
        let mut at = 0;
        for piece in &self.pieces {
            let start = range.start.max(at);
            let end = range.end.min(at + piece.len());
            if start < end {
                match *piece {
                    Piece::Text { seed, .. } => {
                        let text = mix(seed);
                        tokens.extend((start - at..end - at).map(|i| text_token(text, i as u64)));
                    }
                    Piece::Image(_) => tokens.resize(tokens.len() + end - start, IMAGE_PAD),
                }
            }
            at += piece.len();
        }
    }

    /// Returns the keys of all full blocks, including those of the answer.
    pub(crate) fn keys(&self, block_size: BlockSize) -> Vec<BlockKey> {
        let mut tokens = Vec::with_capacity(self.len);
        self.tokens(0..self.len, &mut tokens);
        let span = |item: &Item| MediaSpan {
            hash: item.image.hash(),
            offset: item.start,
            length: item.image.embeds as usize,
        };
        let media: Vec<MediaSpan> = self.items.iter().map(span).collect();
        block_keys(
            &PromptBlocks { tokens: &tokens, media: &media, ..Default::default() },
            block_size,
        )
    }

    /// Returns the extra keys of some blocks as an engine publishes them; `None` if no block has
    /// any.
    pub(crate) fn extra_keys(
        &self,
        blocks: Range<usize>,
        block_size: usize,
    ) -> Option<Vec<Option<Vec<ExtraKey>>>> {
        let range = blocks.start * block_size..blocks.end * block_size;
        let first = self.items.partition_point(|item| item.end() <= range.start);
        let touching: Vec<(&Item, String)> = self.items[first..]
            .iter()
            .take_while(|item| item.start < range.end)
            .map(|item| (item, item.image.hash().to_string()))
            .collect();
        if touching.is_empty() {
            return None;
        }
        let extra_keys = |block: usize| {
            let start = block * block_size;
            let end = start + block_size;
            let keys: Vec<ExtraKey> = touching
                .iter()
                .filter(|(item, _)| item.start < end && start < item.end())
                .map(|(item, identifier)| ExtraKey::Media {
                    identifier: identifier.clone(),
                    offset: item.start as i64 - start as i64,
                })
                .collect();
            (!keys.is_empty()).then_some(keys)
        };
        Some(blocks.map(extra_keys).collect())
    }
}

/// Returns the token at an index of a text.
fn text_token(text: u64, index: u64) -> TokenId {
    // The high bits of a 64-bit product, scaled to the vocabulary: no division.
    TokenId((((mix(text.wrapping_add(index)) >> 32) * VOCABULARY) >> 32) as u32)
}

/// Hashes a number to 64 bits; a bijection (the finaliser of SplitMix64, Steele et al. 2014).
pub(crate) fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: BlockSize = BlockSize::new(16).unwrap();

    fn sequence() -> Sequence {
        let image = |id| Piece::Image(Image { id, embeds: 40 });
        let text = |seed, length| Piece::Text { seed, length };
        Sequence::new(&[text(1, 20), image(7), text(2, 5), image(8), text(3, 30)], text(4, 25))
    }

    #[test]
    fn tokens_of_a_range_match_those_of_the_whole() {
        let sequence = sequence();
        let mut whole = Vec::new();
        sequence.tokens(0..160, &mut whole);
        assert_eq!(whole.len(), 160);
        assert_eq!([sequence.prompt(), sequence.answer()], [135, 25]);
        for (start, end) in [(0, 16), (16, 64), (59, 61), (100, 160), (159, 160)] {
            let mut part = Vec::new();
            sequence.tokens(start..end, &mut part);
            assert_eq!(part, whole[start..end], "{start}..{end}");
        }
    }

    #[test]
    fn longer_text_begins_with_the_shorter_of_its_seed() {
        let keys = |length| {
            Sequence::new(&[Piece::Text { seed: 9, length }], Piece::Text { seed: 0, length: 1 })
                .keys(SIZE)
        };
        assert_eq!(keys(64)[..4], keys(160)[..4]);
        assert_ne!(mix(1), mix(2));
    }

    #[test]
    fn extra_keys_are_those_of_the_items_in_a_block() {
        let sequence = sequence();
        let extra_keys = sequence.extra_keys(0..10, 16).unwrap();
        let offsets: Vec<Vec<i64>> = extra_keys
            .iter()
            .map(|keys| {
                let offset = |key: &ExtraKey| match key {
                    ExtraKey::Media { offset, .. } => *offset,
                    _ => panic!("not an extra key of media"),
                };
                keys.iter().flatten().map(offset).collect()
            })
            .collect();
        // Images at 20..60 and 65..105.
        let expected: [&[i64]; 10] =
            [&[], &[4], &[-12], &[-28], &[1], &[-15], &[-31], &[], &[], &[]];
        assert_eq!(offsets, expected);
        assert_eq!(sequence.extra_keys(7..10, 16), None);
    }
}
