//! The events for open pages: the whole state when a page opens, and once a second the changes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use chiasm_types::WorkerId;
use futures_util::stream::{self, Stream};
use serde::Serialize;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::fleet::{Row, rows};
use super::history::{STEP, Step};
use super::media::Media;
use super::requests::Summary;
use super::{PageState, lock};

/// Between two things that pages are told.
pub(super) const PERIOD: Duration = Duration::from_secs(1);
/// Pages that may be open at once.
const MOST_PAGES: usize = 16;
/// Events that wait for a slow page. One that misses any is told everything anew.
const WAITING: usize = 4;

/// Tells open pages. All of them are told the same, which is written once.
#[derive(Default)]
pub(super) struct Feed {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` while no page was opened, and when the process is about to end.
    told: Option<broadcast::Sender<Bytes>>,
    has_ended: bool,
    /// The workers as pages know them; none while no page is open.
    rows: BTreeMap<WorkerId, Row>,
    step_began: Option<Instant>,
}

/// Everything, for a page that opens.
#[derive(Serialize)]
struct Start<'a> {
    model: &'a str,
    version: &'static str,
    /// There are keys, and so sessions that can be ended.
    has_keys: bool,
    rows: Vec<&'a Row>,
    requests: Vec<Summary>,
    steps: Vec<Step>,
    media: Media,
    totals: Totals,
}

/// The changes since the last tick.
#[derive(Serialize)]
struct Tick<'a> {
    rows: Vec<&'a Row>,
    /// Workers that have left.
    gone: Vec<String>,
    requests: Vec<Summary>,
    step: Option<Step>,
    media: Media,
    totals: Totals,
}

#[derive(Serialize)]
struct Totals {
    /// Workers that can take requests and answer.
    ready: usize,
    in_flight: i64,
    /// Requests that may be in flight at once.
    slots: usize,
}

impl Feed {
    /// Notes how things are, and tells the open pages.
    pub(super) fn tell(&self, of: &PageState) {
        let mut state = lock(&self.state);
        let step = state.end_step(of);
        let requests = of.page.requests.take_changed();
        if of.draining.has_begun() {
            // A stream that goes on would hold up the end of the process.
            state.told = None;
            state.has_ended = true;
        }
        let is_watched = state.told.as_ref().is_some_and(|told| told.receiver_count() > 0);
        of.page.requests.set_watched(is_watched);
        if !is_watched {
            state.rows.clear();
            return;
        }
        let now = rows(&of.pipeline);
        let changed =
            now.iter().filter(|(id, row)| state.rows.get(id) != Some(row)).map(|(_, row)| row);
        let gone = state.rows.keys().filter(|id| !now.contains_key(id)).map(ToString::to_string);
        let tick = Tick {
            rows: changed.collect(),
            gone: gone.collect(),
            requests,
            step,
            media: Media::now(&of.pipeline, &lock(&of.page.repeated)),
            totals: Totals::now(of),
        };
        let event = event("tick", &tick);
        state.rows = now;
        if let Some(told) = &state.told {
            // The last page may have closed in this moment.
            let _ = told.send(event);
        }
    }

    /// Everything as it is now, and what is told from then on. `None` when enough pages are open,
    /// or the process is about to end.
    fn open(&self, of: &PageState) -> Option<(Bytes, broadcast::Receiver<Bytes>)> {
        let mut state = lock(&self.state);
        if state.has_ended {
            return None;
        }
        let told = state.told.get_or_insert_with(|| broadcast::Sender::new(WAITING));
        if told.receiver_count() >= MOST_PAGES {
            return None;
        }
        let receiver = told.subscribe();
        if state.rows.is_empty() {
            state.rows = rows(&of.pipeline);
        }
        let start = Start {
            model: &of.pipeline.model.name,
            version: env!("CARGO_PKG_VERSION"),
            has_keys: of.keys.current().are_asked_for(),
            rows: state.rows.values().collect(),
            requests: of.page.requests.all(),
            steps: lock(&of.page.history).steps().iter().cloned().collect(),
            media: Media::now(&of.pipeline, &lock(&of.page.repeated)),
            totals: Totals::now(of),
        };
        Some((event("start", &start), receiver))
    }

    /// Returns the events for one more page. They end when `is_admitted` turns false: after a
    /// logout, at the end of the session, or when its key was removed. `None` in the cases of
    /// [`Feed::open`].
    pub(super) fn follow<A>(
        state: Arc<PageState>,
        is_admitted: A,
    ) -> Option<impl Stream<Item = Bytes> + Send + use<A>>
    where
        A: Fn() -> bool + Send + 'static,
    {
        let (start, receiver) = state.page.feed.open(&state)?;
        let opened = (Some(start), receiver, state, is_admitted);
        Some(stream::unfold(opened, |(start, mut receiver, state, is_admitted)| async move {
            if let Some(start) = start {
                return Some((start, (None, receiver, state, is_admitted)));
            }
            let event = match receiver.recv().await {
                Ok(event) => event,
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    drop(receiver);
                    let (start, anew) = state.page.feed.open(&state)?;
                    receiver = anew;
                    start
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            };
            is_admitted().then_some((event, (None, receiver, state, is_admitted)))
        }))
    }
}

impl State {
    /// Ends a step of the history if it is time.
    fn end_step(&mut self, of: &PageState) -> Option<Step> {
        let tokens = of.pipeline.metrics.found_in_all();
        let Some(began) = self.step_began else {
            self.step_began = Some(Instant::now());
            lock(&of.page.history).begin(&of.pipeline.metrics, tokens);
            return None;
        };
        let took = began.elapsed();
        // The next second would be nearer to the step's end than this one.
        if took + PERIOD / 2 < Duration::from_secs(STEP) {
            return None;
        }
        self.step_began = Some(began + took);
        Some(lock(&of.page.history).end_step(&of.pipeline.metrics, tokens, took).clone())
    }
}

impl Totals {
    fn now(of: &PageState) -> Self {
        Self {
            ready: of.pipeline.fleet.ready_workers(),
            in_flight: of.metrics.requests_in_flight(),
            slots: of.slots.limit(),
        }
    }
}

fn event(name: &str, body: &impl Serialize) -> Bytes {
    let mut event = Vec::new();
    chiasm_api::sse::write_named(&mut event, name, body);
    event.into()
}
