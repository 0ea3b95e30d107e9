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
use super::{Page, lock};
use crate::frontend::Frontend;

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
    pub(super) fn tell(&self, frontend: &Frontend, page: &Page) {
        let mut state = lock(&self.state);
        let step = state.end_step(frontend, page);
        let requests = page.requests.take_changed();
        if frontend.is_draining() {
            // A stream that goes on would hold up the end of the process.
            state.told = None;
            state.has_ended = true;
        }
        let is_watched = state.told.as_ref().is_some_and(|told| told.receiver_count() > 0);
        page.requests.set_watched(is_watched);
        if !is_watched {
            state.rows.clear();
            return;
        }
        let now = rows(&frontend.pipeline);
        let changed = now.iter().filter(|(id, row)| state.rows.get(id) != Some(row)).map(|(_, row)| row);
        let gone = state.rows.keys().filter(|id| !now.contains_key(id)).map(ToString::to_string);
        let tick = Tick {
            rows: changed.collect(),
            gone: gone.collect(),
            requests,
            step,
            media: Media::of(frontend, &lock(&page.repeated)),
            totals: Totals::of(frontend),
        };
        let event = event("tick", &tick);
        state.rows = now;
        if let Some(told) = &state.told {
            // The last page may have closed in this moment.
            let _ = told.send(event);
        }
    }

    /// Everything as it is now, and what is told from then on. `None` when enough pages are open, or the process is about to end.
    fn open(&self, frontend: &Frontend, page: &Page) -> Option<(Bytes, broadcast::Receiver<Bytes>)> {
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
            state.rows = rows(&frontend.pipeline);
        }
        let start = Start {
            model: &frontend.pipeline.model.name,
            version: env!("CARGO_PKG_VERSION"),
            has_keys: frontend.keys.current().are_asked_for(),
            rows: state.rows.values().collect(),
            requests: page.requests.all(),
            steps: lock(&page.history).steps().iter().cloned().collect(),
            media: Media::of(frontend, &lock(&page.repeated)),
            totals: Totals::of(frontend),
        };
        Some((event("start", &start), receiver))
    }

    /// Returns the events for one more page. They end when `is_admitted` turns false: after a
    /// logout, at the end of the session, or when its key was removed. `None` in the cases of
    /// [`Feed::open`].
    pub(super) fn follow<A>(
        frontend: &Arc<Frontend>,
        is_admitted: A,
    ) -> Option<impl Stream<Item = Bytes> + Send + use<A>>
    where
        A: Fn() -> bool + Send + 'static,
    {
        let frontend = frontend.clone();
        let page = frontend.page.as_ref()?;
        let (start, receiver) = page.feed.open(&frontend, page)?;
        let opened = (Some(start), receiver, frontend, is_admitted);
        Some(stream::unfold(opened, |(start, mut receiver, frontend, is_admitted)| async move {
            if let Some(start) = start {
                return Some((start, (None, receiver, frontend, is_admitted)));
            }
            let event = match receiver.recv().await {
                Ok(event) => event,
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    drop(receiver);
                    let page = frontend.page.as_ref()?;
                    let (start, anew) = page.feed.open(&frontend, page)?;
                    receiver = anew;
                    start
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            };
            is_admitted().then_some((event, (None, receiver, frontend, is_admitted)))
        }))
    }
}

impl State {
    /// Ends a step of the history if it is time.
    fn end_step(&mut self, frontend: &Frontend, page: &Page) -> Option<Step> {
        let tokens = frontend.pipeline.metrics.found_in_all();
        let Some(began) = self.step_began else {
            self.step_began = Some(Instant::now());
            lock(&page.history).begin(&frontend.pipeline.metrics, tokens);
            return None;
        };
        let took = began.elapsed();
        // The next second would be nearer to the step's end than this one.
        if took + PERIOD / 2 < Duration::from_secs(STEP) {
            return None;
        }
        self.step_began = Some(began + took);
        Some(lock(&page.history).end_step(&frontend.pipeline.metrics, tokens, took).clone())
    }
}

impl Totals {
    fn of(frontend: &Frontend) -> Self {
        Self {
            ready: frontend.pipeline.fleet.ready_workers(),
            in_flight: frontend.metrics.requests_in_flight(),
            slots: frontend.slots.limit(),
        }
    }
}

fn event(name: &str, body: &impl Serialize) -> Bytes {
    let mut event = Vec::new();
    chiasm_api::sse::write_named(&mut event, name, body);
    event.into()
}
