//! Chiasm, and the floor beneath it.

use std::error::Error;
use std::hint::black_box;
use std::path::Path;

use bytes::Bytes;
use chiasm_media::{DecodeMemory, EncodedMedia, MediaHeader, MediaLimits, RgbImage, decode, decode_into};
use chiasm_types::{Dtype, TokenId};
use chiasm_vision::{
    ImageKwargs, ImagePlan, ImageSize, PixelFormat, RgbView, VisionError, VisionModel, Vocabulary, VocabularyError, resize_bicubic,
};

use crate::case::{Case, Format};
use crate::side::Side;
use crate::times::{Clock, Stage, Times};

/// Chiasm as it serves: images are decoded into memory that the thread keeps, the tensor goes into
/// a buffer that is the caller's and is used again.
pub(crate) struct Ours {
    model: VisionModel,
    format: PixelFormat,
    encoded: EncodedMedia,
    memory: DecodeMemory,
    plan: ImagePlan,
    tensor: Vec<u8>,
    apart: Option<Apart>,
}

/// What the stages by themselves need. On the whole way, resize and layout are one: a band of lines
/// is resized, then cut into patches from the CPU's cache.
struct Apart {
    decoded: RgbImage,
    narrowed: Vec<u8>,
    /// The image in the size of the plan.
    resized: Vec<u8>,
    /// The plan of an image that has the planned size already, so that processing it is layout
    /// alone.
    plan: ImagePlan,
}

impl Ours {
    /// `Ok(Err(_))` for a model whose family Chiasm does not know.
    pub(crate) fn open(case: &Case) -> Result<Result<Self, VisionError>, Box<dyn Error>> {
        let model = match model(&case.settings) {
            Ok(model) => model.ok_or("the model takes no images")?,
            Err(error @ (VisionError::UnknownFamily { .. } | VisionError::UnknownImageProcessor { .. })) => {
                return Ok(Err(error));
            }
            Err(error) => return Err(error.into()),
        };
        let format = match case.format {
            Format::U8 => PixelFormat::RawU8,
            Format::Bf16 => PixelFormat::Normalized(Dtype::BF16),
            Format::F32 => PixelFormat::Normalized(Dtype::F32),
        };
        let encoded = EncodedMedia::from_bytes(Bytes::from(std::fs::read(&case.picture)?), &MediaLimits::default())?;
        let MediaHeader::Image(header) = encoded.header else {
            return Err("the picture is no image".into());
        };
        let plan = model.plan(ImageSize { width: header.width, height: header.height }, &ImageKwargs::default())?;
        let tensor = vec![0; plan.pixel_bytes(format)];
        let apart = match case.format {
            Format::U8 if plan.resized != plan.original => Some(Apart {
                decoded: decode(&encoded)?,
                narrowed: Vec::new(),
                resized: vec![0; 3 * plan.resized.area() as usize],
                plan: model.plan(plan.resized, &ImageKwargs::default())?,
            }),
            _ => None,
        };
        Ok(Ok(Self { model, format, encoded, memory: DecodeMemory::new(), plan, tensor, apart }))
    }

    /// The floor of this case.
    pub(crate) fn floor(&self) -> Floor {
        Floor {
            encoded: self.encoded.clone(),
            memory: DecodeMemory::new(),
            from: vec![1; self.tensor.len()],
            to: vec![0; self.tensor.len()],
        }
    }
}

/// The one place that knows how a model is opened.
fn model(dir: &Path) -> Result<Option<VisionModel>, VisionError> {
    VisionModel::from_model_dir(dir, &SpecialTokens)
}

/// The special tokens that the families ask for, with the numbers that the models publish: pixels
/// do not depend on them.
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
        self.id(text).map(|id| vec![id]).ok_or_else(|| VocabularyError::NoToken(text.to_owned()))
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
        self.model.process(RgbView::new(size, image.pixels)?, &plan, self.format, black_box(&mut self.tensor))?;
        let processed = clock.read();
        self.memory.trim();
        let whole = clock.read();
        let mut times =
            Times::from([(Stage::Decode, decoded), (Stage::Process, processed - decoded), (Stage::Whole, whole)]);
        if let Some(Apart { decoded, narrowed, resized, plan }) = &mut self.apart {
            let image = RgbView::new(self.plan.original, &decoded.pixels)?;
            let clock = Clock::start();
            resize_bicubic(self.model.implementation(), image, plan.original, narrowed, black_box(resized))?;
            times.insert(Stage::Resize, clock.read());
            let expected = self.tensor.clone();
            let image = RgbView::new(plan.original, resized)?;
            let clock = Clock::start();
            self.model.process(image, plan, self.format, black_box(&mut self.tensor))?;
            times.insert(Stage::Layout, clock.read());
            if self.tensor != expected {
                return Err("the stages by themselves make another tensor than together".into());
            }
        }
        Ok(times)
    }

    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        Ok(Some(self.tensor.clone()))
    }
}

/// What cannot be saved: decoding, and writing the tensor once, into a buffer that is used again.
pub(crate) struct Floor {
    encoded: EncodedMedia,
    memory: DecodeMemory,
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Side for Floor {
    fn name(&self) -> String {
        "floor".to_owned()
    }

    fn round(&mut self) -> Result<Times, Box<dyn Error>> {
        let clock = Clock::start();
        black_box(decode_into(black_box(&self.encoded), &mut self.memory)?);
        self.memory.trim();
        let decoded = clock.read();
        black_box(&mut self.to).copy_from_slice(black_box(&self.from));
        let whole = clock.read();
        Ok(Times::from([(Stage::Decode, decoded), (Stage::Process, whole - decoded), (Stage::Whole, whole)]))
    }

    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        Ok(None)
    }
}
