//! How long a prompt that one engine has computed takes to another: from when the one has its
//! output ready until the other is asked.

use std::cell::RefCell;
use std::error::Error;
use std::ops::RangeInclusive;

use peers::numbers::median;

use crate::load;
use crate::roles::fleet::HopLogs;
use crate::roles::pass::Pass;
use crate::side::{Inputs, Side, moments};
use crate::workload::{Case, Workload};

/// Times that something is passed on in each round by whoever does nothing else.
const PASSED: usize = 200;

/// The hop of a side, and the limit that it is held against.
pub(crate) struct Hop {
    logs: HopLogs,
    pass: Pass,
    /// Medians of the rounds, in µs.
    hops: Vec<f64>,
    passed: Vec<f64>,
    /// What 99 of 100 took at most, in each round.
    slow: Vec<f64>,
}

impl Hop {
    pub(crate) async fn new(inputs: &Inputs, logs: HopLogs) -> Result<Self, Box<dyn Error>> {
        let pass = Pass::start(inputs).await?;
        Ok(Self { logs, pass, hops: Vec::new(), passed: Vec::new(), slow: Vec::new() })
    }

    /// Asks the side, whose engines have nothing else to do, one request after the other; then has
    /// as much passed on by nobody.
    pub(crate) async fn round(
        &mut self,
        side: &mut Side,
        workload: &RefCell<Workload>,
        expected: &RangeInclusive<u64>,
    ) -> Result<(), Box<dyn Error>> {
        let before = moments(&self.logs.asked)?.len();
        load::run(side, workload, Case::Text, 1, Case::Text.time(), expected).await?;
        let (left, asked) = (moments(&self.logs.left)?, moments(&self.logs.asked)?);
        let hops = load::delays(&left, asked.get(before..).unwrap_or_default());
        let mut hops: Vec<f64> = hops.into_iter().map(|nanoseconds| nanoseconds as f64 / 1e3).collect();
        hops.sort_by(f64::total_cmp);
        self.slow.extend(hops.get(hops.len() * 99 / 100));
        self.hops.push(median(hops));
        let passed = self.pass.ask(PASSED).await?;
        self.passed.push(median(passed.iter().map(|time| time.as_secs_f64() * 1e6).collect()));
        Ok(())
    }

    /// Medians over the rounds: of the hop, of what the slow ones took, and of what is passed on by
    /// nobody.
    pub(crate) fn medians(&self) -> [f64; 3] {
        [&self.hops, &self.slow, &self.passed].map(|times| median(times.clone()))
    }
}
