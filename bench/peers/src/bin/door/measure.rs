//! First whether all sides understand the same, then what each costs: case by case, side by side,
//! round by round.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::RangeInclusive;
use std::time::Duration;

use peers::numbers::{median, quantile};

use crate::client::Connection;
use crate::load::{self, Outcome};
use crate::ours::BASELINE;
use crate::print;
use crate::side::Side;
use crate::workload::{Case, PROMPT_TOKENS, Workload};

/// Requests by which text prompts are made as long as they should be.
const COUNTED: usize = 20;
/// Time for which [`WARM_UP_CLIENTS`] ask a side before it is measured.
const WARM_UP: Duration = Duration::from_secs(1);
const WARM_UP_CLIENTS: usize = 16;
/// Distinct images go twice around our shared memory, which has no room for more than 300 when
/// there are three engines: a side that has run for a while uses memory that was used before. Sides
/// that are slow are not waited for so long; they have none.
const WARM_UP_IMAGES: usize = 600;
const WARM_UP_AT_MOST: u32 = 15;

/// What was measured in all rounds so far: by the number of the case, the clients and the number of
/// the side.
pub(crate) type Outcomes = BTreeMap<(usize, usize, usize), Vec<Outcome>>;
/// The prompt tokens to expect, by the numbers of the side and of the case.
pub(crate) type Expected = BTreeMap<(usize, usize), RangeInclusive<u64>>;

/// The cases to ask for, each with numbers of clients that ask at once.
pub(crate) type Cases<'a> = [(Case, &'a [usize])];

/// Makes text prompts as long as they should be, by the count of the first side.
async fn calibrate(side: &Side, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
    let mut connection = Connection::open(side.address).await?;
    let mut tokens = 0;
    for _ in 0..COUNTED {
        let body = workload.borrow_mut().next(Case::Text, &side.url);
        tokens += connection.chat(body).await?.usage.prompt_tokens;
    }
    let mut workload = workload.borrow_mut();
    let words = workload.length() as u64 * COUNTED as u64 * PROMPT_TOKENS / tokens.max(1);
    workload.set_length(usize::try_from(words)?);
    Ok(())
}

/// Sends the same requests to all sides; what they count has to be what the first counts, where
/// they count alike. Prints how many were compared, and how many differ.
async fn compare(sides: &[Side], case: Case, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
    let counts_alike = |side: &Side| side.takes(case) && side.counts_alike(case);
    let compared = case.compared();
    let mut different = vec![0; sides.len()];
    for _ in 0..compared {
        let text = workload.borrow_mut().next(case, "");
        let mut first = None;
        for (side, different) in sides.iter().zip(&mut different).filter(|(side, _)| counts_alike(side)) {
            // Images differ without a difference to how many tokens they are, texts do not.
            let body = if case.has_image() { workload.borrow_mut().next(case, &side.url) } else { text.clone() };
            let answer = Connection::open(side.address).await?.chat(body).await;
            let answer = answer.map_err(|error| format!("{}, '{}': {error}", side.name, case.name()))?;
            let count = answer.usage.prompt_tokens;
            *different += usize::from(*first.get_or_insert(count) != count);
        }
    }
    for (side, different) in sides.iter().zip(different).skip(1).filter(|(side, _)| compared > 0 && counts_alike(side))
    {
        if different > 0 {
            eprintln!("{}: {different} of {compared} prompts of '{}' have another length", side.name, case.name());
        }
        print(case, None, &side.name, "compared", compared as f64)?;
        print(case, None, &side.name, "different", different as f64)?;
    }
    Ok(())
}

/// Asks all sides in turns, round by round, and prints what comes of each; calls `after_round`
/// after each.
///
/// Before, text prompts are made as long as they should be by the count of the side of the number
/// `calibrating`, the sides' counts are compared, and caches are filled.
pub(crate) async fn measure(
    sides: &mut [Side],
    calibrating: usize,
    cases: &Cases<'_>,
    rounds: usize,
    workload: &RefCell<Workload>,
    mut after_round: impl AsyncFnMut(&mut [Side], &Expected) -> Result<(), Box<dyn Error>>,
) -> Result<Outcomes, Box<dyn Error>> {
    calibrate(&sides[calibrating], workload).await?;
    for (case, _) in cases {
        compare(sides, *case, workload).await?;
    }
    let expected = warm_up(sides, cases, workload).await?;
    let mut outcomes = Outcomes::new();
    for number in 0..rounds {
        eprintln!("round {} of {rounds}", number + 1);
        round(number, sides, cases, workload, &expected, &mut outcomes).await?;
        after_round(sides, &expected).await?;
    }
    for (&(number, clients, index), of_side) in &outcomes {
        let case = cases[number].0;
        for (metric, value) in summary(case, of_side) {
            print(case, Some(clients), &sides[index].name, metric, value)?;
        }
    }
    Ok(outcomes)
}

/// Asks all sides in turn, for each case with each number of clients.
///
/// The order of the sides turns round with each round. Where there is a baseline, small differences
/// count, so each round then goes through the sides there and back: what gets slower or faster
/// evenly meanwhile does so for all alike.
async fn round(
    round: usize,
    sides: &mut [Side],
    cases: &Cases<'_>,
    workload: &RefCell<Workload>,
    expected: &Expected,
    outcomes: &mut Outcomes,
) -> Result<(), Box<dyn Error>> {
    let there_and_back = sides.iter().any(|side| side.name == BASELINE);
    for (number, (case, clients)) in cases.iter().enumerate() {
        for &clients in *clients {
            let mut turns: Vec<usize> = (0..sides.len()).map(|turn| (turn + round) % sides.len()).collect();
            if there_and_back {
                turns.extend(turns.clone().iter().rev());
            }
            turns.retain(|&index| sides[index].takes(*case));
            for index in turns {
                let range = &expected[&(index, number)];
                let outcome = load::run(&mut sides[index], workload, *case, clients, case.time(), range).await?;
                outcomes.entry((number, clients, index)).or_default().push(outcome);
            }
        }
    }
    Ok(())
}

/// Fills caches; the prompt tokens to expect of each side for each case.
async fn warm_up(
    sides: &mut [Side],
    cases: &Cases<'_>,
    workload: &RefCell<Workload>,
) -> Result<Expected, Box<dyn Error>> {
    let mut expected = Expected::new();
    for (index, side) in sides.iter_mut().enumerate() {
        for (number, &(case, _)) in cases.iter().enumerate() {
            if !side.takes(case) {
                continue;
            }
            eprintln!("warming up {}, {}", side.name, case.name());
            let range = match case {
                // Seconds for a number that is not looked at.
                Case::Long(..) => case.prompt_tokens(0),
                _ => {
                    let body = workload.borrow_mut().next(case, &side.url);
                    case.prompt_tokens(Connection::open(side.address).await?.chat(body).await?.usage.prompt_tokens)
                }
            };
            let mut answered = 0;
            for _ in 0..WARM_UP_AT_MOST {
                let outcome = load::run(side, workload, case, WARM_UP_CLIENTS, WARM_UP, &range).await?;
                answered += outcome.answered.latencies.len();
                if case != Case::Distinct || answered >= WARM_UP_IMAGES {
                    break;
                }
            }
            expected.insert((index, number), range);
        }
    }
    Ok(expected)
}

/// What is asked for: requests, or the tokens of a stream.
fn work(case: Case, outcome: &Outcome) -> f64 {
    if case.is_streamed() { outcome.answered.tokens as f64 } else { outcome.answered.latencies.len() as f64 }
}

/// CPU seconds of a frontend for each request, or each token of a stream.
pub(crate) fn cpu(case: Case, outcome: &Outcome) -> f64 {
    outcome.cpu.as_secs_f64() / work(case, outcome)
}

/// Medians over these outcomes of a side, by metric; latencies are those of all together.
fn summary(case: Case, outcomes: &[Outcome]) -> Vec<(&'static str, f64)> {
    let requests = |outcome: &Outcome| outcome.answered.latencies.len() as f64;
    let of = |number: &dyn Fn(&Outcome) -> f64| median(outcomes.iter().map(number).collect());
    let latencies = outcomes.iter().flat_map(|outcome| &outcome.answered.latencies);
    let mut latencies: Vec<f64> = latencies.map(|time| time.as_secs_f64() * 1e3).collect();
    latencies.sort_by(f64::total_cmp);
    let mut delays: Vec<f64> = outcomes.iter().flat_map(|it| &it.delays).map(|&time| time as f64 / 1e3).collect();
    delays.sort_by(f64::total_cmp);
    let per_cpu = of(&|it| work(case, it) / it.cpu.as_secs_f64());
    let cpu = of(&|it| cpu(case, it));
    let rate = of(&|it| work(case, it) / it.answered.wall.as_secs_f64());
    let mut values = if case.is_streamed() {
        vec![
            ("output tokens per CPU second", per_cpu),
            ("CPU per output token", cpu * 1e6),
            ("output tokens per second", rate),
            ("events per output token", of(&|it| it.answered.events as f64 / work(case, it))),
        ]
    } else {
        vec![("requests per CPU second", per_cpu), ("CPU per request", cpu * 1e3), ("requests per second", rate)]
    };
    values.extend([
        ("latency p50", quantile(&latencies, 0.5)),
        ("latency p99", quantile(&latencies, 0.99)),
        ("origin requests per request", of(&|it| it.origin as f64 / requests(it))),
        ("engines", of(&|it| it.engines.as_secs_f64() / it.answered.wall.as_secs_f64())),
        ("engine to client p50", quantile(&delays, 0.5)),
        ("engine to client p99", quantile(&delays, 0.99)),
        ("load generator", of(&|it| it.answered.cpu.as_secs_f64() / it.answered.wall.as_secs_f64())),
    ]);
    values.retain(|(_, value)| !value.is_nan());
    values
}

/// Our CPU time for the same work as a part of theirs: the median over the rounds, in each of which
/// both were asked equally often.
pub(crate) fn share(case: Case, ours: &[Outcome], theirs: &[Outcome], rounds: usize) -> f64 {
    let cpu = |outcomes: &[Outcome]| {
        let cpu: f64 = outcomes.iter().map(|it| it.cpu.as_secs_f64()).sum();
        cpu / outcomes.iter().map(|it| work(case, it)).sum::<f64>()
    };
    let rounds = [ours, theirs].map(|outcomes| outcomes.chunks(outcomes.len() / rounds));
    let [ours, theirs] = rounds;
    median(ours.zip(theirs).map(|(ours, theirs)| cpu(ours) / cpu(theirs)).collect())
}
