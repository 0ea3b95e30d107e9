//! The processor's start, once for all who wait for it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use chiasm_processor::{Greeting, Processor, ProcessorError, ProcessorOptions};
use tokio::sync::watch;
use tokio::time::Instant;

/// How long a start that has failed is not tried again.
const FAILURES_LAST: Duration = Duration::from_secs(10);

type Outcome = Option<Result<Processor, ProcessorError>>;

pub(super) struct Start {
    options: ProcessorOptions,
    last: Mutex<Option<(watch::Receiver<Outcome>, Instant)>>,
}

impl Start {
    pub(super) fn new(options: ProcessorOptions) -> Self {
        Self { options, last: Mutex::default() }
    }

    pub(super) fn is_there(&self) -> bool {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().is_some_and(|(outcome, _)| matches!(*outcome.borrow(), Some(Ok(_))))
    }

    /// Starts the processor if it was not, and waits for nothing.
    pub(super) fn begin(&self) {
        drop(self.outcome());
    }

    /// The processor, started if it was not. Whoever gives up waiting does not end the start.
    pub(super) async fn processor(&self) -> Result<Processor, ProcessorError> {
        let mut outcome = self.outcome();
        let gone = || ProcessorError::Gone("its start was given up".to_owned());
        let known = outcome.wait_for(Option::is_some).await.map_err(|_| gone())?;
        known.as_ref().map_or_else(|| Err(gone()), Clone::clone)
    }

    fn outcome(&self) -> watch::Receiver<Outcome> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((outcome, begun)) = &*last {
            let failed = matches!(*outcome.borrow(), Some(Err(_)));
            if !failed || begun.elapsed() < FAILURES_LAST {
                return outcome.clone();
            }
        }
        let (sender, outcome) = watch::channel(None);
        let options = self.options.clone();
        tokio::spawn(async move {
            let begun = Instant::now();
            let started = Processor::start(options).await;
            match &started {
                Ok(processor) => tell(processor.greeting(), begun.elapsed()),
                Err(error) => tracing::warn!(%error, "vLLM's processor could not be started"),
            }
            sender.send_replace(Some(started));
        });
        *last = Some((outcome.clone(), Instant::now()));
        outcome
    }
}

/// Tells who is there, and what is not as its users may think.
fn tell(greeting: &Greeting, took: Duration) {
    let Greeting { vllm, limits, renderer, writes_conversations, missing, sandbox, .. } = greeting;
    let modalities: Vec<_> = limits.keys().map(String::as_str).collect();
    let (modalities, seconds) = (modalities.join(","), took.as_secs_f32());
    let conversations = if *writes_conversations { renderer } else { "by the chat template" };
    tracing::info!(%vllm, modalities, conversations, sandbox, seconds, "vLLM's processor is ready");
    if !sandbox {
        tracing::warn!(
            "vLLM's processor reads files of requests without a lock around it (--processor-sandbox)"
        );
    }
    if !missing.is_empty() {
        let missing = missing.join(",");
        tracing::warn!(
            missing,
            "its Python can't read all recordings: pip install vllm[audio] there"
        );
    }
}
