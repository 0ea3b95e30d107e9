//! The state that the page's routes and its feed share.

use std::sync::Arc;

use axum::http::HeaderMap;
use chiasm_pipeline::Pipeline;

use super::Page;
use crate::access::CurrentKeys;
use crate::draining::Draining;
use crate::metrics::Metrics;
use crate::slots::Slots;

/// The state that the page's routes and its feed share.
pub(crate) struct PageState {
    pub(crate) page: Arc<Page>,
    pub(crate) keys: Arc<CurrentKeys>,
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) draining: Draining,
}

impl PageState {
    /// Returns `true` if a request with these headers may see the page.
    pub(super) fn admits(&self, headers: &HeaderMap) -> bool {
        let keys = self.keys.current();
        keys.admits(headers) || self.page.sessions.has(headers, |key| keys.has_digest(key))
    }
}
