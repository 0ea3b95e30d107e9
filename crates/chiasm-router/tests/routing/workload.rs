//! Test prompts, and the events of an engine that has computed them.

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};
use chiasm_kv::{BlockKey, MediaSpan, PromptBlocks, block_keys};
use chiasm_router::{Reservation, RouteError, RouteRequest, Router, RouterConfig, WorkerInfo};
use chiasm_types::{BlockSize, MmHash, PlanClassId, TokenId, WorkerId};

pub(crate) const BLOCK: BlockSize = BlockSize::new(16).unwrap();

pub(crate) struct Prompt {
    tokens: Vec<TokenId>,
    media: Vec<MediaSpan>,
    pub(crate) keys: Vec<BlockKey>,
}

impl Prompt {
    /// Creates a prompt of `length` tokens; texts with different numbers share no blocks.
    pub(crate) fn text(text: u32, length: usize) -> Self {
        Self::new((0..length as u32).map(|i| TokenId(1000 * text + i % 1000)).collect(), Vec::new())
    }

    /// Creates an image of 160 placeholder tokens and a question of 40 tokens: 12.5 blocks.
    pub(crate) fn image_question(image: u8, question: u32) -> Self {
        let mut tokens = vec![TokenId(7); 160];
        tokens.extend((0..40).map(|i| TokenId(1000 * question + i)));
        Self::new(
            tokens,
            vec![MediaSpan { hash: MmHash::new([image; 32]), offset: 0, length: 160 }],
        )
    }

    /// Creates an image of 1,024 placeholder tokens and a question of 40 tokens: 66.5 blocks.
    pub(crate) fn photo_question(image: u8, question: u32) -> Self {
        let mut tokens = vec![TokenId(7); 1024];
        tokens.extend((0..40).map(|i| TokenId(1000 * question + i)));
        Self::new(
            tokens,
            vec![MediaSpan { hash: MmHash::new([image; 32]), offset: 0, length: 1024 }],
        )
    }

    fn new(tokens: Vec<TokenId>, media: Vec<MediaSpan>) -> Self {
        let keys = block_keys(
            &PromptBlocks { tokens: &tokens, media: &media, ..Default::default() },
            BLOCK,
        );
        Self { tokens, media, keys }
    }

    pub(crate) fn select(&self, router: &Router) -> Reservation {
        self.select_excluding(router, &[]).unwrap()
    }

    pub(crate) fn select_excluding(
        &self,
        router: &Router,
        exclude: &[WorkerId],
    ) -> Result<Reservation, RouteError> {
        router.select(&RouteRequest { exclude, ..self.request() })
    }

    pub(crate) fn request(&self) -> RouteRequest<'_> {
        RouteRequest { keys: &self.keys, prompt_tokens: self.tokens.len(), ..Default::default() }
    }

    /// Returns the events of an engine that has computed the whole prompt. The engine's names of
    /// the blocks are half of our keys.
    pub(crate) fn stored(&self) -> KvEventBatch {
        let blocks = self.keys.len();
        let extra_keys = (0..blocks)
            .map(|block| {
                let start = (block * BLOCK.get()) as i64;
                let overlapping = self
                    .media
                    .iter()
                    .filter(|span| (span.offset as i64) < start + BLOCK.get() as i64)
                    .find(|span| (span.offset + span.length) as i64 > start);
                overlapping.map(|span| {
                    let identifier = span.hash.to_string();
                    vec![ExtraKey::Media { identifier, offset: span.offset as i64 - start }]
                })
            })
            .collect();
        batch(KvEvent::BlockStored(BlockStored {
            block_hashes: self.hashes(),
            token_ids: self.tokens[..blocks * BLOCK.get()].to_vec(),
            block_size: BLOCK.get() as u32,
            extra_keys: Some(extra_keys),
            ..Default::default()
        }))
    }

    /// Returns the events of an engine that has evicted the whole prompt.
    pub(crate) fn removed(&self) -> KvEventBatch {
        batch(KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: self.hashes(),
            ..Default::default()
        }))
    }

    fn hashes(&self) -> Vec<ExternalHash> {
        self.keys.iter().map(|key| ExternalHash::U64(key.get() as u64)).collect()
    }
}

pub(crate) fn batch(event: KvEvent) -> KvEventBatch {
    KvEventBatch { timestamp: 0.0, events: vec![event], data_parallel_rank: None }
}

pub(crate) const INFO: WorkerInfo = WorkerInfo {
    total_blocks: 1000,
    block_size: BLOCK,
    publishes_events: true,
    encoder_cache_tokens: 2000,
    receiver_cache_elements: 1 << 20,
    class: PlanClassId(0),
    role: chiasm_types::Role::Aggregated,
    embedding_store_bytes: 0,
    machine: 0,
    handover_domain: 0,
    max_prompt_tokens: usize::MAX,
    max_encoder_tokens: usize::MAX,
};

/// Creates a router with workers 0, 1, … and a fixed seed, so that failures are reproducible.
pub(crate) fn router(workers: u32, change: impl FnOnce(&mut RouterConfig)) -> Router {
    let mut config = RouterConfig { seed: Some(42), ..Default::default() };
    change(&mut config);
    let router = Router::new(config);
    (0..workers).for_each(|id| router.add_worker(WorkerId(id), INFO));
    router
}

/// Returns the number of reservations on each worker.
pub(crate) fn per_worker<'a>(
    workers: usize,
    reservations: impl IntoIterator<Item = &'a Reservation>,
) -> Vec<usize> {
    let mut counts = vec![0; workers];
    reservations.into_iter().for_each(|reservation| counts[reservation.worker.0 as usize] += 1);
    counts
}
