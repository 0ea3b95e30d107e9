//! First whether all sides understand the same, then what each costs: case by case, side by side, round by round.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::client::Connection;
use crate::load::{self, Outcome};
use crate::side::Side;
use crate::workload::{Case, PROMPT_TOKENS, Workload};

/// Clients at once.
pub(crate) const CLIENTS: [usize; 3] = [1, 16, 64];
/// Requests whose prompt tokens are compared, for each case.
const COMPARED: usize = 20;
/// For how long a side is asked before it is measured.
const WARM_UP: Duration = Duration::from_secs(1);
/// Distinct images go twice around our shared memory, which has no room for more than 200: a side that has run for a while uses
/// memory that was used before. Sides that are slow are not waited for so long; they have none.
const WARM_UP_IMAGES: usize = 400;
const WARM_UP_AT_MOST: u32 = 15;
/// And each time it is measured.
const MEASURED: Duration = Duration::from_millis(800);
/// A text prompt may be so much shorter or longer than it should.
const TOLERANCE: u64 = 100;

/// The sides' names, what was measured, and the number.
#[derive(Debug)]
pub(crate) struct Value {
    pub(crate) case: Case,
    /// None for what all have in common.
    pub(crate) clients: Option<usize>,
    pub(crate) side: usize,
    pub(crate) metric: &'static str,
    pub(crate) value: f64,
}

/// Makes text prompts as long as they should be, by the count of the first side.
pub(crate) async fn calibrate(side: &Side, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
    let mut connection = Connection::open(side.address).await?;
    let mut tokens = 0;
    for _ in 0..COMPARED {
        let body = workload.borrow_mut().next(Case::Text, &side.url);
        tokens += connection.chat(body).await?.prompt_tokens;
    }
    let mut workload = workload.borrow_mut();
    let words = workload.length() as u64 * COMPARED as u64 * PROMPT_TOKENS / tokens.max(1);
    workload.set_length(usize::try_from(words)?);
    Ok(())
}

/// Sends the same requests to all sides; what they count has to be what the first counts, where they count alike.
pub(crate) async fn compare(sides: &[Side], workload: &RefCell<Workload>) -> Result<Vec<Value>, Box<dyn Error>> {
    let mut values = Vec::new();
    for case in Case::ALL {
        let mut different = vec![0; sides.len()];
        for _ in 0..COMPARED {
            let text = workload.borrow_mut().next(case, "");
            let mut counts = Vec::new();
            for side in sides {
                // Images differ without a difference to how many tokens they are, texts do not.
                let body = if case.has_image() { workload.borrow_mut().next(case, &side.url) } else { text.clone() };
                let usage = Connection::open(side.address).await?.chat(body).await;
                counts.push(usage.map_err(|error| format!("{}, '{}': {error}", side.name, case.name()))?.prompt_tokens);
            }
            for (count, different) in counts.iter().zip(&mut different) {
                *different += usize::from(*count != counts[0]);
            }
        }
        for (index, side) in
            sides.iter().enumerate().skip(1).filter(|(_, side)| side.counts_images || !case.has_image())
        {
            if different[index] > 0 {
                eprintln!(
                    "{}: {} of {COMPARED} prompts of '{}' have another length",
                    side.name,
                    different[index],
                    case.name()
                );
            }
            let value = |metric, value| Value { case, clients: None, side: index, metric, value };
            values.push(value("compared", COMPARED as f64));
            values.push(value("different", different[index] as f64));
        }
    }
    Ok(values)
}

/// Medians over the rounds; latencies are those of all rounds together.
pub(crate) async fn measure(
    sides: &mut [Side],
    workload: &RefCell<Workload>,
    rounds: usize,
) -> Result<Vec<Value>, Box<dyn Error>> {
    let mut expected: BTreeMap<(usize, usize), RangeInclusive<u64>> = BTreeMap::new();
    for (index, side) in sides.iter_mut().enumerate() {
        for (number, case) in Case::ALL.into_iter().enumerate() {
            eprintln!("warming up {}, {}", side.name, case.name());
            let body = workload.borrow_mut().next(case, &side.url);
            let tokens = Connection::open(side.address).await?.chat(body).await?.prompt_tokens;
            let range =
                if case.has_image() { tokens..=tokens } else { PROMPT_TOKENS - TOLERANCE..=PROMPT_TOKENS + TOLERANCE };
            let mut answered = 0;
            for _ in 0..WARM_UP_AT_MOST {
                answered +=
                    load::run(side, workload, case, CLIENTS[1], WARM_UP, &range).await?.answered.latencies.len();
                if case != Case::Distinct || answered >= WARM_UP_IMAGES {
                    break;
                }
            }
            expected.insert((index, number), range);
        }
    }
    let mut outcomes: BTreeMap<(usize, usize, usize), Vec<Outcome>> = BTreeMap::new();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        for (number, case) in Case::ALL.into_iter().enumerate() {
            for clients in CLIENTS {
                for turn in 0..sides.len() {
                    let index = (turn + round) % sides.len();
                    let range = &expected[&(index, number)];
                    let outcome = load::run(&mut sides[index], workload, case, clients, MEASURED, range).await?;
                    outcomes.entry((number, clients, index)).or_default().push(outcome);
                }
            }
        }
    }
    let mut values = Vec::new();
    for ((number, clients, side), outcomes) in &outcomes {
        let case = Case::ALL[*number];
        values.extend(summary(outcomes).map(|(metric, value)| Value {
            case,
            clients: Some(*clients),
            side: *side,
            metric,
            value,
        }));
    }
    Ok(values)
}

fn summary(outcomes: &[Outcome]) -> [(&'static str, f64); 7] {
    let requests = |outcome: &Outcome| outcome.answered.latencies.len() as f64;
    let of = |number: &dyn Fn(&Outcome) -> f64| median(outcomes.iter().map(number).collect());
    let mut latencies: Vec<Duration> =
        outcomes.iter().flat_map(|outcome| outcome.answered.latencies.iter().copied()).collect();
    latencies.sort();
    let quantile = |part: f64| {
        latencies.get((latencies.len() as f64 * part) as usize).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    };
    [
        ("requests per CPU second", of(&|it| requests(it) / it.cpu.as_secs_f64())),
        ("CPU per request", of(&|it| it.cpu.as_secs_f64() * 1e3 / requests(it))),
        ("requests per second", of(&|it| requests(it) / it.answered.wall.as_secs_f64())),
        ("latency p50", quantile(0.5)),
        ("latency p99", quantile(0.99)),
        ("origin requests per request", of(&|it| it.origin as f64 / requests(it))),
        ("load generator", of(&|it| it.answered.cpu.as_secs_f64() / it.answered.wall.as_secs_f64())),
    ]
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => f64::NAN,
        length => (numbers[(length - 1) / 2] + numbers[length / 2]) / 2.0,
    }
}
