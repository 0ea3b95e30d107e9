use std::collections::BTreeMap;
use std::convert::Infallible;
use std::hash::RandomState;

use super::*;
use proptest::prelude::*;

const BLOCK: usize = 4;

/// An engine that records all notifications.
#[derive(Default)]
struct RecordingEngine {
    /// The number of copies of each block that other requests can find.
    findable: BTreeMap<(u32, usize), usize>,
    /// The admitted requests, with the number of their cached tokens.
    admitted: Vec<(u32, usize)>,
    preempted: Vec<u32>,
    encoded: Vec<(u32, Range<usize>)>,
    /// The request for which `encode` returns `false`.
    refused: Option<u32>,
}

#[derive(Clone, Debug)]
struct Request {
    id: u32,
    /// The family: prompts of one family begin with the same tokens. All answers differ.
    family: u32,
    prompt: usize,
    len: usize,
    /// Tokens that another engine has computed.
    transferred: usize,
    retention_id: Option<u64>,
}

impl BatchEngine for RecordingEngine {
    type Request = Request;
    type Hash = (u32, usize);
    type Hasher = RandomState;
    type Error = Infallible;

    fn hash(request: &Request, block: usize) -> (u32, usize) {
        if (block + 1) * BLOCK <= request.prompt {
            (request.family, block)
        } else {
            (1000 + request.id, block)
        }
    }

    fn transferred_tokens(request: &Request) -> usize {
        request.transferred
    }

    fn retention_id(request: &Request) -> Option<u64> {
        request.retention_id
    }

    fn encode(
        &mut self,
        request: &mut Request,
        tokens: Range<usize>,
        _: bool,
    ) -> Result<bool, Infallible> {
        self.encoded.push((request.id, tokens));
        Ok(self.refused != Some(request.id))
    }

    fn on_admitted(&mut self, request: &mut Scheduled<Request>, cached: usize) {
        self.admitted.push((request.request.id, cached));
    }

    fn on_preempted(&mut self, request: &mut Request) {
        self.preempted.push(request.id);
    }

    fn on_stored(&mut self, request: &Request, blocks: Range<usize>) {
        for block in blocks {
            *self.findable.entry(Self::hash(request, block)).or_default() += 1;
        }
    }

    fn on_evicted(&mut self, hash: (u32, usize)) {
        let copies = self.findable.get_mut(&hash).expect("only stored blocks are evicted");
        *copies -= 1;
        if *copies == 0 {
            self.findable.remove(&hash);
        }
    }
}

/// A batch with the notifications of its engine.
struct Fixture {
    batch: Batch<RecordingEngine>,
    engine: RecordingEngine,
    next_id: u32,
}

impl Fixture {
    fn new(num_blocks: u32, max_running: usize, max_batched_tokens: usize) -> Self {
        let limits = BatchLimits { max_running, max_batched_tokens, max_model_len: 1000 };
        Self {
            batch: Batch::new(limits, num_blocks, BLOCK),
            engine: RecordingEngine::default(),
            next_id: 0,
        }
    }

    /// Adds a request. Ids count from 0.
    fn add(&mut self, family: u32, prompt: usize, answer: usize) {
        self.add_split(family, prompt, answer, 0, None);
    }

    /// Adds a request that is split between two engines.
    fn add_split(
        &mut self,
        family: u32,
        prompt: usize,
        answer: usize,
        transferred: usize,
        retention_id: Option<u64>,
    ) {
        let len = prompt + answer;
        let request = Request { id: self.next_id, family, prompt, len, transferred, retention_id };
        self.next_id += 1;
        self.batch.add(Scheduled::new(request, prompt, prompt));
    }

    /// Schedules a step. Returns the running requests with the tokens that each computes.
    fn schedule(&mut self) -> Vec<(u32, usize)> {
        let Ok(()) = self.batch.schedule(&mut self.engine);
        let running = self.batch.running().iter();
        running.map(|running| (running.request.id, running.step_tokens())).collect()
    }

    /// Ends the step. Returns the requests that have ended.
    fn advance(&mut self) -> Vec<u32> {
        let ended = self.batch.advance(|running| running.tokens() == running.request.len);
        ended.into_iter().map(|ended| ended.id).collect()
    }

    /// Makes a step. Returns the running requests with the tokens that each computes, and the
    /// requests that end.
    fn step(&mut self) -> (Vec<(u32, usize)>, Vec<u32>) {
        (self.schedule(), self.advance())
    }

    /// Makes as many steps at once as possible, at most `limit`. Returns their number and the
    /// requests that end.
    fn steps(&mut self, limit: usize) -> (usize, Vec<u32>) {
        self.schedule();
        let running = self.batch.running();
        let mut more = 0;
        if running.iter().all(Scheduled::is_decoding) {
            let remaining = running
                .iter()
                .map(|running| running.request.len - running.tokens())
                .min()
                .unwrap_or(1);
            more = self.batch.repeatable_steps((remaining - 1).min(limit - 1));
            self.batch.repeat(more, &mut self.engine);
        }
        (1 + more, self.advance())
    }

    /// Returns everything that can be observed.
    fn state(&self) -> impl PartialEq + std::fmt::Debug {
        let progress = |running: &Scheduled<Request>| {
            (running.request.id, running.tokens(), running.computed())
        };
        let running: Vec<_> = self.batch.running().iter().map(progress).collect();
        let notifications = (
            self.engine.findable.clone(),
            self.engine.admitted.clone(),
            self.engine.preempted.clone(),
        );
        (running, self.batch.waiting(), self.batch.cache().free(), notifications)
    }
}

#[test]
fn long_prompts_are_computed_in_chunks_beside_decoding() {
    let mut fixture = Fixture::new(100, 8, 10);
    fixture.add(1, 6, 3);
    fixture.add(2, 20, 2);
    let steps: Vec<_> = (0..4).map(|_| fixture.step()).collect();
    assert_eq!(steps[0], (vec![(0, 6), (1, 4)], vec![]));
    assert_eq!(steps[1], (vec![(0, 1), (1, 9)], vec![]));
    assert_eq!(steps[2], (vec![(0, 1), (1, 7)], vec![0]));
    assert_eq!(steps[3], (vec![(1, 1)], vec![1]));
    assert_eq!(fixture.batch.cache().free(), 100);
    // `encode` is not called for tokens after the end of the items.
    assert_eq!(fixture.engine.encoded, [(0, 0..6), (1, 0..4), (1, 4..13), (1, 13..20)]);
}

#[test]
fn transferred_prompt_computes_its_last_token_only() {
    let mut fixture = Fixture::new(100, 8, 100);
    fixture.add_split(1, 12, 3, 12, None);
    assert_eq!(fixture.step(), (vec![(0, 1)], vec![]));
    assert_eq!(fixture.engine.admitted, [(0, 11)]);
    assert_eq!(fixture.engine.findable.len(), 3);
    // Held blocks are not overwritten, and the next request finds the transferred blocks.
    fixture.add(1, 12, 1);
    fixture.add_split(1, 12, 1, 12, None);
    assert_eq!(fixture.step(), (vec![(0, 1), (1, 4), (2, 1)], vec![1, 2]));
}

#[test]
fn transferred_prompt_is_computed_after_preemption() {
    let mut fixture = Fixture::new(6, 8, 100);
    fixture.add(1, 12, 9);
    fixture.add_split(2, 11, 9, 11, None);
    assert_eq!(fixture.step(), (vec![(0, 12), (1, 1)], vec![]));
    while fixture.engine.preempted.is_empty() {
        fixture.step();
    }
    while fixture.engine.admitted.len() < 3 {
        fixture.step();
    }
    let (id, cached) = fixture.engine.admitted[2];
    assert!(id == 1 && cached < 11, "{cached}");
}

#[test]
fn retained_blocks_are_freed_when_they_are_released() {
    let mut fixture = Fixture::new(6, 8, 100);
    fixture.add_split(1, 12, 1, 0, Some(7));
    assert_eq!(fixture.step(), (vec![(0, 12)], vec![0]));
    assert_eq!(fixture.batch.cache().free(), 3);
    assert!(!fixture.batch.reset_cache());
    fixture.batch.release_retained(8);
    assert_eq!(fixture.batch.cache().free(), 3);
    fixture.batch.release_retained(7);
    assert_eq!(fixture.batch.cache().free(), 6);
}

#[test]
fn last_request_is_preempted_then_admitted_next() {
    let mut fixture = Fixture::new(6, 8, 100);
    fixture.add(1, 12, 9);
    fixture.add(2, 11, 9);
    assert_eq!(fixture.step(), (vec![(0, 12), (1, 11)], vec![]));
    // This prompt waits behind the one that will be preempted.
    fixture.add(3, 1, 1);
    // The first request takes a fourth block, so that none is left for the second one.
    assert_eq!(fixture.schedule(), [(0, 1)]);
    assert_eq!((&fixture.engine.preempted[..], fixture.batch.waiting()), (&[1][..], 2));
    // The next step may admit a request.
    assert_eq!(fixture.batch.repeatable_steps(5), 0);
    fixture.advance();
    let mut ended = Vec::new();
    while !fixture.batch.running().is_empty() || fixture.batch.waiting() > 0 {
        ended.extend(fixture.step().1);
    }
    assert_eq!(ended, [0, 2, 1]);
    // The first block of the preempted request was still cached; the first request had the others.
    assert_eq!(fixture.engine.admitted, [(0, 0), (1, 0), (1, 4), (2, 0)]);
}

#[test]
fn request_that_is_not_encoded_is_left_out() {
    let mut fixture = Fixture::new(100, 8, 10);
    fixture.add(1, 16, 1);
    fixture.add(2, 5, 1);
    fixture.step();
    fixture.engine.refused = Some(0);
    assert_eq!(fixture.step().0, [(0, 0), (1, 5)]);
    fixture.add(3, 5, 1);
    fixture.engine.refused = Some(2);
    assert_eq!(fixture.step().0, [(0, 6)]);
    assert_eq!(fixture.batch.waiting(), 1);
    assert_eq!(fixture.batch.remove(|request| request.id == 2).map(|request| request.id), Some(2));
    assert!(fixture.batch.remove(|request| request.id == 2).is_none());
}

prop_compose! {
    fn request()(family in 0u32..4, prompt in 1usize..40, answer in 1usize..30, after in 0usize..40)
        -> (u32, usize, usize, usize) {
        (family, prompt, answer, after)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Tokens, blocks and cache contents are the same whether steps run as one repetition or
    /// singly.
    #[test]
    fn repeated_steps_equal_single_steps(
        requests in prop::collection::vec(request(), 1..25),
        num_blocks in 18u32..60,
        max_running in 1usize..8,
        max_batched_tokens in 8usize..64,
    ) {
        let mut one = Fixture::new(num_blocks, max_running, max_batched_tokens);
        let mut many = Fixture::new(num_blocks, max_running, max_batched_tokens);
        let mut requests = requests.into_iter().peekable();
        let mut after = 0;
        let mut total = 0;
        while requests.peek().is_some()
            || many.batch.waiting() > 0
            || !many.batch.running().is_empty()
        {
            prop_assert!(total < 10_000, "the requests do not end");
            while let Some((family, prompt, answer, wait)) = requests.next_if(|_| after == 0) {
                one.add(family, prompt, answer);
                many.add(family, prompt, answer);
                after = wait;
            }
            let limit = if after == 0 { usize::MAX } else { after };
            let (steps, ended) = many.steps(limit);
            let ended_one_by_one: Vec<u32> = (0..steps).flat_map(|_| one.step().1).collect();
            prop_assert_eq!(ended, ended_one_by_one);
            prop_assert_eq!(many.state(), one.state());
            prop_assert!(many.batch.running().len() <= max_running);
            after = after.saturating_sub(steps);
            total += steps;
        }
        prop_assert_eq!(many.batch.cache().free(), num_blocks as usize);
    }
}
