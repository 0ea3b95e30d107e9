//! The block hashes that engines compute, predicted for prompts that they have not seen yet.

use chiasm_types::{BlockSize, TokenId};
use sha2::{Digest, Sha256};
use twox_hash::XxHash3_64;

use super::{BlockKey, EngineHashKeys, KeyScheme, MediaSpan, PromptBlocks};
use crate::event::ExternalHash;

/// The hash function of engines whose events contain no readable tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EngineHashing {
    /// SGLang 0.5.23 (`cpp_utils/hash_binding.cpp`, `managers/schedule_batch.py`): the first
    /// 8 bytes of a SHA-256 chain over each block's token ids. A media item's tokens are replaced
    /// by four numbers derived from its identity, in turn.
    Sglang,
    /// SGLang 0.5.22: the same chain, but a media item's tokens are replaced by one number, derived
    /// from 30 bits of its identity.
    SglangNarrow,
    /// Dynamo 1.6, for every engine that it serves: an XXH3 chain over the hash of each block's
    /// token ids. The hashes of media items depend on the engine. From the first item on, the
    /// hashes computed here match no event; they only identify blocks that were sent to a worker.
    Dynamo,
}

impl EngineHashing {
    /// Returns the key scheme of workers whose engine uses this hash function.
    pub fn scheme(self) -> KeyScheme {
        KeyScheme::EngineHashes(self.engine_hash_keys())
    }

    /// Returns the keys of a prompt's full blocks, in prompt order.
    ///
    /// The LoRA adapter is not part of these keys. If text tokens interrupt an item's placeholder,
    /// `prompt` must have one [`MediaSpan`] for each run of the placeholder.
    pub fn keys(self, prompt: &PromptBlocks<'_>, block_size: BlockSize) -> Vec<BlockKey> {
        let keys = self.engine_hash_keys();
        let hashes = match self {
            Self::Sglang => sglang(prompt, block_size, wide_pads),
            Self::SglangNarrow => sglang(prompt, block_size, narrow_pads),
            Self::Dynamo => dynamo(prompt, block_size),
        };
        hashes.into_iter().map(|hash| keys.key(&ExternalHash::U64(hash))).collect()
    }

    fn engine_hash_keys(self) -> EngineHashKeys {
        let name = match self {
            Self::Sglang => "sglang",
            Self::SglangNarrow => "sglang-narrow",
            Self::Dynamo => "dynamo",
        };
        EngineHashKeys::from_short_name(name)
    }
}

/// The lowest number that SGLang substitutes for media tokens, above every vocabulary.
const FIRST_PAD: u64 = 1_000_000;

/// Returns SGLang's substitutes for an item's tokens. The k-th token becomes substitute k mod 4.
fn wide_pads(identity: u64) -> [u64; 4] {
    let digest = Sha256::new()
        .chain_update("sglang-mm-wide-pad-v1")
        .chain_update(identity.to_be_bytes())
        .finalize();
    let mut pads = [FIRST_PAD; 4];
    for (pad, bytes) in pads.iter_mut().zip(digest.chunks_exact(8)) {
        *pad +=
            bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)) & ((1 << 62) - 1);
    }
    pads
}

/// Returns SGLang 0.5.22's substitute for an item's tokens, four times.
fn narrow_pads(identity: u64) -> [u64; 4] {
    [FIRST_PAD + identity % (1 << 30); 4]
}

/// Returns the hashes that SGLang computes for a prompt's full blocks.
fn sglang(prompt: &PromptBlocks<'_>, block_size: BlockSize, pads: fn(u64) -> [u64; 4]) -> Vec<u64> {
    let mut ids: Vec<u64> = prompt.tokens.iter().map(|token| u64::from(token.0)).collect();
    for span in prompt.media {
        // SGLang accepts identities of any length and uses their low 64 bits.
        let [.., a, b, c, d, e, f, g, h] = *span.hash.as_bytes();
        let pads = pads(u64::from_be_bytes([a, b, c, d, e, f, g, h]));
        let placeholder = ids.iter_mut().skip(span.offset).take(span.length);
        placeholder.zip(pads.into_iter().cycle()).for_each(|(id, pad)| *id = pad);
    }
    let salt = prompt.salt.filter(|salt| !salt.is_empty());
    let mut prior = salt.map(|salt| {
        Sha256::new().chain_update("sglang-cache-salt-v1\0").chain_update(salt).finalize()
    });
    let hash = |block: &[u64]| {
        let mut hasher = Sha256::new();
        if let Some(prior) = prior {
            hasher.update(prior);
        }
        // If one id does not fit into 32 bits, all are written with 64 bits after the byte 0xff.
        let narrow: Option<Vec<u8>> = block.iter().map(|id| u32::try_from(*id).ok()).try_fold(
            Vec::with_capacity(4 * block.len()),
            |mut bytes, id| {
                bytes.extend_from_slice(&id?.to_le_bytes());
                Some(bytes)
            },
        );
        match narrow {
            Some(bytes) => hasher.update(bytes),
            None => {
                hasher.update([0xff]);
                block.iter().for_each(|id| hasher.update(id.to_le_bytes()));
            }
        }
        let digest = hasher.finalize();
        prior = Some(digest);
        digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
    };
    ids.chunks_exact(block_size.get()).map(hash).collect()
}

/// Returns the hashes that Dynamo computes for a prompt's full blocks; none for a prompt with a
/// LoRA adapter or a salt.
fn dynamo(prompt: &PromptBlocks<'_>, block_size: BlockSize) -> Vec<u64> {
    /// The seed of prompts without a LoRA adapter and without a salt.
    const SEED: u64 = 1337;
    let is_plain = prompt.lora.is_none() && prompt.salt.is_none_or(str::is_empty);
    let tokens = if is_plain { prompt.tokens } else { &[] };
    let size = block_size.get();
    let mut bytes = Vec::with_capacity(4 * size);
    let mut parent: Option<u64> = None;
    let hash = |(number, block): (usize, &[TokenId])| {
        bytes.clear();
        block.iter().for_each(|token| bytes.extend_from_slice(&token.0.to_le_bytes()));
        let start = number * size;
        let touches =
            |span: &&MediaSpan| span.offset < start + size && span.offset + span.length > start;
        for span in prompt.media.iter().filter(touches) {
            bytes.extend_from_slice(span.hash.as_bytes());
            bytes.extend_from_slice(&(span.offset as i64 - start as i64).to_le_bytes());
        }
        let own = XxHash3_64::oneshot_with_seed(SEED, &bytes);
        let chained = match parent {
            None => own,
            Some(parent) => {
                let pair = [parent.to_le_bytes(), own.to_le_bytes()].concat();
                XxHash3_64::oneshot_with_seed(SEED, &pair)
            }
        };
        parent = Some(chained);
        chained
    };
    tokens.chunks_exact(size).enumerate().map(hash).collect()
}

#[cfg(test)]
mod tests {
    use chiasm_types::MmHash;

    use super::*;

    /// The expected hashes were computed with Python's hashlib and struct.
    #[test]
    fn sglang_hashes_equal_python_reference() {
        let tokens: Vec<TokenId> = (1..=10).map(TokenId).collect();
        let hash = MmHash::new(std::array::from_fn(|at| at as u8));
        let media = [MediaSpan { hash, offset: 2, length: 5 }];
        let text = PromptBlocks { tokens: &tokens, ..PromptBlocks::default() };
        let imaged = PromptBlocks { media: &media, ..text };
        let size = BlockSize::new(4).unwrap();
        let sglang = |prompt: &PromptBlocks<'_>, size| sglang(prompt, size, wide_pads);
        assert_eq!(sglang(&text, size), [0xcf97adeedb59e05b, 0x4ebfa8a1f3c34151]);
        let salted = [0x9c6708b90645e96f, 0x59e0c51cb38e418d];
        assert_eq!(sglang(&PromptBlocks { salt: Some("s"), ..text }, size), salted);
        assert_eq!(sglang(&PromptBlocks { salt: Some(""), ..text }, size), sglang(&text, size));
        assert_eq!(sglang(&imaged, size), [0x40de213fcf0f2741, 0x5a3f985addc4d3eb]);
        assert_eq!(
            super::sglang(&imaged, size, narrow_pads),
            [0xaeeb804e29cb6175, 0x5af999b64cced939]
        );
        assert_ne!(
            EngineHashing::SglangNarrow.keys(&text, size),
            EngineHashing::Sglang.keys(&text, size)
        );
        let keys = EngineHashing::Sglang.keys(&text, size);
        let KeyScheme::EngineHashes(scheme) = EngineHashing::Sglang.scheme() else { panic!() };
        assert_eq!(
            keys,
            sglang(&text, size)
                .into_iter()
                .map(|hash| scheme.key(&ExternalHash::U64(hash)))
                .collect::<Vec<_>>()
        );
    }

    /// The expected hashes were published by a mocker of Dynamo 1.6.1 for a prompt of the tokens
    /// 100 to 169, in blocks of 16.
    #[test]
    fn dynamo_hashes_equal_mocker_up_to_first_item() {
        let tokens: Vec<TokenId> = (100..170).map(TokenId).collect();
        let text = PromptBlocks { tokens: &tokens, ..PromptBlocks::default() };
        let size = BlockSize::new(16).unwrap();
        let published =
            [10823191264391160519, 4102179227871607950, 18410735291254320318, 4506128744525108053];
        assert_eq!(dynamo(&text, size), published);
        let media = [MediaSpan { hash: MmHash::new([1; 32]), offset: 40, length: 5 }];
        let with_item = |media: &[MediaSpan]| dynamo(&PromptBlocks { media, ..text }, size);
        assert_eq!(with_item(&media)[..2], published[..2]);
        let others = [media[0].hash, MmHash::new([2; 32])]
            .map(|hash| with_item(&[MediaSpan { hash, offset: 41, length: 5 }]));
        assert!(
            others[0][2..]
                .iter()
                .zip(&others[1][2..])
                .zip(&published[2..])
                .all(|((one, other), text)| one != other && one != text)
        );
        assert_ne!(others[0][2], with_item(&media)[2], "an item at another place");
        assert!(dynamo(&PromptBlocks { salt: Some("s"), ..text }, size).is_empty());
        assert_eq!(EngineHashing::Dynamo.keys(&text, size).len(), 4);
        assert_ne!(EngineHashing::Dynamo.scheme(), EngineHashing::Sglang.scheme());
    }
}
