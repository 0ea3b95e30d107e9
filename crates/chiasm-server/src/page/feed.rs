//! The events for open pages: the whole state when a page opens, then the changes once a second.

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
use super::history::{STEP_SECONDS, Step};
use super::media::Media;
use super::requests::Summary;
use super::{PageState, lock};

/// The interval between two events.
pub(super) const TICK_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of open pages.
const MAX_PAGES: usize = 16;
/// The maximum number of events queued for a slow page. A page that misses any gets the whole state
/// again.
const MAX_QUEUED_EVENTS: usize = 4;

/// The feed of all open pages. Each event is serialized once for all of them.
#[derive(Default)]
pub(super) struct Feed {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` before the first page is opened, and when the process is about to end.
    sender: Option<broadcast::Sender<Bytes>>,
    has_ended: bool,
    /// The workers as they were last sent to pages; empty while no page is open.
    rows: BTreeMap<WorkerId, Row>,
    step_start: Option<Instant>,
}

/// The whole state, for a page that opens.
#[derive(Serialize)]
struct Start<'a> {
    model: &'a str,
    version: &'static str,
    /// `true` if the server has API keys, so that sessions exist and can be ended.
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
    /// The ids of workers that have left.
    gone: Vec<String>,
    requests: Vec<Summary>,
    step: Option<Step>,
    media: Media,
    totals: Totals,
}

#[derive(Serialize)]
struct Totals {
    /// Workers that answer and can take requests.
    ready: usize,
    in_flight: i64,
    /// Requests that may be in flight at once.
    slots: usize,
}

impl Feed {
    /// Records the current state and publishes the changes to open pages.
    pub(super) fn publish(&self, server: &PageState) {
        let mut state = lock(&self.state);
        let step = state.end_step(server);
        let requests = server.page.requests.take_changed();
        if server.draining.has_begun() {
            // An open stream would delay the end of the process.
            state.sender = None;
            state.has_ended = true;
        }
        let is_watched = state.sender.as_ref().is_some_and(|sender| sender.receiver_count() > 0);
        server.page.requests.set_watched(is_watched);
        if !is_watched {
            state.rows.clear();
            return;
        }
        let current = rows(&server.pipeline);
        let changed =
            current.iter().filter(|(id, row)| state.rows.get(id) != Some(row)).map(|(_, row)| row);
        let gone =
            state.rows.keys().filter(|id| !current.contains_key(id)).map(ToString::to_string);
        let tick = Tick {
            rows: changed.collect(),
            gone: gone.collect(),
            requests,
            step,
            media: Media::new(&server.pipeline, &lock(&server.page.frequent_items)),
            totals: Totals::new(server),
        };
        let event = event("tick", &tick);
        state.rows = current;
        if let Some(sender) = &state.sender {
            // Fails if the last page has just closed.
            let _ = sender.send(event);
        }
    }

    /// Returns the event with the whole state, and a receiver of later events. `None` if too many
    /// pages are open or the process is about to end.
    fn open(&self, server: &PageState) -> Option<(Bytes, broadcast::Receiver<Bytes>)> {
        let mut state = lock(&self.state);
        if state.has_ended {
            return None;
        }
        let sender = state.sender.get_or_insert_with(|| broadcast::Sender::new(MAX_QUEUED_EVENTS));
        if sender.receiver_count() >= MAX_PAGES {
            return None;
        }
        let receiver = sender.subscribe();
        if state.rows.is_empty() {
            state.rows = rows(&server.pipeline);
        }
        let start = Start {
            model: &server.pipeline.model.name,
            version: env!("CARGO_PKG_VERSION"),
            has_keys: server.keys.current().are_required(),
            rows: state.rows.values().collect(),
            requests: server.page.requests.all(),
            steps: lock(&server.page.history).steps().iter().cloned().collect(),
            media: Media::new(&server.pipeline, &lock(&server.page.frequent_items)),
            totals: Totals::new(server),
        };
        Some((event("start", &start), receiver))
    }

    /// Returns the events for one more page. They end when `is_admitted` returns `false`: after a
    /// logout, at the end of the session, or when its key was removed. `None` in the same cases as
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
                    let (start, new_receiver) = state.page.feed.open(&state)?;
                    receiver = new_receiver;
                    start
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            };
            is_admitted().then_some((event, (None, receiver, state, is_admitted)))
        }))
    }
}

impl State {
    /// Ends the current step of the history if its time is over.
    fn end_step(&mut self, server: &PageState) -> Option<Step> {
        let tokens = server.pipeline.metrics.total_prompt_tokens();
        let Some(start) = self.step_start else {
            self.step_start = Some(Instant::now());
            lock(&server.page.history).begin(&server.pipeline.metrics, tokens);
            return None;
        };
        let duration = start.elapsed();
        // Wait for the next tick if it is closer to the step's end than this one.
        if duration + TICK_INTERVAL / 2 < Duration::from_secs(STEP_SECONDS) {
            return None;
        }
        self.step_start = Some(start + duration);
        let mut history = lock(&server.page.history);
        Some(history.end_step(&server.pipeline.metrics, tokens, duration).clone())
    }
}

impl Totals {
    fn new(server: &PageState) -> Self {
        Self {
            ready: server.pipeline.fleet.ready_workers(),
            in_flight: server.metrics.requests_in_flight(),
            slots: server.slots.limit(),
        }
    }
}

fn event(name: &str, body: &impl Serialize) -> Bytes {
    let mut event = Vec::new();
    chiasm_api::sse::write_named(&mut event, name, body);
    event.into()
}
