//! The settings of vLLM's own processor for `chiasm serve` and `chiasm agent`, and the decision
//! whether to start it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use chiasm_pipeline::VllmProcessorOptions;
use chiasm_pipeline::model::{NativeImages, ServedModel};
use chiasm_processor::{ItemLimits, ProcessorOptions, find_python};
use serde_json::{Map, Value};

use crate::cli::{ProcessorChoice, ServeArgs};
use crate::error::CliError;
use crate::free_memory::free_memory;
use crate::vllm_flags::VllmFlags;

/// The minimum time between two starts of vLLM's processor.
const RESTART_PAUSE: Duration = Duration::from_secs(5);
/// The keys of config.json that only models with media inputs have.
const MEDIA_CONFIG_KEYS: [&str; 3] = ["audio_config", "thinker_config", "vision_config"];
/// Words in the names of keys that suggest media inputs, though text models may have them, too.
const MEDIA_KEY_WORDS: [&str; 7] = ["audio", "image", "img", "mm_", "speech", "video", "vision"];

/// Decides whether Chiasm itself makes the image tensors of the model. It can't if engines run the
/// model with code other than vLLM's own class, which takes other tensors.
///
/// # Errors
/// [`CliError::Usage`] if `--processor native` is given for such a model.
pub(crate) fn native_images(args: &ServeArgs, flags: &VllmFlags) -> Result<NativeImages, CliError> {
    let advice = if flags.foreign_model {
        Some("leave out --model-impl after --")
    } else if reads_mistral_config(flags, args) {
        Some("give --config-format hf after --, because engines read Mistral's own files otherwise")
    } else {
        None
    };
    match (args.processor.processor, advice) {
        (ProcessorChoice::Native, Some(advice)) => Err(CliError::Usage(format!(
            "--processor native only supports vLLM's own model classes in the format of \
             transformers: {advice}"
        ))),
        (ProcessorChoice::Native, None) => Ok(NativeImages::Required),
        (ProcessorChoice::Auto, None) => Ok(NativeImages::WhereSupported),
        (ProcessorChoice::Auto, Some(_)) | (ProcessorChoice::Vllm, _) => Ok(NativeImages::Never),
    }
}

/// Returns `true` if vLLM reads the model's configuration from Mistral's files. It then runs other
/// classes with other tensors (`get_config`, `transformers_utils/config.py`). Many models come in
/// both formats.
fn reads_mistral_config(flags: &VllmFlags, args: &ServeArgs) -> bool {
    match flags.config_format.as_str() {
        "auto" => has_mistral_weights(args) && args.model.join("params.json").is_file(),
        format => format == "mistral",
    }
}

/// Returns `true` if flags and files show that vLLM renders conversations with code instead of a
/// chat template (`resolve_tokenizer_args`, `tokenizers/registry.py`). It also does so for some
/// architectures without a template, which this function does not detect.
fn renders_with_code(flags: &VllmFlags, args: &ServeArgs) -> bool {
    match flags.tokenizer_mode.as_str() {
        "auto" => {
            has_mistral_weights(args)
                && has_file(args, |name| {
                    name == "tekken.json" || name.starts_with("tokenizer.model.v")
                })
        }
        mode => mode != "hf",
    }
}

fn has_mistral_weights(args: &ServeArgs) -> bool {
    has_file(args, |name| name.starts_with("consolidated") && name.ends_with(".safetensors"))
}

/// Returns `true` if the model's top folder has a matching file, here or on the hub. Weights that
/// are not needed here are not downloaded.
fn has_file(args: &ServeArgs, matches: impl Fn(&str) -> bool) -> bool {
    let entries = std::fs::read_dir(&args.model).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_str().is_some_and(&matches))
        || args.hub_files.iter().any(|path| matches(path))
}

/// The need of a model for vLLM's processor, judged by its configuration.
struct ProcessorNeed {
    /// `true` if the model has media inputs that Chiasm does not process itself.
    is_certain: bool,
    /// `true` if the model seems to have such inputs, or certainly has them.
    is_likely: bool,
}

impl ProcessorNeed {
    fn for_model(model: &ServedModel, dir: &Path) -> Self {
        let config = std::fs::read(dir.join("config.json")).unwrap_or_default();
        let config: Map<String, Value> = serde_json::from_slice(&config).unwrap_or_default();
        let has_config = MEDIA_CONFIG_KEYS.iter().any(|key| config.contains_key(*key));
        let has_word =
            config.keys().any(|key| MEDIA_KEY_WORDS.iter().any(|word| key.contains(word)));
        let lacks_native_processor = model.vision.is_none();
        Self {
            is_certain: lacks_native_processor && has_config,
            is_likely: lacks_native_processor && (has_config || has_word),
        }
    }
}

/// Returns `true` if requests may have media. `has_processor` is `true` if some process makes the
/// tensors that Chiasm does not.
pub(crate) fn accepts_media(args: &ServeArgs, model: &ServedModel, has_processor: bool) -> bool {
    let is_likely = || {
        ProcessorNeed::for_model(model, &args.model).is_likely
            || args.processor.processor == ProcessorChoice::Vllm
    };
    model.vision.is_some() || (has_processor && is_likely())
}

/// Returns the settings of a frontend's own processor of vLLM, or `None` without it. `vllm_flags`
/// are the flags of the engines.
///
/// # Errors
/// [`CliError::Usage`] if the processor is required and no Python is found for it.
pub(crate) fn options(
    args: &ServeArgs,
    model: &ServedModel,
    flags: &VllmFlags,
    vllm_flags: &[String],
) -> Result<Option<VllmProcessorOptions>, CliError> {
    let choice = args.processor.processor;
    let rendered_by_code = renders_with_code(flags, args);
    if choice == ProcessorChoice::Native {
        if rendered_by_code {
            let message = "--processor native renders conversations with the chat template, but \
                           vLLM's code renders those of this model: \
                           give --tokenizer-mode hf after --";
            return Err(CliError::Usage(message.to_owned()));
        }
        return Ok(None);
    }
    let need = ProcessorNeed::for_model(model, &args.model);
    let may_render_conversations = rendered_by_code || model.template.is_none();
    let required = choice == ProcessorChoice::Vllm || need.is_certain || rendered_by_code;
    let python = match find_python(&args.engines.vllm) {
        Ok(python) => python,
        Err(error) if required => {
            let message = "this model's media or conversations require vLLM's processor";
            return Err(CliError::Usage(format!("{message}: {error} (--vllm)")));
        }
        Err(error) => {
            tracing::debug!(%error, "videos, audio and rare image formats are not accepted");
            return Ok(None);
        }
    };
    Ok(Some(VllmProcessorOptions {
        required,
        at_start: required || need.is_likely || may_render_conversations,
        may_render_conversations,
        ..on_demand(args, python, vllm_flags)?
    }))
}

/// Returns the settings of an agent's processor of vLLM, which decodes planned videos; `None` if
/// frontends decode them. `vllm_flags` are the flags of the engines.
///
/// # Errors
/// [`CliError::Usage`] if the Python of `--processor-vllm` is not found.
pub(crate) fn agent_options(
    args: &ServeArgs,
    model: &ServedModel,
    vllm_flags: &[String],
) -> Result<Option<VllmProcessorOptions>, CliError> {
    // Cuts of videos need the same trust as tensors.
    let takes_videos = args.agents.take_tensors
        && model.videos.is_ok()
        && args.processor.processor != ProcessorChoice::Native;
    if !takes_videos {
        return Ok(None);
    }
    match find_python(&args.engines.vllm) {
        Ok(python) => on_demand(args, python, vllm_flags).map(Some),
        Err(error) => {
            tracing::info!(%error, "frontends decode the videos for this agent's engines (--vllm)");
            Ok(None)
        }
    }
}

/// Returns the settings of a processor that starts with the first item.
///
/// # Errors
/// [`CliError::Usage`] if the Python of `--processor-vllm` is not found.
fn on_demand(
    args: &ServeArgs,
    python: PathBuf,
    vllm_flags: &[String],
) -> Result<VllmProcessorOptions, CliError> {
    let processor_args = &args.processor;
    let other_pythons = processor_args
        .processor_vllm
        .iter()
        .map(|vllm| find_python(vllm))
        .collect::<Result<_, _>>()
        .map_err(|error| CliError::Usage(format!("{error} (--processor-vllm)")))?;
    let children = processor_args.processors.map_or_else(default_children, |count| count as usize);
    Ok(VllmProcessorOptions {
        processor: ProcessorOptions {
            python,
            model: args.model.clone(),
            vllm_flags: vllm_flags.to_vec(),
            children,
            queue: processor_args.processor_queue as usize,
            timeout: processor_args.processor_timeout,
            startup_timeout: args.engines.startup_timeout,
            restart_pause: RESTART_PAUSE,
            item_bytes: processor_args.processor_item_bytes,
            address_space: processor_args.processor_memory_bytes,
            limits: ItemLimits {
                video_duration: processor_args.max_video_seconds,
                video_pixels: processor_args.max_video_pixels,
                audio_duration: processor_args.max_audio_seconds,
            },
            sandbox: processor_args.processor_sandbox.into(),
        },
        other_pythons,
        required: false,
        at_start: false,
        may_render_conversations: false,
        trust_request_kwargs: processor_args.trust_request_mm_kwargs,
        predicts_recordings: processor_args.processor != ProcessorChoice::Vllm,
        concurrent_videos: processor_args.max_concurrent_videos.map_or_else(
            || default_videos(children, free_memory(), processor_args.processor_item_bytes),
            |count| count as usize,
        ),
    })
}

/// Returns one process per core, less one core for the async threads and the engines.
fn default_children() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() - 1).max(1)
}

/// Returns the number of videos to decode at once: at most one per process, and at most as many as
/// fit into half of the free memory.
///
/// A video needs up to `item_bytes` for its file and tensors, and as much again for its frames.
fn default_videos(children: usize, free: Option<u64>, item_bytes: u64) -> usize {
    let fitting = free.map_or(u64::MAX, |free| free / 2 / item_bytes.saturating_mul(2).max(1));
    children.min(usize::try_from(fitting).unwrap_or(usize::MAX)).max(1)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn concurrent_videos_fit_cores_within_memory() {
        assert_eq!(default_videos(15, Some(128 << 30), 2 << 30), 15);
        assert_eq!(default_videos(15, Some(24 << 30), 2 << 30), 3);
        assert_eq!(default_videos(15, Some(1 << 30), 2 << 30), 1);
        assert_eq!(default_videos(15, None, 2 << 30), 15);
        assert_eq!(default_videos(15, Some(1 << 30), 0), 15);
    }

    #[test]
    fn mistral_weights_only_on_hub_disable_native_images() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("params.json"), "{}").unwrap();
        let cli = ["chiasm", "serve", dir.path().to_str().unwrap(), "--sim", "1"];
        let Command::Serve(mut args) = Cli::parse_from(cli).command else { panic!("serve") };
        let flags = VllmFlags::default();
        assert!(matches!(native_images(&args, &flags), Ok(NativeImages::WhereSupported)));
        args.hub_files = vec!["other/consolidated.safetensors".to_owned()];
        assert!(matches!(native_images(&args, &flags), Ok(NativeImages::WhereSupported)));
        args.hub_files.push("consolidated.safetensors".to_owned());
        assert!(matches!(native_images(&args, &flags), Ok(NativeImages::Never)));
    }
}
