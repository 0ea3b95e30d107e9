//! A request's tokens, described in few words and made when they are needed.

use std::ops::Range;

use chiasm_kv::event::ExtraKey;
use chiasm_kv::{BlockKey, MediaSpan, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, MmHash, TokenId};

/// Qwen2.5-VL's `<|image_pad|>`.
const IMAGE_PAD: TokenId = TokenId(151_655);
/// Text tokens are below it.
const VOCABULARY: u64 = 150_000;
/// Pixels along a side of what becomes one embedding: 2 · 2 patches of 14 · 14.
const EMBED_SIDE: u64 = 28;
/// Values of one embedding's pixels: 3 colours, 2 equal frames, one byte each, as Chiasm hands them
/// over.
const TENSOR_BYTES_PER_EMBED: u64 = EMBED_SIDE * EMBED_SIDE * 3 * 2;

/// An image: its number stands for its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) id: u64,
    pub(crate) embeds: u32,
}

impl Image {
    pub(crate) fn hash(self) -> MmHash {
        let mut digest = [0; 32];
        for (word, bytes) in (0u64..).zip(digest.as_chunks_mut::<8>().0) {
            *bytes = mix(self.id ^ word << 61).to_le_bytes();
        }
        MmHash::new(digest)
    }

    pub(crate) fn pixels(self) -> u64 {
        u64::from(self.embeds) * EMBED_SIDE * EMBED_SIDE
    }

    pub(crate) fn tensor_bytes(self) -> u64 {
        u64::from(self.embeds) * TENSOR_BYTES_PER_EMBED
    }
}

/// A part of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// The first `length` tokens of an endless text; another seed is another text.
    Text { seed: u64, length: u32 },
    /// An image, which takes as many placeholder tokens as it has embeddings.
    Image(Image),
}

impl Piece {
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Text { length, .. } => length as usize,
            Self::Image(image) => image.embeds as usize,
        }
    }
}

/// Where an image lies in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) image: Image,
    /// Its first token.
    pub(crate) start: usize,
}

impl Item {
    /// After its last token.
    pub(crate) fn end(&self) -> usize {
        self.start + self.image.embeds as usize
    }
}

/// A prompt and the answer to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sequence {
    pieces: Vec<Piece>,
    items: Vec<Item>,
    prompt: usize,
    len: usize,
}

impl Sequence {
    /// The answer is text and has at least one token; so has the prompt.
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

    pub(crate) fn prompt(&self) -> usize {
        self.prompt
    }

    pub(crate) fn answer(&self) -> usize {
        self.len - self.prompt
    }

    /// Tokens that an engine computes: all but the last one, which is only given out.
    pub(crate) fn computed(&self) -> usize {
        self.len - 1
    }

    /// Images in prompt order.
    pub(crate) fn items(&self) -> &[Item] {
        &self.items
    }

    /// Adds the tokens of a range to `tokens`.
    pub(crate) fn tokens(&self, range: Range<usize>, tokens: &mut Vec<TokenId>) {
        let mut at = 0;
        for piece in &self.pieces {
            let (start, end) = (range.start.max(at), range.end.min(at + piece.len()));
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

    /// Keys of all full blocks, the answer's too.
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

    /// The marks of some blocks as an engine publishes them; `None` if none has any.
    pub(crate) fn extra_keys(
        &self,
        blocks: Range<usize>,
        block_size: usize,
    ) -> Option<Vec<Option<Vec<ExtraKey>>>> {
        let (from, to) = (blocks.start * block_size, blocks.end * block_size);
        let first = self.items.partition_point(|item| item.end() <= from);
        let touching: Vec<(&Item, String)> = self.items[first..]
            .iter()
            .take_while(|item| item.start < to)
            .map(|item| (item, item.image.hash().to_string()))
            .collect();
        if touching.is_empty() {
            return None;
        }
        let marks = |block: usize| {
            let (start, end) = (block * block_size, (block + 1) * block_size);
            let of_block: Vec<ExtraKey> = touching
                .iter()
                .filter(|(item, _)| item.start < end && start < item.end())
                .map(|(item, identifier)| ExtraKey::Media {
                    identifier: identifier.clone(),
                    offset: item.start as i64 - start as i64,
                })
                .collect();
            (!of_block.is_empty()).then_some(of_block)
        };
        Some(blocks.map(marks).collect())
    }
}

fn text_token(text: u64, index: u64) -> TokenId {
    // The high bits of a 64-bit product, scaled to the vocabulary: no division.
    TokenId((((mix(text.wrapping_add(index)) >> 32) * VOCABULARY) >> 32) as u32)
}

/// Spreads a number over 64 bits; a bijection (the finaliser of SplitMix64, Steele et al. 2014).
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
    fn any_range_has_the_tokens_of_the_whole() {
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
    fn a_longer_text_of_the_same_seed_begins_with_the_shorter() {
        let keys = |length| {
            Sequence::new(&[Piece::Text { seed: 9, length }], Piece::Text { seed: 0, length: 1 })
                .keys(SIZE)
        };
        assert_eq!(keys(64)[..4], keys(160)[..4]);
        assert_ne!(mix(1), mix(2));
    }

    #[test]
    fn marks_are_those_of_the_items_that_touch_a_block() {
        let sequence = sequence();
        let marks = sequence.extra_keys(0..10, 16).unwrap();
        let offsets: Vec<Vec<i64>> = marks
            .iter()
            .map(|marks| {
                let offset = |mark: &ExtraKey| match mark {
                    ExtraKey::Media { offset, .. } => *offset,
                    _ => panic!("a foreign mark"),
                };
                marks.iter().flatten().map(offset).collect()
            })
            .collect();
        // Images at 20..60 and 65..105.
        let expected: [&[i64]; 10] =
            [&[], &[4], &[-12], &[-28], &[1], &[-15], &[-31], &[], &[], &[]];
        assert_eq!(offsets, expected);
        assert_eq!(sequence.extra_keys(7..10, 16), None);
    }
}
