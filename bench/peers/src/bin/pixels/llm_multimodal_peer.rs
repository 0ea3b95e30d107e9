//! The peer `llm-multimodal`, on which vLLM's Rust frontend and Dynamo build, through its public
//! interface: a frame that decodes itself, and the processor from its registry. Every task runs on
//! one thread.
//!
//! Raw pixels have its own 8-bit form. Normalized values are the bytes that it would put on the
//! wire.

use std::error::Error;
use std::hint::black_box;

use bytes::Bytes;
use llm_multimodal::vision::processor::ModelSpecificValue;
use llm_multimodal::vision::transforms::resize_bicubic_torch_aa;
use llm_multimodal::{
    EncoderDtype, EncoderInput, ImageDetail, ImageFrame, ImageSize, ImageSource, Parallelism,
    PreProcessorConfig, PreprocessedEncoderInputs, TransparencyPolicy, VisionPreProcessor,
    VisionProcessorRegistry, configure_parallelism, jpeg_turbo,
};

use crate::case::{Case, Format};
use crate::side::{Clock, Side, Stage, Times, whole_times};

/// The version in Cargo.toml.
const VERSION: &str = "1.14.0";

/// Returns `true` if the peer finds the library with which its JPEG pixels equal Pillow's.
pub(crate) fn has_libturbojpeg() -> bool {
    jpeg_turbo::turbojpeg_available()
}

pub(crate) struct LlmMultimodal {
    registry: VisionProcessorRegistry,
    repository: &'static str,
    model_type: &'static str,
    config: PreProcessorConfig,
    format: Format,
    bytes: Bytes,
    tensor: Vec<u8>,
}

impl LlmMultimodal {
    pub(crate) fn open(case: &Case) -> Result<Self, Box<dyn Error>> {
        let mode = configure_parallelism(Parallelism::Inline);
        mode.map_err(|mode| format!("llm-multimodal already runs as {mode:?}"))?;
        let config = std::fs::read_to_string(case.settings.join("preprocessor_config.json"))?;
        Ok(Self {
            registry: VisionProcessorRegistry::with_defaults(),
            repository: case.model.repository,
            model_type: case.model.model_type,
            config: PreProcessorConfig::from_json(&config)?,
            format: case.format,
            bytes: Bytes::from(std::fs::read(&case.picture)?),
            tensor: Vec::new(),
        })
    }

    /// Returns a frame like those of its media connector, without the size and the hash, which
    /// decoding does not use.
    fn frame(&self) -> ImageFrame {
        let detail = ImageDetail::Auto;
        let source = ImageSource::InlineBytes;
        let size = ImageSize::new(0, 0);
        ImageFrame::encoded(self.bytes.clone(), detail, source, String::new(), size, None)
            .with_transparency(TransparencyPolicy::CompositeOverWhite)
    }

    /// Measures resize and layout separately, for raw patches of an image that is resized.
    fn separate_stages(
        &self,
        processor: &dyn VisionPreProcessor,
        grid: &[i64],
    ) -> Result<Times, Box<dyn Error>> {
        let patch = self.config.get_patch_size(0) as u32;
        let [_, height, width] = *grid else {
            return Err("llm-multimodal's grid does not have three numbers".into());
        };
        let [width, height] = [width, height].map(|patches| patches as u32 * patch);
        let frame = self.frame();
        let image = frame.image()?;
        if (image.width(), image.height()) == (width, height) {
            return Ok(Times::new());
        }
        let clock = Clock::start();
        let resized = black_box(resize_bicubic_torch_aa(black_box(image), width, height));
        let resize = clock.read();
        let resized = std::slice::from_ref(&resized);
        let clock = Clock::start();
        let inputs = black_box(processor.preprocess(resized, &self.config)?);
        let layout = clock.read();
        match inputs.encoder_input {
            EncoderInput::U8 { patches, .. } if patches.iter().eq(&self.tensor) => {}
            _ => return Err("llm-multimodal's separate stages make another tensor".into()),
        }
        Ok(Times::from([(Stage::Resize, resize), (Stage::Layout, layout)]))
    }
}

/// Returns the type of normalized values on its wire; `None` for raw pixels.
const fn wire_type(format: Format) -> Option<EncoderDtype> {
    match format {
        Format::U8 => None,
        Format::Bf16 => Some(EncoderDtype::BFloat16),
        Format::F32 => Some(EncoderDtype::Float32),
    }
}

/// Converts pixels to the encoder's input.
fn process(
    processor: &dyn VisionPreProcessor,
    image: &ImageFrame,
    config: &PreProcessorConfig,
    format: Format,
) -> Result<PreprocessedEncoderInputs, Box<dyn Error>> {
    let images = std::slice::from_ref(image.image()?);
    let for_wire =
        wire_type(format).and_then(|dtype| processor.preprocess_wire(images, config, dtype));
    Ok(for_wire.unwrap_or_else(|| processor.preprocess(images, config))?)
}

impl Side for LlmMultimodal {
    fn name(&self) -> String {
        let suffix = if has_libturbojpeg() { "" } else { " without libturbojpeg" };
        format!("llm-multimodal {VERSION}{suffix}")
    }

    fn round(&mut self) -> Result<Times, Box<dyn Error>> {
        let processor = self.registry.find(self.repository, Some(self.model_type));
        let processor = processor.ok_or("llm-multimodal does not have the model")?;
        let clock = Clock::start();
        let frame = black_box(self.frame());
        frame.image()?;
        let decoded = clock.read();
        let inputs = process(processor, &frame, &self.config, self.format)?;
        let grid = inputs.model_specific.get("image_grid_thw").cloned();
        let tensor = match (inputs.encoder_input, wire_type(self.format)) {
            (EncoderInput::U8 { patches, .. }, None) => patches.into_raw_vec_and_offset().0,
            (input, Some(dtype)) => input.into_bytes_as(dtype)?,
            _ => return Err("llm-multimodal made no raw pixels".into()),
        };
        let processed = clock.read();
        drop(frame);
        let whole = clock.read();
        self.tensor = black_box(tensor);
        let mut times = whole_times(decoded, processed, whole);
        if let (Some(ModelSpecificValue::IntTensor { data, .. }), Format::U8) = (grid, self.format)
        {
            times.extend(self.separate_stages(processor, &data)?);
        }
        Ok(times)
    }

    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        Ok(Some(self.tensor.clone()))
    }
}
