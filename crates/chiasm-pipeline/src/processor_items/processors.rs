//! One processor for each release of vLLM in the fleet.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use chiasm_backend::VllmItems;
use chiasm_fleet::{PresentClass, PresentClasses};
use chiasm_media::ByteBudget;
use chiasm_metrics::PipelineMetrics;
use chiasm_processor::{ProcessorError, ProcessorOptions};
use chiasm_types::VllmVersion;

use super::super::error::RequestError;
use super::start::Start;
use super::{ReleaseProcessor, VideoSlots, VllmProcessorOptions, max_embeds};
use chiasm_cpu::CpuPool;

/// vLLM's own processors of one served model.
///
/// Items and prompts may differ between releases of vLLM, so each worker gets those of its own
/// release's processor.
pub struct VllmProcessors {
    first: Arc<ReleaseProcessor>,
    others: Vec<Arc<ReleaseProcessor>>,
    videos: Arc<VideoSlots>,
    /// The releases without a processor that were logged; `None` stands for workers that accept no
    /// items.
    logged_missing: Mutex<BTreeSet<Option<VllmVersion>>>,
}

impl VllmProcessors {
    /// Creates the processors. They start with [`Self::start_all`] or the first item.
    pub fn new(
        options: VllmProcessorOptions,
        cpu: &CpuPool,
        budget: &ByteBudget,
        metrics: &Arc<PipelineMetrics>,
    ) -> Self {
        let videos = Arc::new(VideoSlots::new(options.concurrent_videos));
        let build = |python: PathBuf| {
            let processor = ProcessorOptions { python, ..options.processor.clone() };
            let options = VllmProcessorOptions { processor, ..options.clone() };
            Arc::new(ReleaseProcessor::new(
                options,
                videos.clone(),
                cpu.clone(),
                budget.clone(),
                metrics.clone(),
            ))
        };
        Self {
            first: build(options.processor.python.clone()),
            others: options.other_pythons.iter().cloned().map(build).collect(),
            videos,
            logged_missing: Mutex::default(),
        }
    }

    /// Returns the options of the first processor, which the others share but for the Python.
    pub(crate) fn options(&self) -> &VllmProcessorOptions {
        &self.first.options
    }

    /// Returns the slots in which videos are decoded.
    pub(crate) fn video_slots(&self) -> &VideoSlots {
        &self.videos
    }

    /// Returns the processor that serves the workers of a class.
    ///
    /// # Errors
    /// Returns the errors of [`Self::by_release`].
    pub(crate) async fn for_class(
        &self,
        class: &PresentClass,
    ) -> Result<Arc<ReleaseProcessor>, RequestError> {
        let serving = self.by_release(&[class.clone()].into()).await?;
        let (processor, _) = serving.first().ok_or_else(RequestError::not_ready)?;
        Ok(Arc::clone(processor))
    }

    /// Returns `true` if a processor serves the workers of a class, or may do so once it has
    /// started. While none is running, one that failed may: a worker that holds an item needs no
    /// processor.
    pub(crate) fn may_serve(&self, class: &PresentClass) -> bool {
        let starts = || [&self.first].into_iter().chain(&self.others).map(|release| &release.start);
        let is_any_running = starts().any(Start::is_running);
        starts().any(|start| match start.running() {
            Some(processor) => is_served_by(class, &processor.greeting().vllm),
            None => !(is_any_running && start.has_failed()),
        })
    }

    /// Waits for the start of the processors if only that tells which of several releases they
    /// serve.
    pub(crate) async fn know_releases(&self, classes: &PresentClasses) {
        let mut releases = classes.iter().map(|class| class.class.vllm_items);
        let first = releases.next();
        if releases.any(|release| Some(release) != first) {
            // Without a processor, the caller's own call fails with the reason.
            let _ = self.by_release(classes).await;
        }
    }

    /// Returns the maximum number of embeddings of one item that the workers of a class can encode
    /// at once, as their processor reports it; `None` if that processor is not running yet.
    pub(crate) fn max_embeds(&self, class: &PresentClass) -> Option<usize> {
        let mut running = [&self.first].into_iter().chain(&self.others).filter_map(|release| {
            let processor = release.start.running()?;
            let greeting = processor.greeting();
            is_served_by(class, &greeting.vllm).then(|| max_embeds(greeting))
        });
        running.next()
    }

    /// Starts all processors that are not running yet, and waits for the first one.
    ///
    /// # Errors
    /// Returns an error if the first processor can't be started.
    pub async fn start_all(&self) -> Result<(), ProcessorError> {
        self.others.iter().for_each(|other| other.start.begin());
        self.first.start.processor().await.map(drop)
    }

    /// Returns `true` if the processor is required and not running yet.
    pub fn is_missing(&self) -> bool {
        self.first.is_missing()
    }

    /// Returns `true` if vLLM's code renders the model's conversations. Waits for the processor if
    /// only the processor knows.
    ///
    /// # Errors
    /// Returns an error if a required processor is unavailable.
    pub async fn renders_conversations(&self) -> Result<bool, RequestError> {
        self.first.renders_conversations().await
    }

    /// Returns the processors that serve any of `classes`, each with the classes that it serves.
    /// The result is never empty.
    ///
    /// # Errors
    /// Returns an error if there is no worker, or none whose release has a processor.
    pub(crate) async fn by_release(
        &self,
        classes: &PresentClasses,
    ) -> Result<Vec<(&Arc<ReleaseProcessor>, PresentClasses)>, RequestError> {
        let mut remaining = classes.to_vec();
        let mut serving = Vec::new();
        let mut releases = Vec::new();
        let mut failure = None;
        for release in [&self.first].into_iter().chain(&self.others) {
            // Does not start processors that are not needed.
            if remaining.is_empty() {
                break;
            }
            match release.start.processor().await {
                Ok(processor) => {
                    let vllm = &processor.greeting().vllm;
                    let served: PresentClasses =
                        remaining.extract_if(.., |class| is_served_by(class, vllm)).collect();
                    if !served.is_empty() {
                        serving.push((release, served));
                    }
                    releases.push(vllm.clone());
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if classes.is_empty() {
            return Err(RequestError::not_ready());
        }
        // A processor that failed to start may be of their release.
        if failure.is_none() {
            remaining.iter().for_each(|class| self.log_missing(class, &releases));
        }
        if !serving.is_empty() {
            return Ok(serving);
        }
        if let Some(error) = failure {
            return Err(error.into());
        }
        let releases = releases.join(" or ");
        let message = format!(
            "no engine accepts the items of the processor of vLLM {releases} \
             (--processor-vllm; --take-tensors of agents)"
        );
        Err(ProcessorError::Unavailable(message).into())
    }

    /// Logs once per release that its workers get no items.
    fn log_missing(&self, class: &PresentClass, processors: &[String]) {
        let release = match class.class.vllm_items {
            VllmItems::Release(release) => Some(release),
            VllmItems::Any | VllmItems::None => None,
        };
        if !self.logged_missing.lock().unwrap_or_else(PoisonError::into_inner).insert(release) {
            return;
        }
        let processors = processors.join(",");
        match release {
            Some(engines) => tracing::warn!(
                %engines,
                processors,
                "engines of this vLLM release get no items of vLLM's processor: \
                 no processor has their release (--processor-vllm)"
            ),
            None => tracing::warn!(
                "engines of some agents get no items of vLLM's processor (--take-tensors)"
            ),
        }
    }
}

/// Returns `true` if workers of a class accept the items of this vLLM's processor. Compares
/// releases, not builds.
fn is_served_by(class: &PresentClass, vllm: &str) -> bool {
    match class.class.vllm_items {
        VllmItems::Any => true,
        VllmItems::Release(engine) => {
            VllmVersion::parse(vllm).is_none_or(|processor| engine == processor)
        }
        VllmItems::None => false,
    }
}

#[cfg(test)]
mod tests {
    use chiasm_backend::fake::fake_capabilities;
    use chiasm_backend::{InputForm, PlanClass};
    use chiasm_types::PlanClassId;

    use super::*;

    #[test]
    fn releases_are_compared_without_builds() {
        let class = |vllm_items| {
            let class = PlanClass { vllm_items, ..fake_capabilities().class };
            PresentClass {
                id: PlanClassId(0),
                class,
                input: InputForm::Tokens,
                max_model_len: 1,
                max_batched_tokens: 1,
                min_batched_tokens: 1,
            }
        };
        let engine = |version: &str| class(VllmItems::for_engine(&format!("vLLM {version}")));
        assert!(is_served_by(&engine("0.33.0"), "0.33.0+cpu"));
        assert!(!is_served_by(&engine("0.32.0"), "0.33.0"));
        assert!(!is_served_by(&engine("0.33.1"), "0.33.0"));
        assert!(is_served_by(&engine("dev"), "0.33.0"));
        assert!(is_served_by(&engine("0.33.0"), "dev"));
        assert!(is_served_by(&class(VllmItems::for_engine("fake")), "0.33.0"));
        assert!(!is_served_by(&class(VllmItems::None), "dev"));
    }
}
