//! One processor for each release of vLLM in the fleet.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use chiasm_backend::VllmItems;
use chiasm_fleet::{PresentClass, PresentClasses};
use chiasm_media::ByteBudget;
use chiasm_processor::{ProcessorError, ProcessorOptions};
use chiasm_types::VllmVersion;
use tokio::sync::Semaphore;

use super::super::error::RequestError;
use super::{Helped, HelperOptions};
use crate::cpu::CpuPool;
use crate::metrics::PipelineMetrics;

/// vLLM's own processors of one served model. Items and prompts may differ from one release of vLLM
/// to another, so each worker is given those of its own release's processor.
pub struct Helpers {
    first: Arc<Helped>,
    others: Vec<Arc<Helped>>,
    /// Releases that workers were of for which there was no processor; none for workers that take
    /// nothing.
    missed: Mutex<BTreeSet<Option<VllmVersion>>>,
}

impl Helpers {
    /// Nothing is started before [`Self::started`] is called or an item is there.
    pub fn new(
        options: HelperOptions,
        cpu: &CpuPool,
        budget: &ByteBudget,
        metrics: &Arc<PipelineMetrics>,
    ) -> Self {
        let videos = Arc::new(Semaphore::new(options.concurrent_videos));
        let helped = |python: PathBuf| {
            let processor = ProcessorOptions { python, ..options.processor.clone() };
            let options = HelperOptions { processor, ..options.clone() };
            Arc::new(Helped::new(
                options,
                videos.clone(),
                cpu.clone(),
                budget.clone(),
                metrics.clone(),
            ))
        };
        Self {
            first: helped(options.processor.python.clone()),
            others: options.other_pythons.iter().cloned().map(helped).collect(),
            missed: Mutex::default(),
        }
    }

    /// Starts all processors that are not there yet, and waits for the first.
    ///
    /// # Errors
    /// Why the first can't be had.
    pub async fn started(&self) -> Result<(), ProcessorError> {
        self.others.iter().for_each(|other| other.start.begin());
        self.first.start.processor().await.map(drop)
    }

    /// Whether the model takes no media without a processor, and the first is not there yet.
    pub fn is_missed(&self) -> bool {
        self.first.is_missed()
    }

    /// Whether the model's conversations are written by vLLM's code. Waits for the processor if
    /// only that can tell.
    ///
    /// # Errors
    /// The processor has to be there, and is not.
    pub async fn writes_conversations(&self) -> Result<bool, RequestError> {
        self.first.writes_conversations().await
    }

    /// For each processor, the classes of workers that it makes items for; at least one.
    ///
    /// # Errors
    /// No worker is there, or none of a release whose processor is.
    pub(crate) async fn of_classes(
        &self,
        classes: &PresentClasses,
    ) -> Result<Vec<(&Arc<Helped>, PresentClasses)>, RequestError> {
        let mut left = classes.to_vec();
        let (mut helped, mut releases, mut failure) = (Vec::new(), Vec::new(), None);
        for helper in [&self.first].into_iter().chain(&self.others) {
            // The next one is started by who needs it.
            if left.is_empty() {
                break;
            }
            match helper.start.processor().await {
                Ok(processor) => {
                    let vllm = &processor.greeting().vllm;
                    let of_this: PresentClasses =
                        left.extract_if(.., |class| is_of(class, vllm)).collect();
                    if !of_this.is_empty() {
                        helped.push((helper, of_this));
                    }
                    releases.push(vllm.clone());
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if classes.is_empty() {
            return Err(RequestError::not_ready());
        }
        left.iter().for_each(|class| self.miss(class, &releases));
        match failure {
            _ if !helped.is_empty() => Ok(helped),
            Some(error) => Err(error.into()),
            None => {
                let releases = releases.join(" or ");
                let message = format!(
                    "no engine takes what the processor of vLLM {releases} makes (--processor-vllm; --take-tensors of agents)"
                );
                Err(ProcessorError::Gone(message).into())
            }
        }
    }

    /// Says once of each release that its workers get no items.
    fn miss(&self, class: &PresentClass, processors: &[String]) {
        let release = match class.class.vllm_items {
            VllmItems::Of(release) => Some(release),
            VllmItems::Any | VllmItems::None => None,
        };
        if !self.missed.lock().unwrap_or_else(PoisonError::into_inner).insert(release) {
            return;
        }
        let processors = processors.join(",");
        match release {
            Some(engines) => tracing::warn!(
                %engines,
                processors,
                "engines of this vLLM get nothing that vLLM's processor makes: theirs is not there (--processor-vllm)"
            ),
            None => tracing::warn!(
                "engines of some agents get nothing that vLLM's processor makes (--take-tensors)"
            ),
        }
    }
}

/// Whether workers of a class take the items of this vLLM's processor. Releases are compared and
/// not builds.
fn is_of(class: &PresentClass, vllm: &str) -> bool {
    match class.class.vllm_items {
        VllmItems::Any => true,
        VllmItems::Of(engine) => {
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
    fn releases_are_compared_and_not_builds() {
        let class = |vllm_items| {
            let class = PlanClass { vllm_items, ..fake_capabilities().class };
            let (max_model_len, max_batched_tokens, min_batched_tokens) = (1, 1, 1);
            PresentClass {
                id: PlanClassId(0),
                class,
                input: InputForm::Tokens,
                max_model_len,
                max_batched_tokens,
                min_batched_tokens,
            }
        };
        let engine = |version: &str| class(VllmItems::of_engine(&format!("vLLM {version}")));
        assert!(is_of(&engine("0.33.0"), "0.33.0+cpu"));
        assert!(!is_of(&engine("0.32.0"), "0.33.0"));
        assert!(!is_of(&engine("0.33.1"), "0.33.0"));
        assert!(is_of(&engine("dev"), "0.33.0"));
        assert!(is_of(&engine("0.33.0"), "dev"));
        assert!(is_of(&class(VllmItems::of_engine("fake")), "0.33.0"));
        assert!(!is_of(&class(VllmItems::None), "dev"));
    }
}
