//! Whether `chiasm serve` has vLLM's own processor, what for, and how that is started.

use std::path::Path;
use std::time::Duration;

use chiasm_pipeline::HelperOptions;
use chiasm_pipeline::model::{NativeImages, ServedModel};
use chiasm_processor::{ItemLimits, ProcessorOptions, python_of};
use serde_json::{Map, Value};

use crate::cli::{ProcessorChoice, ServeArgs};
use crate::error::CliError;
use crate::free_memory::free_memory;
use crate::vllm_flags::VllmFlags;

/// The minimum time between two starts of vLLM's processor.
const RESTART_PAUSE: Duration = Duration::from_secs(5);
/// Settings of config.json that every model with them takes more than text with.
const OF_MEDIA_MODELS: [&str; 3] = ["audio_config", "thinker_config", "vision_config"];
/// Words in the names of settings that such models have, though others may have them too.
const MEDIA_WORDS: [&str; 7] = ["audio", "image", "img", "mm_", "speech", "video", "vision"];

/// Who makes the images of a model. One that is run by other code than vLLM's own of it takes other
/// tensors than Chiasm makes.
///
/// # Errors
/// [`CliError::Usage`] if such a model is to have them made by Chiasm.
pub(crate) fn native_images(args: &ServeArgs, flags: &VllmFlags) -> Result<NativeImages, CliError> {
    let foreign = [
        (flags.foreign_model, "leave out --model-impl after --"),
        (
            is_read_as_mistrals(flags, args),
            "give --config-format hf after --, or engines read Mistral's own files",
        ),
    ];
    let way_out =
        foreign.into_iter().find_map(|(is_foreign, way_out)| is_foreign.then_some(way_out));
    match (args.processor.processor, way_out) {
        (ProcessorChoice::Native, Some(way_out)) => Err(CliError::Usage(format!(
            "--processor native makes tensors for vLLM's own model classes of the formats of transformers: {way_out}"
        ))),
        (ProcessorChoice::Native, None) => Ok(NativeImages::Required),
        (ProcessorChoice::Auto, None) => Ok(NativeImages::WhereSupported),
        (ProcessorChoice::Auto, Some(_)) | (ProcessorChoice::Vllm, _) => Ok(NativeImages::Never),
    }
}

/// Whether vLLM takes the model from Mistral's files, and runs other classes with other tensors
/// (`get_config`, `transformers_utils/config.py`). Many models come in both formats.
fn is_read_as_mistrals(flags: &VllmFlags, args: &ServeArgs) -> bool {
    match flags.config_format.as_str() {
        "auto" => has_mistrals_weights(args) && args.model.join("params.json").is_file(),
        format => format == "mistral",
    }
}

/// Whether vLLM writes conversations by code for certain, as far as flags and files tell
/// (`resolve_tokenizer_args`, `tokenizers/registry.py`). It does for some architectures without a
/// chat template, too.
fn writes_by_code(flags: &VllmFlags, args: &ServeArgs) -> bool {
    match flags.tokenizer_mode.as_str() {
        "auto" => {
            has_mistrals_weights(args)
                && has_file(args, |name| {
                    name == "tekken.json" || name.starts_with("tokenizer.model.v")
                })
        }
        mode => mode != "hf",
    }
}

fn has_mistrals_weights(args: &ServeArgs) -> bool {
    has_file(args, |name| name.starts_with("consolidated") && name.ends_with(".safetensors"))
}

/// Whether the model has such a file in its uppermost folder. A model on the hub has its weights
/// also where nobody needs them here.
fn has_file(args: &ServeArgs, is_it: impl Fn(&str) -> bool) -> bool {
    let entries = std::fs::read_dir(&args.model).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_str().is_some_and(&is_it))
        || args.hub_files.iter().any(|path| is_it(path))
}

/// Whether the model takes media that Chiasm does not make itself, for certain; and whether it
/// seems so.
fn needs_help(model: &ServedModel, dir: &Path) -> (bool, bool) {
    let config = std::fs::read(dir.join("config.json")).unwrap_or_default();
    let config: Map<String, Value> = serde_json::from_slice(&config).unwrap_or_default();
    let certainly = OF_MEDIA_MODELS.iter().any(|key| config.contains_key(*key));
    let seemingly = config.keys().any(|key| MEDIA_WORDS.iter().any(|word| key.contains(word)));
    (model.vision.is_none() && certainly, model.vision.is_none() && (certainly || seemingly))
}

/// Whether requests may have media, if some process makes what Chiasm does not.
pub(crate) fn takes_media(args: &ServeArgs, model: &ServedModel, has_help: bool) -> bool {
    let seemingly =
        || needs_help(model, &args.model).1 || args.processor.processor == ProcessorChoice::Vllm;
    model.vision.is_some() || (has_help && seemingly())
}

/// How vLLM's own processor is started; `None` without it. `vllm_flags` are those of the engines.
///
/// # Errors
/// [`CliError::Usage`] if there has to be one and there is no Python for it.
pub(crate) fn options(
    args: &ServeArgs,
    model: &ServedModel,
    flags: &VllmFlags,
    vllm_flags: &[String],
) -> Result<Option<HelperOptions>, CliError> {
    let of = &args.processor;
    let processor = of.processor;
    let by_code = writes_by_code(flags, args);
    if processor == ProcessorChoice::Native {
        if by_code {
            let message = "--processor native has the chat template write conversations, but vLLM's code writes this model's: \
                           give --tokenizer-mode hf after --";
            return Err(CliError::Usage(message.to_owned()));
        }
        return Ok(None);
    }
    let (certainly, seemingly) = needs_help(model, &args.model);
    let may_write_conversations = by_code || model.template.is_none();
    let required = processor == ProcessorChoice::Vllm || certainly || by_code;
    let python = match python_of(&args.engines.vllm) {
        Ok(python) => python,
        Err(error) if required => {
            let message = "Chiasm has no code of its own for this model's media or conversations, and needs vLLM's processor";
            return Err(CliError::Usage(format!("{message}: {error} (--vllm)")));
        }
        Err(error) => {
            tracing::debug!(%error, "videos, audio and rare formats of images are not taken");
            return Ok(None);
        }
    };
    let others = of.processor_vllm.iter().map(|vllm| python_of(vllm));
    let other_pythons = others
        .collect::<Result<_, _>>()
        .map_err(|error| CliError::Usage(format!("{error} (--processor-vllm)")))?;
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
            restart_pause: RESTART_PAUSE,
            item_bytes: of.processor_item_bytes,
            address_space: of.processor_memory_bytes,
            limits: ItemLimits {
                video_duration: of.max_video_seconds,
                video_pixels: of.max_video_pixels,
                audio_duration: of.max_audio_seconds,
            },
            sandbox: of.processor_sandbox.into(),
        },
        other_pythons,
        required,
        at_start: required || seemingly || may_write_conversations,
        may_write_conversations,
        trust_request_kwargs: of.trust_request_mm_kwargs,
        concurrent_videos: of.max_concurrent_videos.map_or_else(
            || default_videos(children, free_memory(), of.processor_item_bytes),
            |count| count as usize,
        ),
    }))
}

/// The async threads and the engines need a core too.
fn default_children() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() - 1).max(1)
}

/// A video is its file and its tensors, which are bounded, and its frames, which take no more than
/// they.
fn default_videos(children: usize, free: Option<u64>, item_bytes: u64) -> usize {
    let have_room = free.map_or(u64::MAX, |free| free / 2 / item_bytes.saturating_mul(2).max(1));
    children.min(usize::try_from(have_room).unwrap_or(usize::MAX)).max(1)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn as_many_videos_are_decoded_as_cores_and_memory_allow() {
        assert_eq!(default_videos(15, Some(128 << 30), 2 << 30), 15);
        assert_eq!(default_videos(15, Some(24 << 30), 2 << 30), 3);
        assert_eq!(default_videos(15, Some(1 << 30), 2 << 30), 1);
        assert_eq!(default_videos(15, None, 2 << 30), 15);
        assert_eq!(default_videos(15, Some(1 << 30), 0), 15);
    }

    #[test]
    fn weights_that_only_the_hub_has_tell_who_reads_the_model_too() {
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
