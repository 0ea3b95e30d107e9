//! The observer of routes, and the entries under which it shows requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_backend::{JobItem, RequestId};
use chiasm_router::Explanation;
use chiasm_types::PlanClassId;

/// An observer of the workers that requests are sent to, such as the live page.
///
/// Its methods are called for each request, so they must cost next to nothing.
pub trait RouteObserver: Send + Sync {
    /// Returns `true` if the next route is to be explained.
    fn wants_explanation(&self) -> bool;

    /// Notes an explained route. Returns its number if it is kept.
    fn explained(
        &self,
        id: &RequestId,
        plans: &[ExplainedPlan<'_>],
        explanation: Explanation,
    ) -> Option<u64>;

    /// Notes that the request of this number went on to another worker.
    fn moved(&self, number: u64);

    /// Notes the media items of a request that was sent to a worker.
    fn sent(&self, items: &[JobItem]);
}

/// A prompt for workers of one class, as an explanation shows it.
#[derive(Clone, Copy, Debug)]
pub struct ExplainedPlan<'a> {
    /// The class.
    pub class: PlanClassId,
    /// Tokens of the prompt, which may be an estimate.
    pub prompt_tokens: usize,
    /// Media items in the prompt; empty where they are not known.
    pub items: &'a [JobItem],
}

/// The entries of one client's request: the latest entry of each of its prompts. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Entries(Option<Arc<Mutex<Vec<Option<u64>>>>>);

/// The latest entry of one prompt.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptEntry {
    entries: Entries,
    /// The index among the request's prompts.
    prompt: usize,
}

impl Entries {
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

    /// Marks all entries as moved: the request begins anew, elsewhere.
    pub fn begin_anew(&self, observer: &dyn RouteObserver) {
        self.take().into_iter().for_each(|number| observer.moved(number));
    }

    /// Takes the numbers of the latest entries.
    pub fn take(&self) -> Vec<u64> {
        let Some(latest) = &self.0 else { return Vec::new() };
        lock(latest).iter_mut().filter_map(Option::take).collect()
    }
}

impl PromptEntry {
    /// Notes that the prompt goes to a worker. `number` is its entry if the observer keeps it. The
    /// entry of an earlier attempt is marked as moved.
    pub(crate) fn routed(&self, observer: &dyn RouteObserver, number: Option<u64>) {
        let Some(latest) = &self.entries.0 else { return };
        let before =
            lock(latest).get_mut(self.prompt).and_then(|entry| std::mem::replace(entry, number));
        if let Some(before) = before {
            observer.moved(before);
        }
    }
}

/// Locks numbers, of which a panic elsewhere has left at worst one too many: poison is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
