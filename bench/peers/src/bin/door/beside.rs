//! TextTimes at a steady pace, alone and beside a burst of images.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::time::{Duration, Instant};

use futures_util::future::{join, try_join_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use peers::numbers::quantile;
use peers::row::{Row, less};

use crate::client::Connection;
use crate::picture::Format;
use crate::side::Side;
use crate::workload::{Case, Workload};

/// The number of requests of a burst.
const BURST_REQUESTS: usize = 16;
/// The time from one text to the next.
const INTERVAL: Duration = Duration::from_millis(20);
/// The number of texts of a measurement without a burst.
const TEXTS_ALONE: u32 = 50;
/// The most texts during a burst. They stop when it ends.
const MAX_TEXTS: u32 = 3_000;
/// The limit's name in rows: texts sent without a burst.
const WITHOUT_BURST: &str = "without the burst";

/// The times to first token of a side's texts in milliseconds, of all rounds.
#[derive(Clone, Default)]
pub(crate) struct TextTimes {
    alone: Vec<f64>,
    beside: Vec<f64>,
}

impl TextTimes {
    /// Measures a side, first alone and then beside a burst.
    pub(crate) async fn measure(
        &mut self,
        side: &Side,
        workload: &RefCell<Workload>,
        format: Format,
    ) -> Result<(), Box<dyn Error>> {
        self.alone.extend(send_texts(side, workload, TEXTS_ALONE, &Cell::new(false)).await?);
        let burst: Vec<_> = (0..BURST_REQUESTS)
            .map(|_| workload.borrow_mut().next(Case::Burst(format), &side.url))
            .collect();
        let is_done = Cell::new(false);
        let burst = async {
            let requests = burst
                .into_iter()
                .map(async |body| Connection::open(side.address).await?.chat(body).await);
            let answers = try_join_all(requests).await;
            is_done.set(true);
            answers
        };
        let (burst, beside) = join(burst, send_texts(side, workload, MAX_TEXTS, &is_done)).await;
        burst.map_err(|error| side.frontend.failed(&format!("failed in a burst: {error}")))?;
        self.beside.extend(beside?);
        Ok(())
    }

    /// Returns our rows, compared with the limit and with each peer.
    pub(crate) fn rows<'a>(
        &self,
        format: Format,
        peers: impl IntoIterator<Item = (&'a str, &'a Self)>,
    ) -> Vec<Row> {
        let case = format!("text beside a burst of {}, {BURST_REQUESTS} clients", format.name());
        let p99 = quantile(&sorted(&self.beside), 0.99);
        let alone = quantile(&sorted(&self.alone), 0.99);
        let limit = less("TTFT p99", "ms").row(&case, WITHOUT_BURST, p99, alone);
        let mut rows = vec![Row { ratio: p99 / alone, ..limit }];
        for (name, peer) in peers {
            for (metric, fraction) in [("TTFT p50", 0.5), ("TTFT p99", 0.99)] {
                let [ours, theirs] =
                    [self, peer].map(|texts| quantile(&sorted(&texts.beside), fraction));
                rows.push(less(metric, "ms").row(&case, name, ours, theirs));
            }
        }
        rows
    }
}

/// Sends a text every [`INTERVAL`] until `is_done`, at most `max`. Returns the times to first
/// token.
async fn send_texts(
    side: &Side,
    workload: &RefCell<Workload>,
    max: u32,
    is_done: &Cell<bool>,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let chat = async || {
        let body = workload.borrow_mut().next(Case::TextStreamed, &side.url);
        let answer = Connection::open(side.address).await?.chat(body).await;
        let (_, response) =
            answer.map_err(|error| side.frontend.failed(&format!("failed at a text: {error}")))?;
        Ok::<_, Box<dyn Error>>(response.ttft_ms())
    };
    let start = Instant::now();
    let mut unanswered = FuturesUnordered::new();
    let mut times = Vec::new();
    for number in 0..max {
        let mut next = std::pin::pin!(tokio::time::sleep_until((start + INTERVAL * number).into()));
        loop {
            tokio::select! {
                () = &mut next => break,
                Some(time) = unanswered.next() => times.extend(time?),
            }
        }
        if is_done.get() {
            break;
        }
        unanswered.push(chat());
    }
    while let Some(time) = unanswered.next().await {
        times.extend(time?);
    }
    Ok(times)
}

fn sorted(times: &[f64]) -> Vec<f64> {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times
}
