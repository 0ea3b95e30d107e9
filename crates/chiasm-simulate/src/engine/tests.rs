use chiasm_kv::event::KvEventBatch;
use chiasm_kv::{BlockKey, PrefixIndex};
use chiasm_types::WorkerId;
use proptest::prelude::*;

use super::*;
use crate::sequence::{Image, Piece, Sequence};
use crate::virtual_time::seconds;

/// Notes all that it is told.
#[derive(Default)]
struct Notes {
    /// Arrival, time of the first token, prompt tokens, of them cached, embeddings made.
    first: Vec<(Nanos, Nanos, usize, usize, u64)>,
    ended: Vec<(Nanos, usize)>,
    prefilled: Vec<(Nanos, Live)>,
    gaps: u64,
    longest_gap: Nanos,
}

impl Observer for Notes {
    fn first_token(&mut self, live: &mut Live, now: Nanos) {
        self.first.push((live.arrival, now, live.sequence.prompt(), live.cached, live.encoded));
    }

    fn prefilled(&mut self, live: Live, now: Nanos) {
        self.prefilled.push((now, live));
    }

    fn finished(&mut self, live: Live, now: Nanos) {
        self.ended.push((now, live.sequence.answer()));
    }

    fn gaps(&mut self, gap: Nanos, tokens: u64, _: Nanos) {
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

fn live(model: &EngineModel, prompt: &[Piece], answer: u32, at: Nanos) -> Live {
    let sequence = Sequence::new(prompt, text(9_000_000 + at, answer));
    let keys = sequence.keys(model.block_size);
    Live::new(0, sequence, keys, at, true)
}

/// Delivers requests at their times and plays to the end. Calls `published` with what the engine
/// publishes.
fn play(
    engine: &mut Engine,
    requests: Vec<Live>,
    mut published: impl FnMut(&Engine, Vec<KvEvent>),
) -> Notes {
    let mut notes = Notes::default();
    for live in requests {
        let at = live.arrival;
        while let Some(wake) = engine.next_wake().filter(|wake| *wake <= at) {
            let events = engine.wake(wake, &mut notes);
            published(engine, events);
        }
        engine.deliver(live, at);
    }
    while let Some(wake) = engine.next_wake() {
        let events = engine.wake(wake, &mut notes);
        published(engine, events);
    }
    notes
}

fn run(model: &EngineModel, requests: Vec<Live>) -> Notes {
    play(&mut Engine::new(*model, None), requests, |_, _| {})
}

fn close(found: Nanos, expected: f64) -> bool {
    (seconds(found) - expected).abs() < 1e-6
}

#[test]
fn a_request_alone_takes_its_prefill_and_its_steps() {
    let model = EngineModel::default();
    let notes = run(&model, vec![live(&model, &[text(1, 2800)], 11, 0)]);
    let prefill = 0.002 + 0.1 + 1e-9 * 2800.0 * 2800.0 / 2.0;
    let (_, first, ..) = notes.first[0];
    assert!(close(first, prefill), "{first}");
    // Ten more tokens: the weights and a context of 2,800 tokens and more.
    let decode: f64 = (0..10).map(|step| 0.008 + 23e-9 * (2800.0 + f64::from(step))).sum();
    assert!(close(notes.ended[0].0, prefill + decode), "{:?}", notes.ended);
    assert_eq!(notes.gaps, 10);
}

#[test]
fn a_repeated_prompt_is_computed_from_its_last_token_on() {
    let model = EngineModel::default();
    let repeat = |at| live(&model, &[text(1, 1600)], 1, at);
    let notes = run(&model, vec![repeat(0), repeat(1_000_000_000)]);
    let cached: Vec<usize> = notes.first.iter().map(|(.., cached, _)| *cached).collect();
    assert_eq!(cached, [0, 1584]);
    // 16 tokens: reading the weights takes longer.
    let second = notes.first[1].1 - 1_000_000_000;
    assert!(close(second, 0.008 + 1e-9 * (1600.0 * 1600.0 - 1584.0 * 1584.0) / 2.0), "{second}");
}

#[test]
fn an_image_is_encoded_unless_it_is_in_a_cache() {
    let model = EngineModel::default();
    let requests = vec![
        live(&model, &[image(1, 320), text(1, 10)], 1, 0),
        // All blocks of the image are cached: neither cache of embeddings nor encoder is asked.
        live(&model, &[image(1, 320), text(2, 10)], 1, 1_000_000_000),
        // After other text its blocks are no use, its embeddings are.
        live(&model, &[text(3, 20), image(1, 320), text(2, 10)], 1, 2_000_000_000),
        live(&model, &[text(3, 20), image(2, 320), text(2, 10)], 1, 3_000_000_000),
    ];
    let notes = run(&model, requests.into_iter().collect());
    let found: Vec<(usize, u64)> =
        notes.first.iter().map(|(.., cached, encoded)| (*cached, *encoded)).collect();
    assert_eq!(found, [(0, 320), (320, 0), (0, 0), (16, 320)]);
}

#[test]
fn an_image_that_is_partly_cached_needs_all_its_embeddings() {
    let model = EngineModel { encoder_cache_tokens: 100, ..EngineModel::default() };
    // 321 embeddings: the last is in a block with the question.
    let ask = |question, at| live(&model, &[image(1, 321), text(question, 40)], 1, at);
    let notes = run(&model, vec![ask(1, 0), ask(2, 1_000_000_000)]);
    assert_eq!((notes.first[1].3, notes.first[1].4), (320, 321));
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_those_who_decode() {
    let model = EngineModel { max_batched_tokens: 1000, ..EngineModel::default() };
    let requests =
        vec![live(&model, &[text(1, 100)], 100, 0), live(&model, &[text(2, 3500)], 1, 100_000_000)];
    let notes = run(&model, requests);
    // Chunks of 999, 999, 999 and 503 tokens.
    let chunks: f64 =
        [999.0, 999.0, 999.0, 503.0].iter().map(|chunk| (chunk + 1.0) / 28_000.0 + 0.002).sum();
    let alone = seconds(notes.first[1].1 - 100_000_000);
    let (pairs, rest) = (1e-9 * 3500.0 * 3500.0 / 2.0, 0.009);
    assert!((chunks + pairs..chunks + pairs + rest).contains(&alone), "{alone} after {chunks}");
    assert_eq!(notes.gaps, 99);
}

#[test]
fn who_came_last_makes_room_and_is_computed_again() {
    // 12 blocks of 16 tokens: both prompts take 4, both answers 3 more.
    let model = EngineModel { num_blocks: 12, ..EngineModel::default() };
    let notes =
        run(&model, vec![live(&model, &[text(1, 64)], 49, 0), live(&model, &[text(2, 64)], 49, 0)]);
    // At 97 tokens both want a seventh block. The second waits until the first has its other 16
    // tokens, and then for a prefill of 97 tokens without the six blocks that are still there.
    let ends: Vec<Nanos> = notes.ended.iter().map(|(end, _)| *end).collect();
    assert!(
        notes.longest_gap > 17 * 8_000_000 && notes.longest_gap < 18 * 8_200_000,
        "{}",
        notes.longest_gap
    );
    assert!(ends[1] > ends[0] + 15 * 8_000_000, "{ends:?}");
    assert_eq!(notes.gaps, 96);
}

prop_compose! {
    /// A prompt's beginning, an image or none, an own text, an answer, and how long after the one
    /// before.
    fn request()(start in 0u64..4, shared in 1u32..100, picture in 0u64..6, own in 1u32..60, answer in 1u32..80, after in 0u64..60_000_000)
        -> (u64, u32, u64, u32, u32, u64) {
        (start, shared, picture, own, answer, after)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The index, fed with nothing but the events, says of every sequence that ever was how much of
    /// it the engine has. And the engine loses no request and is never faster than the work takes.
    #[test]
    fn events_tell_what_the_engine_holds(
        requests in prop::collection::vec(request(), 1..60),
        num_blocks in 20u32..120,
        max_batched_tokens in 40usize..400,
        max_running in 1usize..12,
        encoder_cache_tokens in 0u64..200,
    ) {
        let model =
            EngineModel { num_blocks, max_batched_tokens, max_running, encoder_cache_tokens, ..EngineModel::default() };
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
        let notes = play(&mut engine, lives, |_, events| {
            index.apply(WorkerId(0), &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None });
        });
        let rest = engine.surroundings.events.take();
        prop_assert!(rest.is_empty());
        for keys in &chains {
            let mut hits = Vec::new();
            let cache = engine.batch.cache();
            cache.find(keys.iter().copied().map(cache_events::hash), keys.len() * 16, &mut hits);
            let held = hits.len();
            prop_assert_eq!(index.overlap(WorkerId(0), keys), held);
        }
        prop_assert_eq!(index.stats(WorkerId(0)).unwrap().blocks, engine.distinct_blocks());
        let stats = index.stats(WorkerId(0)).unwrap();
        prop_assert_eq!((stats.unkeyed_blocks, stats.unknown_removals, stats.ignored_events), (0, 0, 0));

        prop_assert_eq!((notes.first.len(), notes.ended.len(), notes.gaps), (total, total, tokens));
        prop_assert_eq!(engine.batch.cache().free(), num_blocks as usize);
        prop_assert_eq!((engine.batch.running().len(), engine.batch.waiting()), (0, 0));
        for (arrival, first, prompt, cached, encoded) in notes.first {
            prop_assert!(cached < prompt);
            let least = (prompt - cached) as f64 * model.token + encoded as f64 * model.embed;
            prop_assert!(seconds(first - arrival) >= least);
        }
    }
}

/// A prompt that is computed for another engine.
fn prefill(model: &EngineModel, number: u64, seed: u64) -> Live {
    Live { number, stage: Stage::Prefill, ..live(model, &[text(seed, 96)], 30, 0) }
}

#[test]
fn a_prompt_for_another_engine_keeps_its_blocks_and_is_let_go_of() {
    // Room for one such prompt, not for two.
    let model = EngineModel { num_blocks: 8, ..EngineModel::default() };
    let (mut engine, mut notes) = (Engine::new(model, None), Notes::default());
    engine.deliver(prefill(&model, 1, 1), 0);
    engine.deliver(prefill(&model, 2, 2), 0);
    let end = engine.next_wake().unwrap();
    engine.wake(end, &mut notes);
    // One token that nobody sees, and no answer.
    assert_eq!((notes.first.len(), notes.ended.len(), notes.gaps), (0, 0, 0));
    assert_eq!(
        notes.prefilled.iter().map(|(at, live)| (*at, live.number)).collect::<Vec<_>>(),
        [(end, 1)]
    );
    // The second one waits for the first one's blocks, without being asked again and again.
    assert_eq!(
        (engine.batch.cache().free(), engine.batch.waiting(), engine.next_wake()),
        (2, 1, None)
    );
    engine.let_go(7, end + 1);
    assert_eq!(engine.next_wake(), None);
    engine.let_go(1, end + 2);
    assert_eq!(engine.next_wake(), Some(end + 2 + end));
    engine.wake(end + 2 + end, &mut notes);
    engine.let_go(2, end + 2 + end);
    assert_eq!(
        (notes.prefilled.len(), engine.batch.cache().free(), engine.next_wake()),
        (2, 8, None)
    );
}

#[test]
fn an_engine_that_is_given_a_prompt_computes_its_last_token() {
    let model = EngineModel::default();
    let given = Live {
        stage: Stage::Decode,
        cached: 32,
        ..live(&model, &[image(1, 320), text(1, 1280)], 3, 0)
    };
    assert_eq!(Engine::new(model, None).lacks(&given), 100);
    let mut engine = Engine::new(model, None);
    let notes = play(&mut engine, vec![given], |_, _| {});
    let (_, first, prompt, cached, encoded) = notes.first[0];
    assert!(close(first, 0.008 + 1e-9 * 1599.5), "{first}");
    // What was found elsewhere stays what was found, and nothing is encoded.
    assert_eq!((prompt, cached, encoded, notes.gaps), (1600, 32, 0, 2));
    // The next one finds what the first was given.
    let next = live(&model, &[image(1, 320), text(1, 1280)], 3, 1);
    assert_eq!(engine.lacks(&next), 1);
}
