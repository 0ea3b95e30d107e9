//! The cost of a request whose prompt one engine computes and whose answer another one computes,
//! compared with a request that one engine computes: in our frontend, and in Dynamo's with mockers.
//!
//! | file | contents |
//! |---|---|
//! | `fleet` | our frontend and its engines |
//! | `hop` | the time from one engine to the other |
//! | `pass` | a relay between two sockets: the limit for that time |

mod fleet;
mod hop;
mod pass;

use std::cell::RefCell;
use std::error::Error;

use peers::numbers::median;
use peers::row::{OURS, Row, neutral};

use crate::dynamo::{self, Stage};
use crate::measure::{self, CaseResults, in_microseconds};
use crate::side::{Inputs, Side, Versioned};
use crate::workload::{Case, Pace, Rate, Workload};

pub(crate) use pass::serve as pass;

use fleet::HopLogs;
use hop::Hop;

/// The ways in which engines compute a request, as the ends of names of sides and cases.
const WAYS: [&str; 2] = ["aggregated", "split"];
/// The number of the first side of Dynamo. Our sides and Dynamo's are in the order of [`WAYS`].
const DYNAMO: usize = 2;
/// One client shows the cost of a single request, many clients that of a busy frontend.
const REQUESTS: [(Case, &[usize]); 1] = [(Case::Text, &[1, 16, 32])];
const ANSWERS: [(Case, &[usize]); 1] = [(Case::TextAnswered, &[64])];

/// Measures everything and prints the rows.
pub(crate) async fn run(
    inputs: &Inputs,
    dynamo: &Versioned,
    rounds: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    Row::for_run("rounds", rounds, OURS).print()?;
    let dynamo_name = format!("Dynamo {}", dynamo.1);
    for (pace, cases) in [(Pace::Unbounded, &REQUESTS), (Pace::Calls(Rate::Hundred), &ANSWERS)] {
        let (mut sides, logs) = start(inputs, dynamo, pace, workload)?;
        let mut hop = Hop::new(inputs, logs).await?;
        for side in &mut sides {
            side.wait(workload).await?;
        }
        let results =
            measure::measure(&mut sides, 0, cases, rounds, workload, async |sides, expected| {
                if pace == Pace::Unbounded {
                    hop.round(&sides[1], workload, &expected[&(1, 0)]).await?;
                }
                Ok(())
            });
        let (results, lengths) = results.await?;
        for results in &results {
            print_costs(results, &dynamo_name)?;
        }
        if pace == Pace::Unbounded {
            hop.print(&results[0].name())?;
        }
        for row in lengths {
            let (peer, way) = row.peer_name.rsplit_once(", ").ok_or("a side has no way")?;
            Row { case: format!("{}, {way}", row.case), peer_name: peer.to_owned(), ..row.clone() }
                .print()?;
        }
    }
    Ok(())
}

/// Starts our sides and Dynamo's.
fn start(
    inputs: &Inputs,
    dynamo: &Versioned,
    pace: Pace,
    workload: &RefCell<Workload>,
) -> Result<(Vec<Side>, HopLogs), Box<dyn Error>> {
    let workload = workload.borrow();
    let origin = workload.origin();
    let names = WAYS.map(|way| format!("{OURS}, {way}"));
    let aggregated = fleet::aggregated(inputs, &names[0], pace, origin)?;
    let (split, logs) = fleet::split(inputs, &names[1], pace, origin)?;
    let mut sides = vec![aggregated, split];
    for (way, stages) in
        WAYS.into_iter().zip([[Stage::All, Stage::All], [Stage::Prompts, Stage::Answers]])
    {
        let side = dynamo::start(inputs, dynamo, pace, origin, None, &stages)?;
        sides.push(Side { name: format!("{}, {way}", side.name), ..side });
    }
    Ok((sides, logs))
}

/// Prints the rows of both ways and of the CPU time that splitting adds.
fn print_costs(results: &CaseResults, dynamo: &str) -> Result<(), Box<dyn Error>> {
    for (number, way) in WAYS.into_iter().enumerate() {
        let name = format!("{}, {way}", results.name());
        let ratio = results.cpu_share(DYNAMO + number, number);
        for row in results.cost_rows(&name, [number, DYNAMO + number], dynamo, ratio) {
            in_microseconds(row).print()?;
        }
    }
    // The median of the rounds' differences.
    let added = |side: usize| {
        let [aggregated, split] = [0, 1].map(|way| results.outcomes[side + way].iter());
        let cpu_us = |it| 1e6 * measure::cpu(results.case, it);
        median(split.zip(aggregated).map(|(split, whole)| cpu_us(split) - cpu_us(whole)).collect())
    };
    let metric = neutral("CPU added by the second hop", "µs");
    metric.row(&results.name(), dynamo, added(0), added(DYNAMO)).print()
}
