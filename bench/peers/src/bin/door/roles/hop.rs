//! The time of a computed prompt from one engine to the other: from the output of the prefilling
//! engine to the request to the decoding one.

use std::cell::RefCell;
use std::error::Error;
use std::ops::RangeInclusive;

use peers::numbers::median;
use peers::row::{Row, neutral};

use crate::load;
use crate::roles::fleet::HopLogs;
use crate::roles::pass::Pass;
use crate::side::{Inputs, Side, read_log};
use crate::workload::{Case, Workload};

/// The number of messages through the null relay in each round.
const PASSED: usize = 200;
/// The maximum time of our frontend for the hop, in addition to the null relay's.
const LIMIT_US: f64 = 100.0;

/// The hop of a side, and the limit for it.
pub(crate) struct Hop {
    logs: HopLogs,
    pass: Pass,
    /// The medians and 99th percentiles of the rounds' hops.
    medians_us: Vec<f64>,
    slow_us: Vec<f64>,
    /// The medians of the rounds' null relays.
    passed_us: Vec<f64>,
}

impl Hop {
    pub(crate) async fn new(inputs: &Inputs, logs: HopLogs) -> Result<Self, Box<dyn Error>> {
        let pass = Pass::start(inputs).await?;
        let [medians_us, slow_us, passed_us] = [const { Vec::new() }; 3];
        Ok(Self { logs, pass, medians_us, slow_us, passed_us })
    }

    /// Sends sequential requests to a side whose engines are idle, then messages through the null
    /// relay.
    pub(crate) async fn round(
        &mut self,
        side: &Side,
        workload: &RefCell<Workload>,
        expected: &RangeInclusive<u64>,
    ) -> Result<(), Box<dyn Error>> {
        let before = read_log(&self.logs.requests)?.len();
        load::run(side, workload, Case::Text, 1, Case::Text.spec().time, expected).await?;
        let outputs = read_log(&self.logs.outputs)?;
        let requests = read_log(&self.logs.requests)?;
        let hops = load::delays(&outputs, requests.get(before..).unwrap_or_default());
        let mut hops: Vec<f64> = hops.into_iter().map(|hop| hop as f64 / 1e3).collect();
        hops.sort_by(f64::total_cmp);
        self.slow_us.extend(hops.get(hops.len() * 99 / 100));
        self.medians_us.push(median(hops));
        let passed = self.pass.measure(PASSED).await?;
        self.passed_us.push(median(passed.iter().map(|time| time.as_secs_f64() * 1e6).collect()));
        Ok(())
    }

    /// Prints the medians over the rounds.
    pub(crate) fn print(&self, case: &str) -> Result<(), Box<dyn Error>> {
        let [hop, slow, passed] =
            [&self.medians_us, &self.slow_us, &self.passed_us].map(|it| median(it.clone()));
        let row = |metric, ours, peer| neutral(metric, "µs").row(case, "null relay", ours, peer);
        let ratio = hop / (passed + LIMIT_US);
        Row { ratio, ..row("engine to engine p50", hop, passed) }.print()?;
        row("engine to engine p99", slow, f64::NAN).print()
    }
}
