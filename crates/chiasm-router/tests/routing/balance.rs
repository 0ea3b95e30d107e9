//! Tests of recent work: a worker that did more than the others gets less, for a while.

use crate::workload::{INFO, Prompt};
use chiasm_router::{Clock, Decoding, Reservation, Router, RouterConfig, VirtualClock, Weights};
use chiasm_types::WorkerId;

/// The time between two requests. They run one at a time, so that nothing waits or runs when the
/// next one comes.
const GAP_NANOSECONDS: u64 = 20_000_000;

struct Fleet {
    router: Router,
    clock: VirtualClock,
    now: u64,
}

impl Fleet {
    fn new(workers: u32, balance: f64) -> Self {
        Self::weighted(workers, Weights { balance, ..Weights::default() })
    }

    fn weighted(workers: u32, weights: Weights) -> Self {
        Self::configured(workers, RouterConfig { weights, ..Default::default() })
    }

    fn configured(workers: u32, config: RouterConfig) -> Self {
        let clock = VirtualClock::default();
        let config = RouterConfig { seed: Some(42), ..config };
        let router = Router::with_clock(config, Clock::Virtual(clock.clone()));
        (0..workers).for_each(|id| router.add_worker(WorkerId(id), INFO));
        Self { router, clock, now: 0 }
    }

    fn pass(&mut self, nanoseconds: u64) {
        self.now += nanoseconds;
        self.clock.set(self.now);
    }

    /// Sends a prompt to a worker, whose engine computes it at once and publishes its blocks.
    fn ask(&mut self, prompt: &Prompt) -> WorkerId {
        let mut reservation = prompt.select(&self.router);
        self.router.apply(reservation.worker, &prompt.stored());
        reservation.first_token();
        self.pass(GAP_NANOSECONDS);
        reservation.worker
    }

    /// Asks up to `limit` questions about one photo. Returns the number of the first question that
    /// does not go to the same worker as the first one, or `limit`.
    fn questions_before_copy(&mut self, limit: usize) -> usize {
        let first = self.ask(&Prompt::photo_question(1, 0));
        (1..limit)
            .find(|question| self.ask(&Prompt::photo_question(1, *question as u32)) != first)
            .unwrap_or(limit)
    }
}

#[test]
fn popular_image_is_copied_before_requests_wait() {
    let copied_at = |balance| Fleet::new(4, balance).questions_before_copy(2000);
    // A question computes three of 67 blocks: 48 of 1,072.
    let low = copied_at(0.2);
    assert!((20..200).contains(&low), "copied at question {low}");
    let high = copied_at(1.0);
    assert!((2..low / 2).contains(&high), "copied at question {high} with a higher weight");
    assert_eq!(copied_at(0.0), 2000, "never without the weight");
}

#[test]
fn copies_share_the_requests_evenly() {
    let mut fleet = Fleet::new(4, 0.2);
    let mut counts = [0_u32; 4];
    for question in 0..2000 {
        counts[fleet.ask(&Prompt::photo_question(1, question)).0 as usize] += 1;
    }
    let copies: Vec<u32> = counts.into_iter().filter(|count| *count > 0).collect();
    let even = 2000 / copies.len() as u32;
    assert!(
        copies.len() >= 2 && copies.iter().all(|count| count.abs_diff(even) < even / 4),
        "{counts:?}"
    );
}

#[test]
fn past_work_decays() {
    let mut fleet = Fleet::new(4, 0.2);
    let copied_after = fleet.questions_before_copy(2000);
    assert!(copied_after > 20);
    // Half as many each time, with a minute between: never enough for a copy.
    let mut fleet = Fleet::new(4, 0.2);
    for _ in 0..10 {
        assert_eq!(fleet.questions_before_copy(copied_after / 2), copied_after / 2);
        fleet.pass(60_000_000_000);
    }
}

#[test]
fn conversation_stays_on_its_worker() {
    let mut fleet = Fleet::new(8, 0.2);
    // Each turn repeats the previous ones and adds 100 tokens, as fast as it can be computed.
    let first = fleet.ask(&Prompt::text(1, 2000));
    assert!((1..200).all(|turn| fleet.ask(&Prompt::text(1, 2000 + 100 * turn)) == first));
}

#[test]
fn new_worker_starts_with_the_mean_recent_work() {
    let mut fleet = Fleet::new(2, 0.2);
    let photo = |number: u32| Prompt::photo_question((number % 4) as u8, number);
    for number in 0..400 {
        fleet.ask(&photo(number));
    }
    fleet.router.add_worker(WorkerId(2), INFO);
    // The new worker holds none of the photos, and no lack of recent work outweighs that.
    let count = (400..440).filter(|number| fleet.ask(&photo(*number)) == WorkerId(2)).count();
    assert!(count <= 4, "{count} of 40");
}

#[test]
fn failed_request_adds_no_recent_work() {
    let mut fleet = Fleet::new(2, 0.2);
    let photo = Prompt::photo_question(1, 1);
    let holder = fleet.ask(&photo);
    for _ in 0..2000 {
        // The request ends without a token.
        let failed: Reservation = photo.select(&fleet.router);
        assert_eq!(failed.worker, holder);
        fleet.pass(1_000_000);
    }
}

#[test]
fn answering_adds_recent_work() {
    let weights = Weights { load: 0.0, balance: 1.0, ..Weights::default() };
    let mut fleet = Fleet::weighted(2, weights);
    // Both workers compute the same prompt. One answers for ten seconds, the other not at all.
    let prompt = Prompt::text(1, 160);
    let mut long = prompt.select(&fleet.router);
    let mut short = prompt.select_excluding(&fleet.router, &[long.worker]).unwrap();
    long.first_token();
    short.first_token();
    let busy = long.worker;
    drop(short);
    fleet.pass(10_000_000_000);
    let text = |number| Prompt::text(number, 160);
    assert!((10..20).all(|number| text(number).select(&fleet.router).worker != busy));
    drop(long);
    fleet.pass(120_000_000_000);
    assert!((20..40).any(|number| fleet.ask(&text(number)) == busy), "the work has decayed");
}

#[test]
fn work_of_answering_depends_on_the_decoding_settings() {
    let stays = |decoding| {
        let weights = Weights { load: 0.0, balance: 1.0, ..Weights::default() };
        let mut fleet =
            Fleet::configured(2, RouterConfig { weights, decoding, ..Default::default() });
        // One worker answers for ten seconds. Then the same prompt comes again, which would cost
        // the other worker 100 blocks: 1,600.
        let prompt = Prompt::text(1, 1600);
        let mut answering = prompt.select(&fleet.router);
        fleet.router.apply(answering.worker, &prompt.stored());
        answering.first_token();
        fleet.pass(10_000_000_000);
        prompt.select(&fleet.router).worker == answering.worker
    };
    let default = Decoding::default();
    assert!(stays(default));
    assert!(!stays(Decoding { steps_per_second: 1000.0, ..default }));
    assert!(!stays(Decoding { read_per_block: 0.01, ..default }));
}
