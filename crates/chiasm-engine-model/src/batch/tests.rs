use std::collections::BTreeMap;
use std::convert::Infallible;
use std::hash::RandomState;

use super::*;
use proptest::prelude::*;

const BLOCK: usize = 4;

/// Notes all that it is told.
#[derive(Default)]
struct Notes {
    /// Number of copies of each block that others can find.
    findable: BTreeMap<(u32, usize), usize>,
    /// Requests, and how many of their tokens were found.
    admitted: Vec<(u32, usize)>,
    preempted: Vec<u32>,
    encoded: Vec<(u32, Range<usize>)>,
    /// A request that can't be encoded.
    refused: Option<u32>,
}

#[derive(Clone, Debug)]
struct Request {
    id: u32,
    /// Prompts of one family begin with the same tokens; no two answers do.
    family: u32,
    prompt: usize,
    len: usize,
    /// Tokens that another engine has computed.
    given: usize,
    kept_as: Option<u64>,
}

impl BatchEngine for Notes {
    type Request = Request;
    type Hash = (u32, usize);
    type Hasher = RandomState;
    type Error = Infallible;

    fn hash(request: &Request, block: usize) -> (u32, usize) {
        match (block + 1) * BLOCK <= request.prompt {
            true => (request.family, block),
            false => (1000 + request.id, block),
        }
    }

    fn given(request: &Request) -> usize {
        request.given
    }

    fn kept_as(request: &Request) -> Option<u64> {
        request.kept_as
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

    fn admitted(&mut self, request: &mut Scheduled<Request>, cached: usize) {
        self.admitted.push((request.request.id, cached));
    }

    fn preempted(&mut self, request: &mut Request) {
        self.preempted.push(request.id);
    }

    fn stored(&mut self, request: &Request, blocks: Range<usize>) {
        for block in blocks {
            *self.findable.entry(Self::hash(request, block)).or_default() += 1;
        }
    }

    fn evicted(&mut self, hash: (u32, usize)) {
        let copies = self.findable.get_mut(&hash).expect("only what was stored is evicted");
        *copies -= 1;
        if *copies == 0 {
            self.findable.remove(&hash);
        }
    }
}

/// A batch, and what it told.
struct Bench {
    batch: Batch<Notes>,
    notes: Notes,
    next: u32,
}

impl Bench {
    fn new(num_blocks: u32, max_running: usize, max_batched_tokens: usize) -> Self {
        let limits = BatchLimits { max_running, max_batched_tokens, max_model_len: 1000 };
        Self { batch: Batch::new(limits, num_blocks, BLOCK), notes: Notes::default(), next: 0 }
    }

    /// Its id is the number of requests before it.
    fn add(&mut self, family: u32, prompt: usize, answer: usize) {
        self.add_handed(family, prompt, answer, 0, None);
    }

    /// A request that is handed from one engine to another.
    fn add_handed(
        &mut self,
        family: u32,
        prompt: usize,
        answer: usize,
        given: usize,
        kept_as: Option<u64>,
    ) {
        let request =
            Request { id: self.next, family, prompt, len: prompt + answer, given, kept_as };
        self.next += 1;
        self.batch.add(Scheduled::new(request, prompt, prompt));
    }

    fn schedule(&mut self) -> Vec<(u32, usize)> {
        let Ok(()) = self.batch.schedule(&mut self.notes);
        self.batch.running().iter().map(|running| (running.request.id, running.step())).collect()
    }

    fn advance(&mut self) -> Vec<u32> {
        let ended = self.batch.advance(|running| running.tokens() == running.request.len);
        ended.into_iter().map(|ended| ended.id).collect()
    }

    /// Tokens that each running request computes in a step, and who ends with it.
    fn step(&mut self) -> (Vec<(u32, usize)>, Vec<u32>) {
        (self.schedule(), self.advance())
    }

    /// Makes as many steps in one go as there can be, at most `most`. Returns their number and who
    /// ended.
    fn steps(&mut self, most: usize) -> (usize, Vec<u32>) {
        self.schedule();
        let running = self.batch.running();
        let mut more = 0;
        if running.iter().all(Scheduled::decodes) {
            let to_go = running
                .iter()
                .map(|running| running.request.len - running.tokens())
                .min()
                .unwrap_or(1);
            more = self.batch.repeatable((to_go - 1).min(most - 1));
            self.batch.repeat(more, &mut self.notes);
        }
        (1 + more, self.advance())
    }

    /// All that can be seen of it.
    fn state(&self) -> impl PartialEq + std::fmt::Debug {
        let progress = |running: &Scheduled<Request>| {
            (running.request.id, running.tokens(), running.computed())
        };
        let running: Vec<_> = self.batch.running().iter().map(progress).collect();
        let told = (
            self.notes.findable.clone(),
            self.notes.admitted.clone(),
            self.notes.preempted.clone(),
        );
        (running, self.batch.waiting(), self.batch.cache().free(), told)
    }
}

#[test]
fn long_prompts_are_computed_in_chunks_beside_those_who_decode() {
    let mut bench = Bench::new(100, 8, 10);
    bench.add(1, 6, 3);
    bench.add(2, 20, 2);
    let steps: Vec<_> = (0..4).map(|_| bench.step()).collect();
    assert_eq!(steps[0], (vec![(0, 6), (1, 4)], vec![]));
    assert_eq!(steps[1], (vec![(0, 1), (1, 9)], vec![]));
    assert_eq!(steps[2], (vec![(0, 1), (1, 7)], vec![0]));
    assert_eq!(steps[3], (vec![(1, 1)], vec![1]));
    assert_eq!(bench.batch.cache().free(), 100);
    // From the end of its items on, nothing of a request is encoded.
    assert_eq!(bench.notes.encoded, [(0, 0..6), (1, 0..4), (1, 4..13), (1, 13..20)]);
}

#[test]
fn of_a_prompt_that_is_given_the_last_token_is_computed_and_others_find_the_rest() {
    let mut bench = Bench::new(100, 8, 100);
    bench.add_handed(1, 12, 3, 12, None);
    assert_eq!(bench.step(), (vec![(0, 1)], vec![]));
    assert_eq!(bench.notes.admitted, [(0, 11)]);
    assert_eq!(bench.notes.findable.len(), 3);
    // What is here already is not overwritten, and what was given to one is found by the next.
    bench.add(1, 12, 1);
    bench.add_handed(1, 12, 1, 12, None);
    assert_eq!(bench.step(), (vec![(0, 1), (1, 4), (2, 1)], vec![1, 2]));
}

#[test]
fn a_prompt_that_is_given_is_computed_after_its_blocks_were_given_back() {
    let mut bench = Bench::new(6, 8, 100);
    bench.add(1, 12, 9);
    bench.add_handed(2, 11, 9, 11, None);
    assert_eq!(bench.step(), (vec![(0, 12), (1, 1)], vec![]));
    while bench.notes.preempted.is_empty() {
        bench.step();
    }
    while bench.notes.admitted.len() < 3 {
        bench.step();
    }
    let (id, cached) = bench.notes.admitted[2];
    assert!(id == 1 && cached < 11, "{cached}");
}

#[test]
fn blocks_that_are_kept_are_given_back_when_they_are_let_go_of() {
    let mut bench = Bench::new(6, 8, 100);
    bench.add_handed(1, 12, 1, 0, Some(7));
    assert_eq!(bench.step(), (vec![(0, 12)], vec![0]));
    assert_eq!(bench.batch.cache().free(), 3);
    assert!(!bench.batch.reset_cache());
    bench.batch.let_go(8);
    assert_eq!(bench.batch.cache().free(), 3);
    bench.batch.let_go(7);
    assert_eq!(bench.batch.cache().free(), 6);
}

#[test]
fn the_request_that_came_last_makes_room_and_is_next() {
    let mut bench = Bench::new(6, 8, 100);
    bench.add(1, 12, 9);
    bench.add(2, 11, 9);
    assert_eq!(bench.step(), (vec![(0, 12), (1, 11)], vec![]));
    // A prompt waits behind the one that has to wait again.
    bench.add(3, 1, 1);
    // The first takes a fourth block, and the second has none for its fourth later.
    assert_eq!(bench.schedule(), [(0, 1)]);
    assert_eq!((&bench.notes.preempted[..], bench.batch.waiting()), (&[1][..], 2));
    // The next step may admit somebody.
    assert_eq!(bench.batch.repeatable(5), 0);
    bench.advance();
    let mut ended = Vec::new();
    while !bench.batch.running().is_empty() || bench.batch.waiting() > 0 {
        ended.extend(bench.step().1);
    }
    assert_eq!(ended, [0, 2, 1]);
    // Its first block was found again; the others had been given to the first.
    assert_eq!(bench.notes.admitted, [(0, 0), (1, 0), (1, 4), (2, 0)]);
}

#[test]
fn who_cannot_be_encoded_is_left_as_it_is() {
    let mut bench = Bench::new(100, 8, 10);
    bench.add(1, 16, 1);
    bench.add(2, 5, 1);
    bench.step();
    bench.notes.refused = Some(0);
    assert_eq!(bench.step().0, [(0, 0), (1, 5)]);
    bench.add(3, 5, 1);
    bench.notes.refused = Some(2);
    assert_eq!(bench.step().0, [(0, 6)]);
    assert_eq!(bench.batch.waiting(), 1);
    assert_eq!(bench.batch.remove(|request| request.id == 2).map(|request| request.id), Some(2));
    assert!(bench.batch.remove(|request| request.id == 2).is_none());
}

prop_compose! {
    fn request()(family in 0u32..4, prompt in 1usize..40, answer in 1usize..30, after in 0usize..40)
        -> (u32, usize, usize, usize) {
        (family, prompt, answer, after)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// However many steps are made in one go: tokens, blocks and what can be found are those of one
    /// after the other.
    #[test]
    fn steps_in_one_go_are_steps(
        requests in prop::collection::vec(request(), 1..25),
        num_blocks in 18u32..60,
        max_running in 1usize..8,
        max_batched_tokens in 8usize..64,
    ) {
        let mut one = Bench::new(num_blocks, max_running, max_batched_tokens);
        let mut many = Bench::new(num_blocks, max_running, max_batched_tokens);
        let mut requests = requests.into_iter().peekable();
        let (mut after, mut total) = (0, 0);
        while requests.peek().is_some() || many.batch.waiting() > 0 || !many.batch.running().is_empty() {
            prop_assert!(total < 10_000, "it goes on for ever");
            while let Some((family, prompt, answer, wait)) = requests.next_if(|_| after == 0) {
                one.add(family, prompt, answer);
                many.add(family, prompt, answer);
                after = wait;
            }
            let most = if after == 0 { usize::MAX } else { after };
            let (steps, ended) = many.steps(most);
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
