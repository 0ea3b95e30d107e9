//! Whether `chiasm serve` has vLLM's own processor, and how that is started.

use std::path::Path;

use chiasm_processor::{ProcessorOptions, python_of};
use chiasm_server::HelperOptions;
use chiasm_server::model::{NativeImages, ServedModel};
use serde_json::{Map, Value};

use crate::cli::{ProcessorArgs, ProcessorChoice, ServeArgs};
use crate::error::CliError;

/// Settings of config.json that every model with them takes more than text with.
const OF_MEDIA_MODELS: [&str; 3] = ["audio_config", "thinker_config", "vision_config"];
/// Words in the names of settings that such models have, though others may have them too.
const MEDIA_WORDS: [&str; 7] = ["audio", "image", "img", "mm_", "speech", "video", "vision"];

/// Who makes the images of a model. One that is run by other code than vLLM's own of it takes other tensors than Chiasm makes.
///
/// # Errors
/// [`CliError::Usage`] if such a model is to have them made by Chiasm.
pub(crate) fn native_images(args: &ProcessorArgs, foreign_model: bool) -> Result<NativeImages, CliError> {
    match args.processor {
        ProcessorChoice::Native if foreign_model => Err(CliError::Usage(
            "--processor native makes tensors for vLLM's own model classes: leave out --model-impl after --".to_owned(),
        )),
        ProcessorChoice::Native => Ok(NativeImages::Required),
        ProcessorChoice::Auto if !foreign_model => Ok(NativeImages::WhereSupported),
        ProcessorChoice::Auto | ProcessorChoice::Vllm => Ok(NativeImages::Never),
    }
}

/// Whether the model takes media that Chiasm does not make itself, for certain; and whether it seems so.
fn needs_help(model: &ServedModel, dir: &Path) -> (bool, bool) {
    let config = std::fs::read(dir.join("config.json")).unwrap_or_default();
    let config: Map<String, Value> = serde_json::from_slice(&config).unwrap_or_default();
    let certainly = OF_MEDIA_MODELS.iter().any(|key| config.contains_key(*key));
    let seemingly = config.keys().any(|key| MEDIA_WORDS.iter().any(|word| key.contains(word)));
    (model.vision.is_none() && certainly, model.vision.is_none() && (certainly || seemingly))
}

/// How vLLM's own processor is started; `None` without it. `vllm_flags` are those of the engines.
///
/// # Errors
/// [`CliError::Usage`] if there has to be one and there is no Python for it.
pub(crate) fn options(
    args: &ServeArgs,
    model: &ServedModel,
    vllm_flags: &[String],
) -> Result<Option<HelperOptions>, CliError> {
    let ProcessorArgs { processor, .. } = args.processor;
    if processor == ProcessorChoice::Native {
        return Ok(None);
    }
    let (certainly, seemingly) = needs_help(model, &args.model);
    let required = processor == ProcessorChoice::Vllm || certainly;
    let python = match python_of(&args.engines.vllm) {
        Ok(python) => python,
        Err(error) if required => {
            let message = "Chiasm has no code of its own for this model's media, and needs vLLM's processor";
            return Err(CliError::Usage(format!("{message}: {error} (--vllm)")));
        }
        Err(error) => {
            tracing::debug!(%error, "videos, audio and rare formats of images are not taken");
            return Ok(None);
        }
    };
    let of = &args.processor;
    let children = of.processors.map_or_else(default_children, |count| count as usize);
    Ok(Some(HelperOptions {
        processor: ProcessorOptions {
            python,
            model: args.model.clone(),
            vllm_flags: vllm_flags.to_vec(),
            children,
            queue: of.processor_queue as usize,
            timeout: of.processor_timeout,
            startup_timeout: args.engines.startup_timeout,
            item_bytes: of.processor_item_bytes,
            address_space: of.processor_memory_bytes,
            sandbox: of.processor_sandbox.into(),
        },
        required,
        at_start: required || seemingly,
        trust_request_kwargs: of.trust_request_mm_kwargs,
        concurrent_videos: of.max_concurrent_videos.map_or(children, |count| count as usize),
    }))
}

/// The async threads and the engines need a core too.
fn default_children() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() - 1).max(1)
}
