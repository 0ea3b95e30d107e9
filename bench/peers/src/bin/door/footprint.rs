//! The start and the resident memory of each frontend, which is started alone with its engine.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::time::Duration;

use futures_util::future::join;
use peers::numbers::median;
use peers::row::{Metric, Row, less};

use crate::client::get;
use crate::load;
use crate::side::Side;
use crate::workload::{Case, Output, Rate, Workload};

/// The number of concurrent streams while memory is measured.
const STREAMS: usize = 1_000;
const CASE: Case = Case::Long(Output::Plain, Rate::TwentyFive);
/// The maximum number of rounds: the numbers vary little, and Python takes long to start.
pub(crate) const MAX_ROUNDS: usize = 3;
/// The limit of `chiasm`'s time to `/ready`, in milliseconds.
const START_LIMIT_MS: f64 = 500.0;
/// The time after the start in which a frontend comes to rest.
const REST: Duration = Duration::from_secs(2);
/// The time between two readings of memory.
const SAMPLE: Duration = Duration::from_millis(100);
/// The time between two readings of `/ready`.
const POLL: Duration = Duration::from_millis(2);

/// The numbers of a side, one for each round.
#[derive(Default)]
pub(crate) struct Footprint {
    /// The time until `/ready` is a 200; none for other projects.
    ready_ms: Vec<f64>,
    /// The time until the first answer to a text.
    first_answer_ms: Vec<f64>,
    idle_mb: Vec<f64>,
    /// The maximum during [`STREAMS`] streams.
    streams_mb: Vec<f64>,
}

impl Footprint {
    /// Measures a side that was started just now.
    pub(crate) async fn measure(
        &mut self,
        mut side: Side,
        workload: &RefCell<Workload>,
    ) -> Result<(), Box<dyn Error>> {
        let elapsed_ms = |side: &Side| side.frontend.started.elapsed().as_secs_f64() * 1e3;
        // Only ours reports its engines.
        if side.reports_engines {
            while !get(side.address, "/ready").await.is_ok_and(|it| it.status.is_success()) {
                side.frontend.check()?;
                tokio::time::sleep(POLL).await;
            }
            self.ready_ms.push(elapsed_ms(&side));
        }
        side.wait(workload).await?;
        self.first_answer_ms.push(elapsed_ms(&side));
        tokio::time::sleep(REST).await;
        let megabytes = || Ok::<_, Box<dyn Error>>(side.frontend.resident_bytes()? as f64 / 1e6);
        self.idle_mb.push(megabytes()?);
        let is_done = Cell::new(false);
        let streams = async {
            let expected = CASE.prompt_tokens(0);
            let outcome =
                load::run(&side, workload, CASE, STREAMS, Duration::ZERO, &expected).await;
            is_done.set(true);
            outcome
        };
        let samples = async {
            let mut highest: f64 = 0.0;
            while !is_done.get() {
                highest = highest.max(megabytes()?);
                tokio::time::sleep(SAMPLE).await;
            }
            Ok::<_, Box<dyn Error>>(highest)
        };
        let (outcome, highest) = join(streams, samples).await;
        outcome?;
        self.streams_mb.push(highest?);
        Ok(())
    }

    /// Returns our rows, compared with the limit and with each peer.
    pub(crate) fn rows<'a>(
        &self,
        peers: impl IntoIterator<Item = (&'a str, &'a Self)>,
    ) -> Vec<Row> {
        let ready = median(self.ready_ms.clone());
        let limit = less("exec to /ready", "ms").row("start", "limit", ready, START_LIMIT_MS);
        let mut rows = vec![Row { ratio: ready / START_LIMIT_MS, ..limit }];
        let streams = format!("{STREAMS} streams");
        for (name, peer) in peers {
            let mut compare = |case: &str, metric: Metric, numbers: fn(&Self) -> &Vec<f64>| {
                let [ours, theirs] = [self, peer].map(|side| median(numbers(side).clone()));
                rows.push(metric.row(case, name, ours, theirs));
            };
            compare("start", less("exec to first answer", "ms"), |it| &it.first_answer_ms);
            compare("idle", less("resident memory", "MB"), |it| &it.idle_mb);
            compare(&streams, less("resident memory", "MB"), |it| &it.streams_mb);
        }
        rows
    }
}
