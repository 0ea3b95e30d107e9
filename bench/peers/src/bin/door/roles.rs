//! What a request costs in the frontend whose prompt one engine computes and whose answer another
//! one gives, beside one that a single engine has whole: ours, and Dynamo's before its mockers.
//!
//! | file | is |
//! |---|---|
//! | `fleet` | our frontend and its engines |
//! | `hop` | the way of a prompt from one engine to the other |
//! | `pass` | a frontend that does nothing but pass it on: the limit for that |

mod fleet;
mod hop;
mod pass;

use std::cell::RefCell;
use std::error::Error;
use std::path::PathBuf;

use peers::numbers::median;

use crate::dynamo::{self, Discovery, Stage};
use crate::load::Outcome;
use crate::measure::{self, Outcomes};
use crate::print;
use crate::side::{Inputs, Side};
use crate::workload::{Case, Pace, Rate, Workload};

pub(crate) use pass::serve as pass;

use fleet::HopLogs;
use hop::Hop;

/// Sides' names, of which Dynamo's begin with its version's.
const OURS: [&str; 2] = ["chiasm, aggregated", "chiasm, split"];
const AGGREGATED: &str = "aggregated";
const SPLIT: &str = "split";
/// Where among the sides are those of Dynamo: in the order of [`OURS`].
const DYNAMO: usize = 2;

/// One client tells what a request costs that comes alone, many what a busy frontend spends.
const REQUESTS: [(Case, &[usize]); 1] = [(Case::Text, &[1, 16, 32])];
const ANSWERS: [(Case, &[usize]); 1] = [(Case::TextAnswered, &[64])];

/// Measures all of it and prints the results.
pub(crate) async fn run(
    inputs: &Inputs,
    dynamo: &(PathBuf, String),
    rounds: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    for (pace, cases) in [(Pace::Unbounded, &REQUESTS), (Pace::Calls(Rate::Hundred), &ANSWERS)] {
        let (mut sides, logs) = start(inputs, dynamo, pace, workload)?;
        let mut hop = Hop::new(inputs, logs).await?;
        for side in &mut sides {
            eprintln!("waiting for {}", side.name);
            side.wait(workload).await?;
        }
        let outcomes = measure::measure(&mut sides, 0, cases, rounds, workload, async |sides, expected| {
            if pace == Pace::Unbounded {
                hop.round(&mut sides[1], workload, &expected[&(1, 0)]).await?;
            }
            Ok(())
        });
        let outcomes = outcomes.await?;
        costs(&sides, cases, &outcomes, rounds)?;
        if pace == Pace::Unbounded {
            let [p50, p99, null] = hop.medians();
            print(Case::Text, Some(1), OURS[1], "engine to engine p50", p50)?;
            print(Case::Text, Some(1), OURS[1], "engine to engine p99", p99)?;
            print(Case::Text, Some(1), "null relay", "engine to engine p50", null)?;
        }
    }
    Ok(())
}

/// Starts all four: ours and Dynamo, each before two engines that do everything and before one of
/// either role.
fn start(
    inputs: &Inputs,
    dynamo: &(PathBuf, String),
    pace: Pace,
    workload: &RefCell<Workload>,
) -> Result<(Vec<Side>, HopLogs), Box<dyn Error>> {
    let workload = workload.borrow();
    let origin = workload.origin();
    let aggregated = fleet::aggregated(inputs, OURS[0], pace, origin)?;
    let (split, logs) = fleet::split(inputs, OURS[1], pace, origin)?;
    let mut sides = vec![aggregated, split];
    for (name, stages) in [(AGGREGATED, [Stage::All, Stage::All]), (SPLIT, [Stage::Prompts, Stage::Answers])] {
        let side = dynamo::start(inputs, dynamo, pace, origin, Discovery::Files, &stages)?;
        sides.push(Side { name: format!("{}, {name}", side.name), ..side });
    }
    Ok((sides, logs))
}

/// Prints what Dynamo's sides spent in times of ours, and what splitting adds to a request.
fn costs(sides: &[Side], cases: &[(Case, &[usize])], outcomes: &Outcomes, rounds: usize) -> Result<(), Box<dyn Error>> {
    for (&(number, clients, index), of_side) in outcomes {
        let case = cases[number].0;
        let print = |metric, value| print(case, Some(clients), &sides[index].name, metric, value);
        let of = |index| &*outcomes[&(number, clients, index)];
        if let Some(ours) = index.checked_sub(DYNAMO) {
            print("CPU in times of ours", measure::share(case, of_side, of(ours), rounds))?;
        }
        if index % DYNAMO == 1 {
            print("CPU added by the second hop", added(case, of_side, of(index - 1)))?;
        }
    }
    Ok(())
}

/// Median of the rounds' differences of CPU time, in µs per request.
fn added(case: Case, split: &[Outcome], aggregated: &[Outcome]) -> f64 {
    let pairs = split.iter().zip(aggregated);
    median(pairs.map(|(split, whole)| 1e6 * (measure::cpu(case, split) - measure::cpu(case, whole))).collect())
}
