//! The live page at `/ui/`: the state of the fleet, the last requests with the reasons for their
//! routes, the transfers of media items, and the last quarter of an hour.
//!
//! Everything that the page shows is recorded here while requests are served, within bounds. Open
//! pages get it once a second by one stream of events. Without an open page only the minimum for
//! the next one is kept: a count for each request and, for some, the router's comparison.
//!
//! | module | is |
//! |---|---|
//! | `routes` | the page's paths |
//! | `state` | the state that routes and feed share |
//! | `session` | the sessions of browsers that have shown a key |
//! | `feed` | the events for open pages |
//! | `fleet` | the workers as pages show them |
//! | `requests` | the last requests, with the router's comparison for each |
//! | `media` | the transfers of media items, and the most frequent items |
//! | `history` | a quarter of an hour in steps of five seconds |
//! | `web` | the page itself: plain HTML, CSS and JavaScript |

mod feed;
mod fleet;
mod history;
mod media;
mod requests;
mod routes;
mod session;
mod state;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_backend::{JobItem, RequestId};
use chiasm_pipeline::{ExplainedPlan, RouteObserver};
use chiasm_router::Explanation;

use feed::Feed;
use history::History;
use media::FrequentItems;
pub(crate) use requests::{Outcome, TokenCounts};
use requests::{Plan, Requests};
pub(crate) use routes::router;
use session::Sessions;
pub(crate) use state::PageState;

/// The options of the live page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageOptions {
    /// `true` if clients use HTTPS only: browsers must not send the session cookie over anything
    /// else.
    pub secure: bool,
}

/// The state of the live page.
pub struct Page {
    sessions: Sessions,
    pub(crate) requests: Requests,
    frequent_items: Mutex<FrequentItems>,
    history: Mutex<History>,
    feed: Feed,
}

impl Page {
    /// Creates an empty page.
    pub fn new(options: PageOptions) -> Self {
        Self {
            sessions: Sessions::new(options.secure),
            requests: Requests::default(),
            frequent_items: Mutex::default(),
            history: Mutex::default(),
            feed: Feed::default(),
        }
    }

    /// Counts a request that was not answered completely, by cause.
    pub(crate) fn count_failure(&self, cause: &'static str) {
        lock(&self.history).count_failure(cause);
    }
}

impl RouteObserver for Page {
    fn should_explain(&self) -> bool {
        self.requests.should_explain()
    }

    fn record_explanation(
        &self,
        id: &RequestId,
        plans: &[ExplainedPlan<'_>],
        explanation: Explanation,
    ) -> Option<u64> {
        self.requests.add(id, plans.iter().map(Plan::from).collect(), explanation)
    }

    fn record_move(&self, number: u64) {
        self.requests.mark_moved(number);
    }

    fn record_sent(&self, items: &[JobItem]) {
        if !items.is_empty() {
            let mut frequent = lock(&self.frequent_items);
            items.iter().for_each(|item| frequent.count(item.hash, &item.modality));
        }
    }
}

/// Records the state of the server once a second and publishes it to open pages.
pub(crate) async fn update(state: Arc<PageState>) -> Infallible {
    let mut interval = tokio::time::interval(feed::TICK_INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        state.page.feed.publish(&state);
    }
}

/// Locks state that is only for display. Poison is ignored: a panic elsewhere has at worst left one
/// value wrong.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
