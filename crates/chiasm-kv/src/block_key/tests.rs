use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const BLOCK: BlockSize = BlockSize::new(4).unwrap();

fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
    ids.into_iter().map(TokenId).collect()
}

fn item(name: u8, offset: usize, length: usize) -> MediaSpan {
    MediaSpan { hash: MmHash::new([name; 32]), offset, length }
}

fn keys_of(tokens: &[TokenId], media: &[MediaSpan]) -> Vec<BlockKey> {
    block_keys(&PromptBlocks { tokens, media, ..Default::default() }, BLOCK)
}

#[test]
fn only_full_blocks_have_keys() {
    for (length, blocks) in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)] {
        assert_eq!(keys_of(&tokens(0..length), &[]).len(), blocks, "{length} tokens");
    }
}

#[test]
fn key_depends_on_all_preceding_blocks() {
    let keys = keys_of(&tokens([1, 1, 1, 1, 1, 1, 1, 1]), &[]);
    assert_ne!(keys[0], keys[1]);
    let other = keys_of(&tokens([2, 1, 1, 1, 1, 1, 1, 1]), &[]);
    assert_ne!(keys[0], other[0]);
    assert_ne!(keys[1], other[1]);
}

#[test]
fn images_of_same_layout_share_no_key_they_touch() {
    let prompt = tokens([9; 16]);
    let one = keys_of(&prompt, &[item(1, 6, 5)]);
    let other = keys_of(&prompt, &[item(2, 6, 5)]);
    assert_eq!(one[0], other[0]);
    for block in 1..4 {
        assert_ne!(one[block], other[block], "block {block}");
    }
}

#[test]
fn images_differing_in_last_bit_share_no_key() {
    let prompt = tokens([9; 4]);
    let mut digest = [0; 32];
    let one = MediaSpan { hash: MmHash::new(digest), offset: 0, length: 4 };
    digest[31] = 1;
    let other = MediaSpan { hash: MmHash::new(digest), ..one };
    assert_ne!(keys_of(&prompt, &[one]), keys_of(&prompt, &[other]));
}

#[test]
fn same_image_at_another_offset_shares_no_key() {
    let prompt = tokens([9; 8]);
    let keys: HashSet<_> =
        (0..4).map(|offset| keys_of(&prompt, &[item(1, offset, 4)])[1]).collect();
    assert_eq!(keys.len(), 4);
}

#[test]
fn blocks_inside_image_differ_by_offset() {
    let mut hasher = BlockHasher::default();
    let block = tokens([9; 4]);
    let image = MmHash::new([1; 32]);
    let keys: HashSet<_> = (-3..3)
        .map(|offset| {
            hasher.key(&BlockContent {
                parent: None,
                tokens: &block,
                media: &[(image, offset)],
                lora: None,
                salt: None,
            })
        })
        .collect();
    assert_eq!(keys.len(), 6);
}

#[test]
fn items_touch_same_blocks_as_in_vllm() {
    // The item at 3..5 touches blocks 0 and 1 with offsets 3 and -1. The item at 8..12 touches only
    // block 2, with offset 0.
    let prompt = tokens([9; 16]);
    let keys = keys_of(&prompt, &[item(2, 8, 4), item(1, 3, 2)]);
    let mut hasher = BlockHasher::default();
    let mut parent = None;
    let touching: [&[(MmHash, i64)]; 4] = [
        &[(MmHash::new([1; 32]), 3)],
        &[(MmHash::new([1; 32]), -1)],
        &[(MmHash::new([2; 32]), 0)],
        &[],
    ];
    for (block, media) in touching.into_iter().enumerate() {
        let key = hasher.key(&BlockContent {
            parent,
            tokens: &prompt[..4],
            media,
            lora: None,
            salt: None,
        });
        assert_eq!(keys[block], key, "block {block}");
        parent = Some(key);
    }
}

#[test]
fn second_item_of_same_range_is_only_in_last_block() {
    let video = item(1, 3, 8);
    let audio = item(2, 3, 8);
    let keys = keys_of(&tokens([9; 20]), &[video, audio, item(3, 13, 9)]);
    let touching: [&[(MmHash, i64)]; 5] = [
        &[(video.hash, 3)],
        &[(video.hash, -1)],
        &[(video.hash, -5), (audio.hash, -5)],
        &[(MmHash::new([3; 32]), 1)],
        &[(MmHash::new([3; 32]), -3)],
    ];
    let mut hasher = BlockHasher::default();
    let mut parent = None;
    for (block, media) in touching.into_iter().enumerate() {
        let key = hasher.key(&BlockContent {
            parent,
            tokens: &tokens([9; 4]),
            media,
            lora: None,
            salt: None,
        });
        assert_eq!(keys[block], key, "block {block}");
        parent = Some(key);
    }
}

#[test]
fn lora_or_salt_changes_all_keys() {
    let prompt = tokens(0..8);
    let with =
        |lora, salt| block_keys(&PromptBlocks { tokens: &prompt, media: &[], lora, salt }, BLOCK);
    let all = [
        with(None, None),
        with(Some("a"), None),
        with(None, Some("a")),
        with(Some("a"), Some("a")),
        with(Some(""), None),
    ];
    for block in 0..2 {
        let distinct: HashSet<_> = all.iter().map(|keys| keys[block]).collect();
        assert_eq!(distinct.len(), all.len(), "block {block}");
    }
    assert_eq!(with(None, Some("")), with(None, None));
}

#[test]
fn different_block_sizes_share_no_key() {
    let prompt = tokens(0..64);
    let keys_of_size = |size| -> HashSet<BlockKey> {
        let prompt = PromptBlocks { tokens: &prompt, ..Default::default() };
        block_keys(&prompt, BlockSize::new(size).unwrap()).into_iter().collect()
    };
    let four = keys_of_size(4);
    let eight = keys_of_size(8);
    assert!(four.is_disjoint(&eight));
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OwnedContent {
    parent: Option<u128>,
    tokens: Vec<u32>,
    media: Vec<(u8, i64)>,
    lora: Option<String>,
    salt: Option<String>,
}

prop_compose! {
    /// A block's content from a small alphabet, so that near misses are frequent.
    fn content()(
        parent in proptest::option::of(0..2u128),
        tokens in proptest::collection::vec(0..2u32, 0..4),
        media in proptest::collection::vec((0..2u8, -1..2i64), 0..3),
        lora in proptest::option::of("[ab]{0,2}"),
        salt in proptest::option::of("[ab]{1,2}"),
    ) -> OwnedContent {
        OwnedContent { parent, tokens, media, lora, salt }
    }
}

fn key(content: &OwnedContent) -> BlockKey {
    let media: Vec<_> =
        content.media.iter().map(|(name, offset)| (MmHash::new([*name; 32]), *offset)).collect();
    BlockHasher::default().key(&BlockContent {
        parent: content.parent.map(BlockKey),
        tokens: &tokens(content.tokens.iter().copied()),
        media: &media,
        lora: content.lora.as_deref(),
        salt: content.salt.as_deref(),
    })
}

proptest! {
    #[test]
    fn keys_are_equal_iff_contents_are(one in content(), other in content()) {
        prop_assert_eq!(key(&one) == key(&other), one == other);
    }

    #[test]
    fn series_of_blocks_equals_single_blocks(
        ids in proptest::collection::vec(
            prop_oneof![60 => 0..150_000u32, 1 => any::<u32>()],
            0..1200,
        ),
        spans in proptest::collection::vec((0..3u8, 0..90usize, 0..300usize), 0..5),
        size in prop_oneof![Just(16u32), Just(32), 1..=70u32],
        lora in proptest::option::of("[ab]{0,2}"),
        salt in proptest::option::of("[ab]{0,2}"),
        by_kernel in any::<bool>(),
    ) {
        let mut end = 0;
        let media: Vec<_> = spans
            .into_iter()
            .map(|(name, gap, length)| {
                let span = item(name, end + gap, length);
                end = span.offset + length;
                span
            })
            .collect();
        let prompt = tokens(ids);
        let size = BlockSize::new(size).unwrap();
        let mut hasher = BlockHasher { kernel: None, ..Default::default() };
        let mut parent = None;
        let expected: Vec<_> = prompt
            .chunks_exact(size.get())
            .enumerate()
            .map(|(block, tokens)| {
                let start = block * size.get();
                let end = start + size.get();
                let touching: Vec<_> = media
                    .iter()
                    .filter(|span| span.offset < end && span.offset + span.length > start)
                    .map(|span| (span.hash, span.offset as i64 - start as i64))
                    .collect();
                let salt = salt.as_deref().filter(|_| block == 0);
                let lora = lora.as_deref();
                let content = BlockContent { parent, tokens, media: &touching, lora, salt };
                parent = Some(hasher.key(&content));
                hasher.key(&content)
            })
            .collect();
        let whole = PromptBlocks {
            tokens: &prompt,
            media: &media,
            lora: lora.as_deref(),
            salt: salt.as_deref(),
        };
        prop_assert_eq!(&block_keys(&whole, size), &expected);

        let kernel = Kernel::fastest().filter(|_| by_kernel);
        let text = BlockHasher { kernel, ..Default::default() };
        let mut keys = vec![BlockKey(3)];
        text.text_keys(BlockKey(3), &prompt, size.get(), &mut keys);
        for (block, tokens) in prompt.chunks_exact(size.get()).enumerate() {
            let parent = Some(keys[block]);
            let content = BlockContent { parent, tokens, media: &[], lora: None, salt: None };
            prop_assert_eq!(keys[block + 1], hasher.key(&content));
        }
        prop_assert_eq!(keys.len(), 1 + prompt.len() / size.get());
    }

    #[test]
    fn longer_prompt_starts_with_keys_of_shorter(
        ids in proptest::collection::vec(0..5u32, 0..40),
        cut in 0..40usize,
        spans in proptest::collection::vec((0..3u8, 0..4usize, 1..9usize), 0..4),
    ) {
        // Place the items one after the other, with the given gaps.
        let mut end = 0;
        let media: Vec<_> = spans
            .into_iter()
            .map(|(name, gap, length)| {
                let span = item(name, end + gap, length);
                end = span.offset + length;
                span
            })
            .collect();
        let prompt = tokens(ids);
        let cut = cut.min(prompt.len());
        let whole = keys_of(&prompt, &media);
        let part = keys_of(&prompt[..cut], &media);
        prop_assert_eq!(&whole[..part.len()], &part[..]);
    }
}
