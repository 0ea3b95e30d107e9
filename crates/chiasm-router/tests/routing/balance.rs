//! Who did much lately gets less, and not for ever.

use crate::workload::{INFO, Prompt};
use chiasm_router::{Clock, Decoding, Reservation, Router, RouterConfig, VirtualClock, Weights};
use chiasm_types::WorkerId;

/// Nanoseconds between two requests: one at a time, so that nothing waits or runs when the next one
/// comes.
const GAP: u64 = 20_000_000;

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

    /// The engine computes the prompt at once and tells of its blocks.
    fn ask(&mut self, prompt: &Prompt) -> WorkerId {
        let mut reservation = prompt.select(&self.router);
        self.router.apply(reservation.worker, &prompt.stored());
        reservation.first_token();
        self.pass(GAP);
        reservation.worker
    }

    /// Questions about one photo, all at the worker that got the first: until one goes elsewhere,
    /// or `most`.
    fn stays(&mut self, most: usize) -> usize {
        let first = self.ask(&Prompt::photo_question(1, 0));
        (1..most)
            .find(|question| self.ask(&Prompt::photo_question(1, *question as u32)) != first)
            .unwrap_or(most)
    }
}

#[test]
fn what_many_ask_for_is_copied_before_anybody_has_to_wait() {
    let at = |balance| Fleet::new(4, balance).stays(2000);
    // A question computes three of 67 blocks: 48 of 1,072.
    let (some, more) = (at(0.2), at(1.0));
    assert!((20..200).contains(&some), "copied at question {some}");
    assert!((2..some / 2).contains(&more), "copied at question {more} with more weight");
    assert_eq!(at(0.0), 2000, "without the weight never");
}

#[test]
fn copies_share_what_is_asked() {
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
fn what_was_done_is_forgotten() {
    let mut fleet = Fleet::new(4, 0.2);
    let copied_after = fleet.stays(2000);
    assert!(copied_after > 20);
    // Half as many each time, with a minute between: never enough at once.
    let mut fleet = Fleet::new(4, 0.2);
    for _ in 0..10 {
        assert_eq!(fleet.stays(copied_after / 2), copied_after / 2);
        fleet.pass(60_000_000_000);
    }
}

#[test]
fn a_conversation_does_not_drive_itself_away() {
    let mut fleet = Fleet::new(8, 0.2);
    // Each turn repeats the ones before it, 100 tokens longer; as fast as it can be computed.
    let first = fleet.ask(&Prompt::text(1, 2000));
    assert!((1..200).all(|turn| fleet.ask(&Prompt::text(1, 2000 + 100 * turn)) == first));
}

#[test]
fn a_new_worker_need_not_catch_up_with_the_others() {
    let mut fleet = Fleet::new(2, 0.2);
    let photo = |number: u32| Prompt::photo_question((number % 4) as u8, number);
    for number in 0..400 {
        fleet.ask(&photo(number));
    }
    fleet.router.add_worker(WorkerId(2), INFO);
    // It holds nothing of what is asked, and has no advantage that outweighs it.
    let given = (400..440).filter(|number| fleet.ask(&photo(*number)) == WorkerId(2)).count();
    assert!(given <= 4, "{given} of 40");
}

#[test]
fn a_request_that_failed_was_no_work() {
    let mut fleet = Fleet::new(2, 0.2);
    let photo = Prompt::photo_question(1, 1);
    let holder = fleet.ask(&photo);
    for _ in 0..2000 {
        // Its questions end without a token.
        let failed: Reservation = photo.select(&fleet.router);
        assert_eq!(failed.worker, holder);
        fleet.pass(1_000_000);
    }
}

#[test]
fn answering_is_work() {
    let weights = Weights { load: 0.0, balance: 1.0, ..Weights::default() };
    let mut fleet = Fleet::weighted(2, weights);
    // Both compute the same; one answers for ten seconds, the other not at all.
    let prompt = Prompt::text(1, 160);
    let mut long = prompt.select(&fleet.router);
    let mut short = prompt.select_but(&fleet.router, &[long.worker]).unwrap();
    long.first_token();
    short.first_token();
    let busy = long.worker;
    drop(short);
    fleet.pass(10_000_000_000);
    let text = |number| Prompt::text(number, 160);
    assert!((10..20).all(|number| text(number).select(&fleet.router).worker != busy));
    drop(long);
    fleet.pass(120_000_000_000);
    assert!((20..40).any(|number| fleet.ask(&text(number)) == busy), "long ago");
}

#[test]
fn how_much_work_answering_is_depends_on_the_engine() {
    let stays = |decoding| {
        let weights = Weights { load: 0.0, balance: 1.0, ..Weights::default() };
        let mut fleet =
            Fleet::configured(2, RouterConfig { weights, decoding, ..Default::default() });
        // One answers for ten seconds; then the same prompt comes again, which costs the other 100
        // blocks: 1,600.
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
