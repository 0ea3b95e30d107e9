//! Shows a video's plan and its cut.

use std::path::Path;

use chiasm_media::EncodedMedia;
use chiasm_pipeline::model::TokenizerVocabulary;
use chiasm_prompt::Tokenizer;
use chiasm_types::Dtype;
use chiasm_video::{IndexError, VideoIndex, VideoProperties};
use chiasm_vision::{PixelFormat, TensorSpec, VideoModel, VideoOptions, VideoPlan, VideoRequest};
use serde_json::{Value, json};

use crate::cli::InspectArgs;
use crate::error::CliError;
use crate::stdout::line;

/// The settings of a model's videos.
pub(super) struct Videos {
    model: VideoModel,
    request: VideoRequest,
}

impl Videos {
    /// Reads the settings of a model directory, with those of the command line.
    pub(super) fn read(args: &InspectArgs) -> Result<Self, CliError> {
        let model = VideoModel::from_model_dir(&args.model, VideoOptions::default())
            .map_err(|reason| not_planned(&args.model, &reason.to_string()))?;
        let request = model
            .parse_request(&args.mm_processor_kwargs, &args.media_io_kwargs)
            .map_err(|reason| CliError::Usage(reason.to_string()))?;
        Ok(Self { model, request })
    }

    /// Plans and cuts a video.
    pub(super) fn inspect<'a>(
        &self,
        source: &'a str,
        video: &EncodedMedia,
        tokenizer: Option<&Tokenizer>,
        format: PixelFormat,
    ) -> Result<Inspection<'a>, CliError> {
        let reason = |reason: String| not_planned(Path::new(source), &reason);
        let file = &video.bytes;
        let index = VideoIndex::read(file).map_err(|error| reason(error.to_string()))?;
        let properties = index.properties();
        let planned = chiasm_vision::VideoProperties {
            frames: properties.frames,
            fps: properties.fps,
            width: properties.width,
            height: properties.height,
        };
        let plan =
            self.model.plan(planned, &self.request).map_err(|error| reason(error.to_string()))?;
        let cut = index.cut(file, &plan.frames).map_err(|error| reason(error.to_string()))?;
        let runs = tokenizer
            .map(|tokenizer| plan.tokenize(&TokenizerVocabulary(tokenizer)))
            .transpose()
            .map_err(|error| reason(error.to_string()))?;
        Ok(Inspection {
            source,
            properties,
            bytes: file.len(),
            prompt_tokens: runs.map(|runs| runs.iter().map(|run| run.count).sum()),
            tensors: plan.tensors(format, Dtype::F32)?,
            files: cut.parts.len(),
            samples: cut.parts.iter().map(|part| u64::from(part.samples)).sum(),
            cut_bytes: cut.parts.iter().map(chiasm_video::CutPart::len).sum(),
            cost: cut.decode_cost() as f64 / index.decode_cost().max(1) as f64,
            plan,
        })
    }
}

/// Returns `true` if a file is in a container that Chiasm reads, or looks like it.
pub(super) fn is_container(file: &[u8]) -> bool {
    !matches!(VideoIndex::read(file), Err(IndexError::Container))
}

/// Creates the error for a video, or a model's videos, that Chiasm does not plan.
fn not_planned(what: &Path, reason: &str) -> CliError {
    CliError::Usage(format!(
        "{} is not planned, so vLLM's own processor makes its tensors: {reason}",
        what.display()
    ))
}

/// The result for one video.
pub(super) struct Inspection<'a> {
    source: &'a str,
    properties: VideoProperties,
    /// The length of the file.
    bytes: usize,
    plan: VideoPlan,
    /// The tokens in the place of the video's marker; `None` without a tokenizer.
    prompt_tokens: Option<usize>,
    tensors: Vec<TensorSpec>,
    /// The number of files that the cut has.
    files: usize,
    /// The number of samples of the cut.
    samples: u64,
    cut_bytes: usize,
    /// The cost of decoding the cut, as a part of that of the whole file.
    cost: f64,
}

impl Inspection<'_> {
    pub(super) fn to_json(&self) -> Value {
        let Self { source, properties, plan, .. } = self;
        let tensors: Vec<Value> = self
            .tensors
            .iter()
            .map(|tensor| {
                let dtype = tensor.dtype.torch_name();
                json!({"name": tensor.name, "dtype": dtype, "shape": tensor.shape})
            })
            .collect();
        json!({
            "video": source,
            "container": properties.container.name(),
            "codec": properties.codec.name(),
            "width": properties.width,
            "height": properties.height,
            "frames": properties.frames,
            "fps": properties.fps,
            "sampled_frames": plan.frames,
            "resized": [plan.resized.width, plan.resized.height],
            "grid_thw": plan.grid,
            "video_tokens": plan.tokens,
            "placeholder_tokens": self.prompt_tokens,
            "tensors": tensors,
            "cut": {
                "files": self.files,
                "samples": self.samples,
                "of_samples": properties.samples,
                "bytes": self.cut_bytes,
                "of_bytes": self.bytes,
                "decode_cost": self.cost,
            },
        })
    }

    pub(super) fn print(&self) {
        let Self { source, properties, plan, .. } = self;
        line!("{source}");
        line!(
            "  video        {}x{} {} in {}, {} frames at {:.3} per second",
            properties.width,
            properties.height,
            properties.codec.name(),
            properties.container.name(),
            properties.frames,
            properties.fps
        );
        let frames: Vec<String> = plan.frames.iter().map(u64::to_string).collect();
        line!("  samples      {} frames: {}", frames.len(), frames.join(" "));
        line!("  resized      {}x{}", plan.resized.width, plan.resized.height);
        let [time, height, width] = plan.grid;
        line!("  grid         {time} x {height} x {width} (time, height, width)");
        let all = self.prompt_tokens.map_or("?".to_owned(), |tokens| tokens.to_string());
        line!("  placeholder  {all} tokens, {} of them of the video", plan.tokens);
        for tensor in &self.tensors {
            let dtype = tensor.dtype.torch_name();
            line!("  tensor       {} {dtype} {:?}", tensor.name, tensor.shape);
        }
        line!(
            "  cut          {} of {} samples, {:.1} % of the bytes, in {} file(s)",
            self.samples,
            properties.samples,
            100.0 * self.cut_bytes as f64 / self.bytes.max(1) as f64,
            self.files
        );
        line!("  cost         {:.1} % of decoding the whole file", 100.0 * self.cost);
    }
}
