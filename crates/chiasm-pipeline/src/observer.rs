//! The observer of routes, and its entries for a request's prompts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_backend::{JobItem, RequestId};
use chiasm_router::Explanation;
use chiasm_types::PlanClassId;

/// An observer of routes, such as the live page.
///
/// Its methods are called for each request, so they must be cheap.
pub trait RouteObserver: Send + Sync {
    /// Returns `true` if the observer needs an explanation of the next route.
    fn should_explain(&self) -> bool;

    /// Records an explained route. Returns the number of its entry, if the observer keeps one.
    fn record_explanation(
        &self,
        id: &RequestId,
        plans: &[ExplainedPlan<'_>],
        explanation: Explanation,
    ) -> Option<u64>;

    /// Records that the request of this entry moved to another worker.
    fn record_move(&self, number: u64);

    /// Records the media items of a request that was sent to a worker.
    fn record_sent(&self, items: &[JobItem]);
}

/// A prompt for workers of one class, in an explanation of its route.
#[derive(Clone, Copy, Debug)]
pub struct ExplainedPlan<'a> {
    /// The class.
    pub class: PlanClassId,
    /// The number of prompt tokens, which may be an estimate.
    pub prompt_tokens: usize,
    /// The prompt's media items; empty if they are unknown.
    pub items: &'a [JobItem],
}

/// The latest entry of each prompt of one client request. Clones share the entries.
#[derive(Clone, Debug, Default)]
pub struct PageEntries(Option<Arc<Mutex<Vec<Option<u64>>>>>);

/// The latest entry of one prompt.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptEntry {
    entries: PageEntries,
    /// The index among the request's prompts.
    prompt: usize,
}

impl PageEntries {
    /// Creates the entries of a request that an observer may show.
    pub fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// Adds a prompt to the request.
    pub(crate) fn add_prompt(&self) -> PromptEntry {
        let Some(latest) = &self.0 else { return PromptEntry::default() };
        let mut latest = lock(latest);
        latest.push(None);
        PromptEntry { entries: self.clone(), prompt: latest.len() - 1 }
    }

    /// Marks all entries as moved, because the request starts again elsewhere.
    pub fn restart(&self, observer: &dyn RouteObserver) {
        self.take().into_iter().for_each(|number| observer.record_move(number));
    }

    /// Takes the numbers of the latest entries.
    pub fn take(&self) -> Vec<u64> {
        let Some(latest) = &self.0 else { return Vec::new() };
        lock(latest).iter_mut().filter_map(Option::take).collect()
    }
}

impl PromptEntry {
    /// Records that the prompt was routed. `number` is the entry of the route, if the observer
    /// keeps one. Marks the entry of an earlier attempt as moved.
    pub(crate) fn set_routed(&self, observer: &dyn RouteObserver, number: Option<u64>) {
        let Some(latest) = &self.entries.0 else { return };
        let previous =
            lock(latest).get_mut(self.prompt).and_then(|entry| std::mem::replace(entry, number));
        if let Some(previous) = previous {
            observer.record_move(previous);
        }
    }
}

/// Locks entries. Poison is ignored: a panic elsewhere leaves at worst one entry too many.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
