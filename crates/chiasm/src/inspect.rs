//! `chiasm inspect`: prints an image's identity, layout and tensors for a model, and a video's plan
//! and cut.

mod video;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use chiasm_backend::PlanClass;
use chiasm_media::{
    ByteBudget, EncodedMedia, ImageHeader, MediaConfig, MediaError, MediaHeader, MediaLoader,
    MediaPart,
};
use chiasm_pipeline::model::{ModelError, TokenizerVocabulary};
use chiasm_prompt::Tokenizer;
use chiasm_types::{BlockSize, Dtype, MmHash, Modality};
use chiasm_vision::{
    Contents, ImagePlan, ImageSize, NoVocabulary, PixelFormat, RgbView, TensorSpec, VisionModel,
};
use serde_json::{Value, json};

use crate::cli::InspectArgs;
use crate::error::CliError;
use crate::npy;
use crate::stdout::line;

use self::video::Videos;

/// Runs the command.
pub(crate) async fn run(args: InspectArgs) -> Result<(), CliError> {
    let tokenizer = read_tokenizer(&args.model)?;
    let model = read_model(&args.model, tokenizer.as_ref())?;
    let format = if args.normalized || model.engine_normalizes_since().is_none() {
        PixelFormat::Normalized(Dtype::F32)
    } else {
        PixelFormat::RawU8
    };
    let block_size = BlockSize::new(args.block_size)
        .ok_or_else(|| CliError::Usage("--block-size must be at least 1".to_owned()))?;
    // The user of the command line may read any file and reach any address.
    let media = MediaConfig {
        allow_private_addresses: true,
        allowed_local_media_path: Some("/".into()),
        cache_bytes: 0,
        ..MediaConfig::default()
    };
    let largest = [Modality::Image, Modality::Video].map(|it| media.limits.max_bytes(&it));
    let budget = ByteBudget::new(largest.into_iter().max().unwrap_or_default());
    let loader = MediaLoader::new(media, budget)?;
    if let Some(dir) = &args.dump {
        fs::create_dir_all(dir).map_err(|error| CliError::file(dir, error))?;
    }
    for (index, source) in args.media.iter().enumerate() {
        let image = open(&loader, source).await?;
        let shown = if source.starts_with("data:") { "data: URI" } else { source };
        if image.modality == Modality::Video {
            let videos = Videos::read(&args)?;
            let inspection = videos.inspect(shown, &image, tokenizer.as_ref(), format)?;
            if args.json {
                line!("{}", inspection.to_json());
            } else {
                inspection.print();
            }
            continue;
        }
        let MediaHeader::Image(header) = image.header else {
            return Err(CliError::Usage(format!("{shown} is neither an image nor a video")));
        };
        let kwargs = model.parse_kwargs(&args.mm_processor_kwargs)?;
        let identity =
            PlanClass::item_identity(model.default_fingerprint(), &model.fingerprint(&kwargs));
        let size = ImageSize { width: header.width, height: header.height };
        let plan = model.plan(size, &kwargs)?;
        let hash = chiasm_media::mm_hash(&image.content, &image.modality, &identity);
        let inspection = Inspection {
            source: shown,
            hash,
            blocks: full_blocks(&plan, block_size),
            tensors: plan.tensors(format),
            image,
            header,
            plan,
        };
        if args.json {
            line!("{}", inspection.to_json());
        } else {
            inspection.print(block_size);
        }
        if let Some(dir) = &args.dump {
            for path in inspection.dump(dir, index, &model, format)? {
                // Standard error may be closed.
                let _ = writeln!(io::stderr(), "wrote {}", path.display());
            }
        }
    }
    Ok(())
}

/// Reads the tokenizer of a model directory. It may be missing, as many families need none.
fn read_tokenizer(dir: &Path) -> Result<Option<Tokenizer>, CliError> {
    if !dir.join("tokenizer.json").exists() {
        return Ok(None);
    }
    Ok(Some(Tokenizer::from_model_dir(dir).map_err(ModelError::from)?))
}

/// Reads the image family of a model directory.
fn read_model(dir: &Path, tokenizer: Option<&Tokenizer>) -> Result<VisionModel, CliError> {
    let model = match tokenizer {
        None => VisionModel::from_model_dir(dir, &NoVocabulary)?,
        Some(tokenizer) => VisionModel::from_model_dir(dir, &TokenizerVocabulary(tokenizer))?,
    };
    model.ok_or_else(|| CliError::Usage(format!("{} is a text model", dir.display())))
}

/// Opens an image or a video by its URL or path.
async fn open(loader: &MediaLoader, source: &str) -> Result<EncodedMedia, CliError> {
    let is_url = source.starts_with("data:") || source.contains("://");
    let load = async {
        let part = if is_url { source.into() } else { MediaPart::file(Path::new(source))? };
        // A file that is declared to be a video is not parsed.
        let file = loader.open(MediaPart { modality: Modality::Video, ..part }).await?;
        match EncodedMedia::from_bytes(file.bytes.clone(), loader.limits()) {
            Err(MediaError::UnsupportedFormat { .. }) if video::is_container(&file.bytes) => {
                Ok(file)
            }
            image => image,
        }
    };
    load.await.map_err(|error| {
        if is_url {
            error.into()
        } else {
            CliError::file(Path::new(source), io::Error::other(error))
        }
    })
}

/// Returns the number of full blocks of a prompt that consists of this image only.
fn full_blocks(plan: &ImagePlan, block_size: BlockSize) -> usize {
    plan.placeholder.iter().map(|run| run.count).sum::<usize>() / block_size.get()
}

/// The result for one image.
struct Inspection<'a> {
    source: &'a str,
    image: EncodedMedia,
    header: ImageHeader,
    plan: ImagePlan,
    hash: MmHash,
    tensors: Vec<TensorSpec>,
    blocks: usize,
}

impl Inspection<'_> {
    fn to_json(&self) -> Value {
        let Self { source, header, plan, hash, tensors, blocks, .. } = self;
        let tensors: Vec<Value> = tensors
            .iter()
            .map(|tensor| {
                let dtype = tensor.dtype.torch_name();
                json!({"name": tensor.name, "dtype": dtype, "shape": tensor.shape})
            })
            .collect();
        let layout: Vec<Value> = plan
            .placeholder
            .iter()
            .map(|run| json!({"token": run.token.0, "count": run.count, "embeds": run.embeds}))
            .collect();
        json!({
            "image": source,
            "mm_hash": hash.to_string(),
            "format": header.format.to_string(),
            "width": header.width,
            "height": header.height,
            "orientation": header.orientation,
            "resized": [plan.resized.width, plan.resized.height],
            "grid_thw": plan.grid,
            "placeholder_tokens": plan.tokens,
            "placeholder": layout,
            "tensors": tensors,
            "blocks": blocks,
        })
    }

    fn print(&self, block_size: BlockSize) {
        let Self { source, header, plan, hash, tensors, blocks, .. } = self;
        line!("{source}");
        line!("  mm_hash      {hash}");
        line!(
            "  size         {}x{} {} (orientation {}), resized to {}x{}",
            header.width,
            header.height,
            header.format,
            header.orientation,
            plan.resized.width,
            plan.resized.height
        );
        line!(
            "  grid         {} x {} x {} patches or tiles (time, height, width)",
            plan.grid[0],
            plan.grid[1],
            plan.grid[2]
        );
        let layout: Vec<String> = plan
            .placeholder
            .iter()
            .map(|run| {
                format!(
                    "{} x token {}{}",
                    run.count,
                    run.token,
                    if run.embeds { "" } else { " (no embedding)" }
                )
            })
            .collect();
        line!("  placeholder  {} tokens: {}", plan.tokens, layout.join(", "));
        for tensor in tensors {
            line!(
                "  tensor       {} {} {:?}",
                tensor.name,
                tensor.dtype.torch_name(),
                tensor.shape
            );
        }
        line!(
            "  blocks       {blocks} of {} tokens, when the prompt starts with the image",
            block_size.get()
        );
    }

    /// Decodes and processes the image, writes each tensor to a file and returns the paths.
    fn dump(
        &self,
        dir: &Path,
        index: usize,
        model: &VisionModel,
        format: PixelFormat,
    ) -> Result<Vec<PathBuf>, CliError> {
        let mut written = Vec::new();
        let plan = &self.plan;
        let decoded = chiasm_media::decode(&self.image)?;
        let view = RgbView::new(plan.original, &decoded.pixels)?;
        for tensor in &self.tensors {
            let bytes = match &tensor.contents {
                Contents::Small(bytes) => bytes.clone(),
                Contents::Pixels => {
                    let mut pixels = vec![0; plan.pixel_bytes(format)];
                    model.process(view, plan, format, &mut pixels)?;
                    pixels
                }
            };
            let path = dir.join(format!("{index}.{}.npy", tensor.name));
            let write = || {
                let mut file = BufWriter::new(File::create(&path)?);
                npy::write(&mut file, tensor.dtype, &tensor.shape, &bytes)?;
                file.into_inner()?.sync_all()
            };
            write().map_err(|error| CliError::file(&path, error))?;
            written.push(path);
        }
        Ok(written)
    }
}
