//! The start of a processor, which all waiting requests share.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use chiasm_processor::{Greeting, Processor, ProcessorError, ProcessorOptions};
use tokio::sync::watch;
use tokio::time::Instant;

/// The time for which a failed start is not retried.
const FAILURE_TTL: Duration = Duration::from_secs(10);

/// The outcome of a start, and the time at which it ended.
type Outcome = Option<(Result<Processor, ProcessorError>, Instant)>;

/// A processor that starts on demand.
pub(super) struct Start {
    options: ProcessorOptions,
    /// The outcome of the last start.
    last: Mutex<Option<watch::Receiver<Outcome>>>,
}

impl Start {
    pub(super) fn new(options: ProcessorOptions) -> Self {
        Self { options, last: Mutex::default() }
    }

    /// Returns `true` if the processor has started.
    pub(super) fn is_running(&self) -> bool {
        self.running().is_some()
    }

    /// Returns the processor if it has started.
    pub(super) fn running(&self) -> Option<Processor> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = last.as_ref()?.borrow();
        let (result, _) = outcome.as_ref()?;
        result.as_ref().ok().cloned()
    }

    /// Returns `true` if the last start failed and is not retried yet.
    pub(super) fn has_failed(&self) -> bool {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().is_some_and(has_failed)
    }

    /// Starts the processor unless it was started, without waiting for it.
    pub(super) fn begin(&self) {
        drop(self.outcome());
    }

    /// Returns the processor, started if necessary. Dropping the future does not cancel the start.
    ///
    /// # Errors
    /// Returns the error of the last start.
    pub(super) async fn processor(&self) -> Result<Processor, ProcessorError> {
        let mut outcome = self.outcome();
        let cancelled =
            || ProcessorError::Unavailable("the start of the processor was cancelled".to_owned());
        let known = outcome.wait_for(Option::is_some).await.map_err(|_| cancelled())?;
        known.as_ref().map_or_else(|| Err(cancelled()), |(result, _)| result.clone())
    }

    fn outcome(&self) -> watch::Receiver<Outcome> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(outcome) = &*last {
            let is_failure = matches!(*outcome.borrow(), Some((Err(_), _)));
            if !is_failure || has_failed(outcome) {
                return outcome.clone();
            }
        }
        let (sender, outcome) = watch::channel(None);
        let options = self.options.clone();
        tokio::spawn(async move {
            let began = Instant::now();
            let result = Processor::start(options).await;
            match &result {
                Ok(processor) => log_started(processor.greeting(), began.elapsed()),
                Err(error) => tracing::warn!(%error, "can't start vLLM's processor"),
            }
            sender.send_replace(Some((result, Instant::now())));
        });
        *last = Some(outcome.clone());
        outcome
    }
}

/// Returns `true` if a start failed so recently that it is not retried.
fn has_failed(outcome: &watch::Receiver<Outcome>) -> bool {
    match &*outcome.borrow() {
        Some((Err(_), ended)) => ended.elapsed() < FAILURE_TTL,
        _ => false,
    }
}

/// Logs a started processor, and warns about its limitations.
fn log_started(greeting: &Greeting, took: Duration) {
    let Greeting { vllm, limits, renderer, writes_conversations, missing, sandbox, .. } = greeting;
    let modalities: Vec<_> = limits.keys().map(String::as_str).collect();
    let modalities = modalities.join(",");
    let seconds = took.as_secs_f32();
    let conversations = if *writes_conversations { renderer } else { "by the chat template" };
    tracing::info!(%vllm, modalities, conversations, sandbox, seconds, "vLLM's processor is ready");
    if !sandbox {
        tracing::warn!(
            "vLLM's processor reads files of requests outside of a sandbox (--processor-sandbox)"
        );
    }
    if !missing.is_empty() {
        let missing = missing.join(",");
        tracing::warn!(
            missing,
            "the Python of vLLM's processor lacks packages for some recordings: \
             install vllm[audio] there"
        );
    }
}
