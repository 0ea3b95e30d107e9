use chiasm_kv::event::KvEventBatch;
use chiasm_kv::{BlockKey, PrefixIndex};
use chiasm_types::WorkerId;
use proptest::prelude::*;

use super::*;
use crate::sequence::{Image, Piece, Sequence};
use crate::virtual_time::seconds;

/// A first token, with the state of its request then.
struct FirstToken {
    arrival: Nanos,
    at: Nanos,
    prompt_tokens: usize,
    cached_tokens: usize,
    /// Embeddings that were encoded for the request.
    encoded: u64,
}

/// An observer that records all notifications.
#[derive(Default)]
struct Recorder {
    first_tokens: Vec<FirstToken>,
    /// The end of each request, with the tokens of its answer.
    ended: Vec<(Nanos, usize)>,
    prefilled: Vec<(Nanos, LiveRequest)>,
    /// The number of gaps.
    gaps: u64,
    longest_gap: Nanos,
}

impl Observer for Recorder {
    fn on_first_token(&mut self, live: &mut LiveRequest, now: Nanos) {
        self.first_tokens.push(FirstToken {
            arrival: live.arrival,
            at: now,
            prompt_tokens: live.sequence.prompt(),
            cached_tokens: live.cached,
            encoded: live.encoded,
        });
    }

    fn on_prefilled(&mut self, live: LiveRequest, now: Nanos) {
        self.prefilled.push((now, live));
    }

    fn on_finished(&mut self, live: LiveRequest, now: Nanos) {
        self.ended.push((now, live.sequence.answer()));
    }

    fn on_gaps(&mut self, gap: Nanos, tokens: u64, _: Nanos) {
        self.gaps += tokens;
        self.longest_gap = self.longest_gap.max(gap);
    }
}

fn text(seed: u64, length: u32) -> Piece {
    Piece::Text { seed, length }
}

fn image(id: u64, embeds: u32) -> Piece {
    Piece::Image(Image { id, embeds })
}

fn live(model: &EngineModel, prompt: &[Piece], answer: u32, at: Nanos) -> LiveRequest {
    let sequence = Sequence::new(prompt, text(9_000_000 + at, answer));
    let keys = sequence.keys(model.block_size);
    LiveRequest::new(0, sequence, keys, at, true)
}

/// Delivers requests at their times and runs the engine to the end. Calls `on_events` with the KV
/// events that the engine publishes.
fn run_engine(
    engine: &mut Engine,
    requests: Vec<LiveRequest>,
    mut on_events: impl FnMut(&Engine, Vec<KvEvent>),
) -> Recorder {
    let mut recorder = Recorder::default();
    for live in requests {
        let at = live.arrival;
        while let Some(wake) = engine.next_wake().filter(|wake| *wake <= at) {
            let events = engine.wake(wake, &mut recorder);
            on_events(engine, events);
        }
        engine.deliver(live, at);
    }
    while let Some(wake) = engine.next_wake() {
        let events = engine.wake(wake, &mut recorder);
        on_events(engine, events);
    }
    recorder
}

fn run(model: &EngineModel, requests: Vec<LiveRequest>) -> Recorder {
    run_engine(&mut Engine::new(*model, None), requests, |_, _| {})
}

/// Returns `true` if a time is within a microsecond of the expected seconds.
fn close(found: Nanos, expected: f64) -> bool {
    (seconds(found) - expected).abs() < 1e-6
}

#[test]
fn single_request_takes_its_prefill_then_its_steps() {
    let model = EngineModel::default();
    let recorder = run(&model, vec![live(&model, &[text(1, 2800)], 11, 0)]);
    let prefill = 0.002 + 0.1 + 1e-9 * 2800.0 * 2800.0 / 2.0;
    let first = recorder.first_tokens[0].at;
    assert!(close(first, prefill), "{first}");
    // Ten more tokens: the weights and a context of 2,800 tokens and more.
    let decode: f64 = (0..10).map(|step| 0.008 + 23e-9 * (2800.0 + f64::from(step))).sum();
    assert!(close(recorder.ended[0].0, prefill + decode), "{:?}", recorder.ended);
    assert_eq!(recorder.gaps, 10);
}

#[test]
fn repeated_prompt_is_computed_from_its_last_block_on() {
    let model = EngineModel::default();
    let repeat = |at| live(&model, &[text(1, 1600)], 1, at);
    let recorder = run(&model, vec![repeat(0), repeat(1_000_000_000)]);
    let cached: Vec<_> = recorder.first_tokens.iter().map(|token| token.cached_tokens).collect();
    assert_eq!(cached, [0, 1584]);
    // 16 tokens are computed, which takes less time than reading the weights.
    let second = recorder.first_tokens[1].at - 1_000_000_000;
    assert!(close(second, 0.008 + 1e-9 * (1600.0 * 1600.0 - 1584.0 * 1584.0) / 2.0), "{second}");
}

#[test]
fn image_is_encoded_unless_it_is_cached() {
    let model = EngineModel::default();
    let requests = vec![
        live(&model, &[image(1, 320), text(1, 10)], 1, 0),
        // All blocks of the image are cached: no embeddings are needed.
        live(&model, &[image(1, 320), text(2, 10)], 1, 1_000_000_000),
        // After another text the blocks can't be reused, but the embeddings can.
        live(&model, &[text(3, 20), image(1, 320), text(2, 10)], 1, 2_000_000_000),
        live(&model, &[text(3, 20), image(2, 320), text(2, 10)], 1, 3_000_000_000),
    ];
    let recorder = run(&model, requests);
    let found: Vec<(usize, u64)> =
        recorder.first_tokens.iter().map(|first| (first.cached_tokens, first.encoded)).collect();
    assert_eq!(found, [(0, 320), (320, 0), (0, 0), (16, 320)]);
}

#[test]
fn partly_cached_image_needs_all_its_embeddings() {
    let model = EngineModel { encoder_cache_tokens: 100, ..EngineModel::default() };
    // 321 embeddings: the last one is in a block with the question.
    let ask = |question, at| live(&model, &[image(1, 321), text(question, 40)], 1, at);
    let recorder = run(&model, vec![ask(1, 0), ask(2, 1_000_000_000)]);
    let second = &recorder.first_tokens[1];
    assert_eq!((second.cached_tokens, second.encoded), (320, 321));
}

#[test]
fn long_prompt_is_computed_in_chunks_beside_decoding() {
    let model = EngineModel { max_batched_tokens: 1000, ..EngineModel::default() };
    let requests =
        vec![live(&model, &[text(1, 100)], 100, 0), live(&model, &[text(2, 3500)], 1, 100_000_000)];
    let recorder = run(&model, requests);
    // Chunks of 999, 999, 999 and 503 tokens.
    let chunks: f64 =
        [999.0, 999.0, 999.0, 503.0].iter().map(|chunk| (chunk + 1.0) / 28_000.0 + 0.002).sum();
    let found = seconds(recorder.first_tokens[1].at - 100_000_000);
    let least = chunks + 1e-9 * 3500.0 * 3500.0 / 2.0;
    assert!((least..least + 0.009).contains(&found), "{found}, expected {least}");
    assert_eq!(recorder.gaps, 99);
}

#[test]
fn last_request_is_preempted_then_computed_again() {
    // 12 blocks of 16 tokens: both prompts take 4, both answers 3 more.
    let model = EngineModel { num_blocks: 12, ..EngineModel::default() };
    let recorder =
        run(&model, vec![live(&model, &[text(1, 64)], 49, 0), live(&model, &[text(2, 64)], 49, 0)]);
    // At 97 tokens both need a seventh block. The second request waits until the first has its
    // remaining 16 tokens, then for a prefill of 97 tokens without the six blocks that are still
    // cached.
    let ends: Vec<Nanos> = recorder.ended.iter().map(|(end, _)| *end).collect();
    assert!(
        recorder.longest_gap > 17 * 8_000_000 && recorder.longest_gap < 18 * 8_200_000,
        "{}",
        recorder.longest_gap
    );
    assert!(ends[1] > ends[0] + 15 * 8_000_000, "{ends:?}");
    assert_eq!(recorder.gaps, 96);
}

prop_compose! {
    /// A prompt (a shared text, an image unless `picture` is 0, a text of its own), an answer, and
    /// the time since the previous request.
    fn request()(
        start in 0u64..4,
        shared in 1u32..100,
        picture in 0u64..6,
        own in 1u32..60,
        answer in 1u32..80,
        after in 0u64..60_000_000,
    ) -> (u64, u32, u64, u32, u32, u64) {
        (start, shared, picture, own, answer, after)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// An index that is only fed with the events has the same overlaps as the engine for all
    /// sequences. Also, the engine loses no request and is never faster than its work.
    #[test]
    fn index_of_the_events_matches_the_engine(
        requests in prop::collection::vec(request(), 1..60),
        num_blocks in 20u32..120,
        max_batched_tokens in 40usize..400,
        max_running in 1usize..12,
        encoder_cache_tokens in 0u64..200,
    ) {
        let model = EngineModel {
            num_blocks,
            max_batched_tokens,
            max_running,
            encoder_cache_tokens,
            ..EngineModel::default()
        };
        let mut at = 0;
        let mut chains: Vec<Vec<BlockKey>> = Vec::new();
        let mut lives = Vec::new();
        for (start, shared, picture, own, answer, after) in requests {
            at += after;
            let mut prompt = vec![text(start, shared)];
            if picture > 0 {
                prompt.push(image(picture, 20 + 7 * picture as u32));
            }
            prompt.push(text(at, own));
            let live = live(&model, &prompt, answer, at);
            if Engine::fits(&model, &live.sequence) {
                chains.push(live.keys.clone());
                lives.push(live);
            }
        }
        let total = lives.len();
        let tokens: u64 = lives.iter().map(|live| live.sequence.answer() as u64 - 1).sum();
        let index = PrefixIndex::new();
        index.add_worker(WorkerId(0), model.block_size);
        let mut engine = Engine::new(model, None);
        let recorder = run_engine(&mut engine, lives, |_, events| {
            let batch = KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None };
            index.apply(WorkerId(0), &batch);
        });
        let rest = engine.executor.events.take();
        prop_assert!(rest.is_empty());
        for keys in &chains {
            let mut hits = Vec::new();
            let cache = engine.batch.cache();
            let hashes = keys.iter().copied().map(cache_events::block_hash);
            cache.find(hashes, keys.len() * 16, &mut hits);
            prop_assert_eq!(index.overlap(WorkerId(0), keys), hits.len());
        }
        prop_assert_eq!(index.stats(WorkerId(0)).unwrap().blocks, engine.distinct_blocks());
        let stats = index.stats(WorkerId(0)).unwrap();
        let faults = (stats.unkeyed_blocks, stats.unknown_removals, stats.ignored_events);
        prop_assert_eq!(faults, (0, 0, 0));

        prop_assert_eq!(recorder.first_tokens.len(), total);
        prop_assert_eq!((recorder.ended.len(), recorder.gaps), (total, tokens));
        prop_assert_eq!(engine.batch.cache().free(), num_blocks as usize);
        prop_assert_eq!((engine.batch.running().len(), engine.batch.waiting()), (0, 0));
        for first in recorder.first_tokens {
            prop_assert!(first.cached_tokens < first.prompt_tokens);
            let computed = first.prompt_tokens - first.cached_tokens;
            let least = computed as f64 * model.token + first.encoded as f64 * model.embed;
            prop_assert!(seconds(first.at - first.arrival) >= least);
        }
    }
}

/// Returns a prompt that is computed for another engine.
fn prefill(model: &EngineModel, number: u64, seed: u64) -> LiveRequest {
    LiveRequest { number, stage: Stage::Prefill, ..live(model, &[text(seed, 96)], 30, 0) }
}

#[test]
fn prompt_for_another_engine_holds_blocks_until_released() {
    // Room for one of the prompts, not for both.
    let model = EngineModel { num_blocks: 8, ..EngineModel::default() };
    let mut engine = Engine::new(model, None);
    let mut recorder = Recorder::default();
    engine.deliver(prefill(&model, 1, 1), 0);
    engine.deliver(prefill(&model, 2, 2), 0);
    let end = engine.next_wake().unwrap();
    engine.wake(end, &mut recorder);
    // One discarded token, and no answer.
    assert_eq!((recorder.first_tokens.len(), recorder.ended.len(), recorder.gaps), (0, 0, 0));
    assert_eq!(
        recorder.prefilled.iter().map(|(at, live)| (*at, live.number)).collect::<Vec<_>>(),
        [(end, 1)]
    );
    // The second prompt waits for the blocks of the first, without further steps.
    assert_eq!(
        (engine.batch.cache().free(), engine.batch.waiting(), engine.next_wake()),
        (2, 1, None)
    );
    engine.release_prompt(7, end + 1);
    assert_eq!(engine.next_wake(), None);
    engine.release_prompt(1, end + 2);
    assert_eq!(engine.next_wake(), Some(end + 2 + end));
    engine.wake(end + 2 + end, &mut recorder);
    engine.release_prompt(2, end + 2 + end);
    assert_eq!(
        (recorder.prefilled.len(), engine.batch.cache().free(), engine.next_wake()),
        (2, 8, None)
    );
}

#[test]
fn transferred_prompt_computes_only_its_last_token() {
    let model = EngineModel::default();
    let transferred = LiveRequest {
        stage: Stage::Decode,
        cached: 32,
        ..live(&model, &[image(1, 320), text(1, 1280)], 3, 0)
    };
    assert_eq!(Engine::new(model, None).missing_blocks(&transferred), 100);
    let mut engine = Engine::new(model, None);
    let recorder = run_engine(&mut engine, vec![transferred], |_, _| {});
    let first = &recorder.first_tokens[0];
    assert!(close(first.at, 0.008 + 1e-9 * 1599.5), "{}", first.at);
    // The number of cached tokens is still that of the other engine, and nothing is encoded.
    assert_eq!((first.prompt_tokens, first.cached_tokens, first.encoded), (1600, 32, 0));
    assert_eq!(recorder.gaps, 2);
    // The next request finds the transferred blocks.
    let next = live(&model, &[image(1, 320), text(1, 1280)], 3, 1);
    assert_eq!(engine.missing_blocks(&next), 1);
}
