//! Gemma 3.
//!
//! Follows `Gemma3ImageProcessor` of `transformers` 5.20, as vLLM 0.33 calls it. The image is
//! resized to one square with a fixed number of tokens, without keeping its aspect ratio. A request
//! can turn on pan and scan: then crops of long images follow as further squares, separated by text
//! in the prompt.

use std::sync::Arc;

use chiasm_types::{TensorField, TokenId, TokenRun};
use serde_json::{Map, Value};

use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::image_prompt::ImagePrompt;
use crate::kernels::{Filter, Layer, Layout, Normalization, Region, Resampler, TileGrid};
use crate::model_dir::{ModelDir, Section};
use crate::settings::{self, STANDARD};
use crate::{ImagePlan, ImageSize, TensorSpec, VisionError, Vocabulary};

/// The text of an image in a prompt (`get_placeholder_str` in vLLM's `gemma3_mm.py`).
const PROMPT_TEXT: &str = "<start_of_image>";
/// The maximum number of crops. It exceeds that of every model and keeps plans short.
const MAX_CROPS: u64 = 64;

/// The maximum number of tokens per square. It exceeds that of every model and keeps products
/// within bounds.
const MAX_SQUARE_TOKENS: u64 = 1 << 20;

/// A Gemma 3 model.
#[derive(Clone, Debug)]
pub(crate) struct Gemma3 {
    size: ImageSize,
    filter: Filter,
    normalization: Normalization,
    pan_and_scan: Option<PanAndScan>,
    tokens: PlaceholderTokens,
    prompt: ImagePrompt,
}

/// The tokens of an image's placeholder.
#[derive(Clone, Debug)]
struct PlaceholderTokens {
    /// The token that embeds.
    image: TokenId,
    /// The number of embeddings per square.
    square_tokens: usize,
    /// The tokens before the only square of an image without crops.
    before_single: Vec<TokenId>,
    /// The tokens before the first of several squares.
    before_original: Vec<TokenId>,
    /// The tokens between the first square and the second.
    before_first_crop: Vec<TokenId>,
    /// The tokens between the other squares.
    before_other_crops: Vec<TokenId>,
    /// The tokens after the last square.
    after: Vec<TokenId>,
}

/// The settings of cutting an image into crops.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PanAndScan {
    min_crop_size: u32,
    max_num_crops: u32,
    min_ratio_to_activate: f64,
}

impl PanAndScan {
    /// Reads a request's settings; `None` if pan and scan is off.
    ///
    /// The defaults are those of `Gemma3ProcessorKwargs`, which override the model directory.
    fn read(kwargs: &Map<String, Value>) -> Result<Option<Self>, VisionError> {
        const ON: &str = "do_pan_and_scan";
        const CROPS: &str = "pan_and_scan_max_num_crops";
        const SIZE: &str = "pan_and_scan_min_crop_size";
        const RATIO: &str = "pan_and_scan_min_ratio_to_activate";
        const KNOWN: &[&str] = &[ON, SIZE, CROPS, RATIO];
        let mut on = false;
        let mut settings =
            Self { min_crop_size: 256, max_num_crops: 4, min_ratio_to_activate: 1.2 };
        for (name, value) in kwargs {
            let Some(&key) = KNOWN.iter().find(|known| *known == name) else {
                return Err(VisionError::UnknownKwarg { key: name.clone(), known: KNOWN });
            };
            let invalid =
                |problem: &str| VisionError::InvalidKwarg { key, problem: problem.into() };
            let number = |max| {
                value
                    .as_u64()
                    .filter(|number| (1..=max).contains(number))
                    .map(|number| number as u32)
            };
            match key {
                ON => on = value.as_bool().ok_or_else(|| invalid("must be true or false"))?,
                SIZE => {
                    settings.min_crop_size =
                        number(1 << 24).ok_or_else(|| invalid("must be from 1 to 2^24"))?
                }
                CROPS => {
                    settings.max_num_crops =
                        number(MAX_CROPS).ok_or_else(|| invalid("must be from 1 to 64"))?
                }
                _ => {
                    let ratio = value.as_f64().filter(|ratio| ratio.is_finite());
                    settings.min_ratio_to_activate =
                        ratio.ok_or_else(|| invalid("must be a number"))?;
                }
            }
        }
        Ok(on.then_some(settings))
    }

    /// Returns the crops of an image; none if it is not long enough (`pan_and_scan_batched`).
    fn crops(self, size: ImageSize) -> Vec<Region> {
        let long = size.width.max(size.height);
        let short = size.width.min(size.height);
        let ratio = f64::from(long) / f64::from(short);
        if ratio < self.min_ratio_to_activate {
            return Vec::new();
        }
        let count = ((ratio + 0.5).floor() as u32).min(long / self.min_crop_size);
        let count = count.max(2).min(self.max_num_crops);
        let length = long.div_ceil(count);
        if length.min(short) < self.min_crop_size {
            return Vec::new();
        }
        let crops = (0..count).map(|index| {
            let start = index * length;
            (start as usize, long.saturating_sub(start).min(length) as usize)
        });
        let short = short as usize;
        crops
            .map(|(start, length)| {
                if size.width >= size.height {
                    Region { left: start, top: 0, width: length, height: short }
                } else {
                    Region { left: 0, top: start, width: short, height: length }
                }
            })
            .collect()
    }
}

impl Gemma3 {
    /// Reads the settings of a model directory.
    pub(crate) fn read(
        dir: &ModelDir,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Arc<dyn Family>, VisionError> {
        let file = dir.image_processor()?;
        let size = settings::exact_size(file, "size", ImageSize::square(224))?;
        check_size(dir, file, size)?;
        let id = |token| {
            vocabulary.id(token).ok_or(VisionError::MissingToken { token, model_type: "gemma3" })
        };
        let lines = [id("\n")?, id("\n\n")?, id("\n\n\n")?, id("\n\n\n\n")?];
        let prompt = ImagePrompt {
            text: PROMPT_TEXT,
            marker: vec![id("<start_of_image>")?],
            rewrite: None,
            // The tokenizer would have merged these into one token (`_apply_token_matches` in
            // vLLM's `gemma3_mm.py`).
            joins: vec![
                ([lines[0], lines[1]], lines[2]),
                ([lines[1], lines[0]], lines[2]),
                ([lines[1], lines[1]], lines[3]),
            ],
        };
        Ok(Arc::new(Self {
            size,
            filter: settings::resample(file, Filter::Bilinear)?,
            normalization: settings::normalization(file, STANDARD)?,
            pan_and_scan: None,
            tokens: placeholder_tokens(dir, vocabulary, id("<image_soft_token>")?)?,
            prompt,
        }))
    }

    /// Returns the placeholder of an image with this number of squares.
    fn placeholder(&self, squares: usize) -> Vec<TokenRun> {
        let tokens = &self.tokens;
        let single = |&token: &TokenId| TokenRun { token, count: 1, embeds: false };
        let mut runs = Vec::new();
        for square in 0..squares {
            let before = match (square, squares) {
                (0, 1) => &tokens.before_single,
                (0, _) => &tokens.before_original,
                (1, _) => &tokens.before_first_crop,
                _ => &tokens.before_other_crops,
            };
            runs.extend(before.iter().map(single));
            runs.push(TokenRun { token: tokens.image, count: tokens.square_tokens, embeds: true });
        }
        runs.extend(tokens.after.iter().map(single));
        runs
    }
}

/// Checks that the image processor resizes to the only size that the vision tower takes.
fn check_size(dir: &ModelDir, file: &Section, size: ImageSize) -> Result<(), VisionError> {
    let side = dir.vision.positive("image_size")?.unwrap_or(224);
    if u64::from(size.width) != side || u64::from(size.height) != side {
        return Err(file.problem("size", format!("must be that of the vision tower, {side}")));
    }
    if !file.flag("do_resize", true)? {
        return Err(file.problem("do_resize", "must be true"));
    }
    Ok(())
}

/// Encodes the texts of `Gemma3ProcessingInfo.get_image_repl` in vLLM's `gemma3_mm.py`.
///
/// Special tokens split a text, so that its parts are tokenized separately.
fn placeholder_tokens(
    dir: &ModelDir,
    vocabulary: &dyn Vocabulary,
    image: TokenId,
) -> Result<PlaceholderTokens, VisionError> {
    const START: &str = "\n\n<start_of_image>";
    const END: &str = "<end_of_image>\n\n";
    let encode = |text: String| {
        vocabulary.encode(&text).map_err(|source| VisionError::Tokenizer { text, source })
    };
    let square_tokens = dir.processor.positive("image_seq_length")?.unwrap_or(256);
    let expected = dir.config.positive("mm_tokens_per_image")?.unwrap_or(256);
    if square_tokens != expected || square_tokens > MAX_SQUARE_TOKENS {
        let problem =
            format!("is {square_tokens}, but mm_tokens_per_image in config.json is {expected}");
        return Err(dir.processor.problem("image_seq_length", problem));
    }
    Ok(PlaceholderTokens {
        image,
        square_tokens: square_tokens as usize,
        before_single: encode(START.into())?,
        before_original: encode(format!("Here is the original image {START}"))?,
        before_first_crop: encode(format!(
            "{END} and here are some crops to help you see better {START}"
        ))?,
        before_other_crops: encode(format!("{END} {START}"))?,
        after: encode(END.into())?,
    })
}

impl Family for Gemma3 {
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError> {
        Ok(Arc::new(Self { pan_and_scan: PanAndScan::read(kwargs)?, ..self.clone() }))
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let width = self.size.width as usize;
        let height = self.size.height as usize;
        let whole = Layer::whole(
            size.width as usize,
            size.height as usize,
            Layout::Tiles(TileGrid::single(width, height)),
        );
        let crops = self.pan_and_scan.map(|settings| settings.crops(size)).unwrap_or_default();
        if crops.iter().any(|crop| crop.width == 0 || crop.height == 0) {
            return Err(VisionError::EmptyImage { size });
        }
        let layers: Vec<_> = std::iter::once(whole)
            .chain(crops.into_iter().map(|source| Layer { source, ..whole }))
            .collect();
        let squares = layers.len();
        let pixels = PixelTensor {
            name: "pixel_values",
            shape: vec![squares, 3, height, width],
            field: TensorField::rows(squares),
            resampler: Resampler::Torch(self.filter),
            layers,
        };
        let field = TensorField::Batched { keep_on_cpu: true };
        let num_patches = TensorSpec::integers("num_patches", vec![], field, &[squares as i64]);
        let grid = [1, 1, squares as u32];
        ImagePlan::new(size, self.size, grid, self.placeholder(squares), pixels, vec![num_patches])
    }

    fn largest_image(&self) -> ImageSize {
        // Without crops, every image has the same number of embeddings, whatever its size.
        let crops = self.pan_and_scan.map_or(1, |settings| settings.max_num_crops);
        ImageSize { height: self.size.height * crops, ..self.size }
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        let Self { size, filter, normalization, pan_and_scan, tokens, prompt: _ } = self;
        let PlaceholderTokens {
            image,
            square_tokens,
            before_single,
            before_original,
            before_first_crop,
            before_other_crops,
            after,
        } = tokens;
        out.size("size", *size);
        out.filter("resample", *filter);
        normalization.fingerprint(out);
        out.tokens("image_token", &[*image]);
        out.count("square_tokens", *square_tokens);
        out.tokens("before", before_single);
        out.tokens("after", after);
        if let Some(PanAndScan { min_crop_size, max_num_crops, min_ratio_to_activate }) =
            *pan_and_scan
        {
            out.integer("pan_and_scan_min_crop_size", min_crop_size);
            out.integer("pan_and_scan_max_num_crops", max_num_crops);
            out.double("pan_and_scan_min_ratio_to_activate", min_ratio_to_activate);
            out.tokens("before_original", before_original);
            out.tokens("before_first_crop", before_first_crop);
            out.tokens("before_other_crops", before_other_crops);
        }
    }

    fn normalization(&self) -> &Normalization {
        &self.normalization
    }

    fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }
}
