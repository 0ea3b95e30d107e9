//! The live page at `/ui/`: what the fleet does now, where the last requests went and why, how
//! media items travelled, and the last quarter of an hour.
//!
//! Everything that it shows is noted here while requests are served, within bounds, and told to
//! open pages once a second by one stream of events. Without an open page only what is needed to
//! begin with is kept: a count for each request and, for some, what the router compared.
//!
//! | module | is |
//! |---|---|
//! | `routes` | its paths |
//! | `state` | the state that routes and feed share |
//! | `session` | the cookie of whoever has shown a key |
//! | `feed` | what open pages are told |
//! | `fleet` | the workers, as they are told of |
//! | `requests` | the last requests, with what the router compared for them |
//! | `media` | how media items travelled, and which come again and again |
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
use media::Repeated;
pub(crate) use requests::{Found, Outcome};
use requests::{Plan, Requests};
pub(crate) use routes::router;
use session::Sessions;
pub(crate) use state::PageState;

/// The options of the live page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageOptions {
    /// Clients come by HTTPS alone, so that the cookie of a session must not be sent by anything
    /// else.
    pub secure: bool,
}

/// The state of the live page.
pub struct Page {
    sessions: Sessions,
    pub(crate) requests: Requests,
    repeated: Mutex<Repeated>,
    history: Mutex<History>,
    feed: Feed,
}

impl Page {
    /// Creates an empty page.
    pub fn new(options: PageOptions) -> Self {
        Self {
            sessions: Sessions::new(options.secure),
            requests: Requests::default(),
            repeated: Mutex::default(),
            history: Mutex::default(),
            feed: Feed::default(),
        }
    }

    /// A request ended otherwise than its client had hoped, for a reason of this name.
    pub(crate) fn failed(&self, cause: &'static str) {
        lock(&self.history).failed(cause);
    }
}

impl RouteObserver for Page {
    fn wants_explanation(&self) -> bool {
        self.requests.wants_next()
    }

    fn explained(
        &self,
        id: &RequestId,
        plans: &[ExplainedPlan<'_>],
        explanation: Explanation,
    ) -> Option<u64> {
        self.requests.sent(id, plans.iter().map(Plan::from).collect(), explanation)
    }

    fn moved(&self, number: u64) {
        self.requests.moved(number);
    }

    fn sent(&self, items: &[JobItem]) {
        if !items.is_empty() {
            let mut repeated = lock(&self.repeated);
            items.iter().for_each(|item| repeated.saw(item));
        }
    }
}

/// Notes the state of everything once a second, and tells the open pages.
pub(crate) async fn keep(state: Arc<PageState>) -> Infallible {
    let mut seconds = tokio::time::interval(feed::PERIOD);
    seconds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        seconds.tick().await;
        state.page.feed.tell(&state);
    }
}

/// Locks counts. A panic elsewhere has left at worst one of them wrong, so poison is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
