//! How long a prompt that one engine has computed takes to another: from when the one has its output ready until the other is asked.

use std::cell::RefCell;
use std::error::Error;
use std::ops::RangeInclusive;

use crate::load;
use crate::machines::{Machine, Transfer};
use crate::measure::median;
use crate::roles::fleet::HopLogs;
use crate::side::{Inputs, Side, moments};
use crate::workload::{Case, Workload};

/// Bytes of a request to an engine with a prompt of 1,000 tokens: its ids in msgpack, three bytes each, and what is asked for.
const REQUEST_BYTES: usize = 4_000;
/// Times that as many are sent in each round where nothing is done with them.
const TRANSFERS: usize = 1_000;

/// The hop of a side, and the limit that it is held against.
pub(crate) struct Hop {
    logs: HopLogs,
    transfer: Transfer,
    /// Medians of the rounds, in µs.
    hops: Vec<f64>,
    transfers: Vec<f64>,
    /// What 99 of 100 took at most, in each round.
    slow: Vec<f64>,
}

impl Hop {
    pub(crate) fn new(inputs: &Inputs, logs: HopLogs) -> Result<Self, Box<dyn Error>> {
        let transfer = Transfer::start(inputs, &Machine::here())?;
        Ok(Self { logs, transfer, hops: Vec::new(), transfers: Vec::new(), slow: Vec::new() })
    }

    /// Asks the side, whose engines have nothing else to do, one request after the other; then sends as many bytes to nobody.
    pub(crate) async fn round(
        &mut self,
        side: &mut Side,
        workload: &RefCell<Workload>,
        expected: &RangeInclusive<u64>,
    ) -> Result<(), Box<dyn Error>> {
        let before = moments(&self.logs.asked)?.len();
        load::run(side, workload, Case::Text, 1, Case::Text.time(), expected).await?;
        let (left, asked) = (moments(&self.logs.left)?, moments(&self.logs.asked)?);
        let mut hops: Vec<f64> =
            load::delays(&left, &asked[before..]).into_iter().map(|nanoseconds| nanoseconds as f64 / 1e3).collect();
        hops.sort_by(f64::total_cmp);
        self.slow.extend(hops.get(hops.len() * 99 / 100));
        self.hops.push(median(hops));
        let request = vec![0; REQUEST_BYTES];
        let times: Result<Vec<f64>, Box<dyn Error>> =
            (0..TRANSFERS).map(|_| Ok(self.transfer.send(&request)?.as_secs_f64() * 1e6)).collect();
        self.transfers.push(median(times?));
        Ok(())
    }

    /// Medians over the rounds: of the hop, of what the slow ones took, and of the bare way there and back.
    pub(crate) fn medians(&self) -> [f64; 3] {
        [&self.hops, &self.slow, &self.transfers].map(|times| median(times.clone()))
    }
}
