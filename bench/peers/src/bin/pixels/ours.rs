//! Chiasm, and the floor, which is the limit for any side.

use std::error::Error;
use std::hint::black_box;

use bytes::Bytes;
use chiasm_media::{
    DecodeMemory, EncodedMedia, MediaHeader, MediaLimits, RgbImage, decode, decode_into,
};
use chiasm_types::{Dtype, TokenId};
use chiasm_vision::{
    ImageKwargs, ImagePlan, ImageSize, PixelFormat, RgbView, VisionError, VisionModel, Vocabulary,
    VocabularyError, resize_bicubic,
};

use crate::case::{Case, Format};
use crate::side::{Clock, Side, Stage, Times, whole_times};

/// The name of the floor in rows.
pub(crate) const FLOOR: &str = "floor";

/// Chiasm as in a server: images are decoded into memory that the thread keeps, and the tensor is
/// written into the caller's buffer, which is reused.
pub(crate) struct Ours {
    model: VisionModel,
    format: PixelFormat,
    encoded: EncodedMedia,
    memory: DecodeMemory,
    plan: ImagePlan,
    tensor: Vec<u8>,
    separate: Option<SeparateStages>,
}

/// The buffers of resize and layout as separate stages. Together they are one stage: a band of
/// lines is resized, then cut into patches from the CPU's cache.
struct SeparateStages {
    decoded: RgbImage,
    narrowed: Vec<u8>,
    /// The image in the size of the plan.
    resized: Vec<u8>,
    /// The plan of an image of that size, whose processing is layout alone.
    plan: ImagePlan,
}

impl Ours {
    /// Opens a model. The inner error is that of a family that Chiasm does not support.
    pub(crate) fn open(case: &Case) -> Result<Result<Self, VisionError>, Box<dyn Error>> {
        let model = match VisionModel::from_model_dir(&case.settings, &SpecialTokens) {
            Ok(model) => model.ok_or("the model takes no images")?,
            Err(
                error @ (VisionError::UnknownFamily { .. }
                | VisionError::UnknownImageProcessor { .. }),
            ) => return Ok(Err(error)),
            Err(error) => return Err(error.into()),
        };
        let format = match case.format {
            Format::U8 => PixelFormat::RawU8,
            Format::Bf16 => PixelFormat::Normalized(Dtype::BF16),
            Format::F32 => PixelFormat::Normalized(Dtype::F32),
        };
        let file = Bytes::from(std::fs::read(&case.picture)?);
        let encoded = EncodedMedia::from_bytes(file, &MediaLimits::default())?;
        let MediaHeader::Image(header) = encoded.header else {
            return Err("the picture is no image".into());
        };
        let size = ImageSize { width: header.width, height: header.height };
        let plan = model.plan(size, &ImageKwargs::default())?;
        let tensor = vec![0; plan.pixel_bytes(format)];
        let mut separate = None;
        if case.format == Format::U8 && plan.resized != plan.original {
            separate = Some(SeparateStages {
                decoded: decode(&encoded)?,
                narrowed: Vec::new(),
                resized: vec![0; 3 * plan.resized.area() as usize],
                plan: model.plan(plan.resized, &ImageKwargs::default())?,
            });
        }
        let memory = DecodeMemory::new();
        Ok(Ok(Self { model, format, encoded, memory, plan, tensor, separate }))
    }

    /// Returns the floor of this case.
    pub(crate) fn floor(&self) -> Floor {
        Floor {
            encoded: self.encoded.clone(),
            memory: DecodeMemory::new(),
            from: vec![1; self.tensor.len()],
            to: vec![0; self.tensor.len()],
        }
    }
}

/// The special tokens of the families, with ids that models publish. Pixels do not depend on them.
struct SpecialTokens;

impl Vocabulary for SpecialTokens {
    fn id(&self, token: &str) -> Option<TokenId> {
        let id = match token {
            "<|image_start|>" => 200_080,
            "<|image_end|>" => 200_081,
            "<|tile_x_separator|>" => 200_084,
            "<|tile_y_separator|>" => 200_085,
            "<|image|>" => 200_090,
            "<|patch|>" => 200_092,
            _ => return None,
        };
        Some(TokenId(id))
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        let id = self.id(text).ok_or_else(|| VocabularyError::NoToken(text.to_owned()))?;
        Ok(vec![id])
    }
}

impl Side for Ours {
    fn name(&self) -> String {
        format!("chiasm ({})", self.model.implementation().name())
    }

    fn round(&mut self) -> Result<Times, Box<dyn Error>> {
        let clock = Clock::start();
        let image = decode_into(black_box(&self.encoded), &mut self.memory)?;
        let decoded = clock.read();
        let size = ImageSize { width: image.width, height: image.height };
        let plan = self.model.plan(size, &ImageKwargs::default())?;
        let view = RgbView::new(size, image.pixels)?;
        self.model.process(view, &plan, self.format, black_box(&mut self.tensor))?;
        let processed = clock.read();
        self.memory.trim();
        let whole = clock.read();
        let mut times = whole_times(decoded, processed, whole);
        if let Some(SeparateStages { decoded, narrowed, resized, plan }) = &mut self.separate {
            let kernels = self.model.implementation();
            let view = RgbView::new(self.plan.original, &decoded.pixels)?;
            let clock = Clock::start();
            resize_bicubic(kernels, view, plan.original, narrowed, black_box(resized))?;
            times.insert(Stage::Resize, clock.read());
            let expected = self.tensor.clone();
            let view = RgbView::new(plan.original, resized)?;
            let clock = Clock::start();
            self.model.process(view, plan, self.format, black_box(&mut self.tensor))?;
            times.insert(Stage::Layout, clock.read());
            if self.tensor != expected {
                return Err("the separate stages make another tensor".into());
            }
        }
        Ok(times)
    }

    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        Ok(Some(self.tensor.clone()))
    }
}

/// Decoding, and one copy of the tensor into a buffer that is reused.
pub(crate) struct Floor {
    encoded: EncodedMedia,
    memory: DecodeMemory,
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Side for Floor {
    fn name(&self) -> String {
        FLOOR.to_owned()
    }

    fn round(&mut self) -> Result<Times, Box<dyn Error>> {
        let clock = Clock::start();
        black_box(decode_into(black_box(&self.encoded), &mut self.memory)?);
        self.memory.trim();
        let decoded = clock.read();
        black_box(&mut self.to).copy_from_slice(black_box(&self.from));
        let whole = clock.read();
        Ok(whole_times(decoded, whole, whole))
    }

    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        Ok(None)
    }
}
