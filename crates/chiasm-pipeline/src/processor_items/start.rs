//! The start of a processor, which all waiting requests share.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use chiasm_processor::{Greeting, Processor, ProcessorError, ProcessorOptions};
use tokio::sync::watch;
use tokio::time::Instant;

/// The time for which a failed start is not retried.
const FAILURE_TTL: Duration = Duration::from_secs(10);

type Outcome = Option<Result<Processor, ProcessorError>>;

/// A processor that starts on demand.
pub(super) struct Start {
    options: ProcessorOptions,
    /// The outcome of the last start, and the time at which that start began.
    last: Mutex<Option<(watch::Receiver<Outcome>, Instant)>>,
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
        let (outcome, _) = last.as_ref()?;
        outcome.borrow().as_ref()?.as_ref().ok().cloned()
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
        known.as_ref().map_or_else(|| Err(cancelled()), Clone::clone)
    }

    fn outcome(&self) -> watch::Receiver<Outcome> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((outcome, began)) = &*last {
            let has_failed = matches!(*outcome.borrow(), Some(Err(_)));
            if !has_failed || began.elapsed() < FAILURE_TTL {
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
            sender.send_replace(Some(result));
        });
        *last = Some((outcome.clone(), Instant::now()));
        outcome
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
