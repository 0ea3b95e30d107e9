//! The plan of a video: the frames to decode, its layout in the prompt and in tensors.

use chiasm_types::{Dtype, TensorField, TokenRun};
use half::{bf16, f16};

use super::{VideoLoader, VideoPiece, VideoProperties, placeholder};
use crate::image_plan::PixelTensor;
use crate::{
    Contents, ImageSize, PixelFormat, TensorSpec, VisionError, Vocabulary, VocabularyError,
};

/// The maximum number of elements of a pixel tensor, which the engine's kernels count with 32 bits.
pub(super) const MAX_ELEMENTS: u64 = i32::MAX as u64;

/// The layout of one video in the prompt and in tensors. Created by [`crate::VideoModel::plan`].
#[derive(Clone, Debug, PartialEq)]
pub struct VideoPlan {
    /// The properties that the plan was made for.
    pub video: VideoProperties,
    /// The loader that vLLM would use.
    pub loader: VideoLoader,
    /// The numbers of the frames that vLLM's loader decodes, ascending.
    pub loaded_frames: Vec<u64>,
    /// The numbers of the frames in the pixel tensor, ascending: those that need to be decoded.
    ///
    /// They differ from `loaded_frames` if the model's processor samples once more.
    pub frames: Vec<u64>,
    /// The size of a frame after resizing, before it is cropped.
    pub resized: ImageSize,
    /// The number of patches along time, height and width (Qwen-VL), or of frames and two ones.
    pub grid: [u32; 3],
    /// The number of video tokens in the placeholder, after pruning.
    pub tokens: usize,
    /// The text and tokens that represent the video in the prompt, in place of its marker.
    pub placeholder: Vec<VideoPiece>,
    /// The seconds of each group of frames: the field `timestamps` of Qwen3-VL, a list of floats.
    pub timestamps: Option<Vec<f64>>,
    /// The seconds per group of frames: the field `second_per_grid_ts` of Qwen2.5-VL.
    pub(super) seconds_per_group: Option<f64>,
    /// The pixel tensor; its only layer is that of one frame.
    pub(super) pixels: PixelTensor,
    /// The small tensors of integers.
    pub(super) small_tensors: Vec<TensorSpec>,
}

impl VideoPlan {
    /// Returns the tokens that represent the video in the prompt, in place of its marker.
    ///
    /// # Errors
    /// Fails if a text of the placeholder cannot be tokenized.
    pub fn tokenize(&self, vocabulary: &dyn Vocabulary) -> Result<Vec<TokenRun>, VocabularyError> {
        placeholder::tokenize(&self.placeholder, vocabulary)
    }

    /// Returns the item's tensors; the pixels come first. `timestamps` is no tensor.
    ///
    /// `model_dtype` is the engine's `--dtype`, to which vLLM converts small floats as well.
    ///
    /// # Errors
    /// [`VisionError::NotAFloat`] if `model_dtype` is not a supported float.
    pub fn tensors(
        &self,
        format: PixelFormat,
        model_dtype: Dtype,
    ) -> Result<Vec<TensorSpec>, VisionError> {
        let mut tensors = vec![TensorSpec {
            name: self.pixels.name,
            dtype: format.dtype(),
            shape: self.pixels.shape.clone(),
            field: self.pixels.field,
            contents: Contents::Pixels,
        }];
        tensors.extend(self.small_tensors.iter().cloned());
        if let Some(seconds) = self.seconds_per_group {
            // `transformers` makes a float32, vLLM converts it.
            let seconds = seconds as f32;
            let bytes = match model_dtype {
                Dtype::F32 => seconds.to_le_bytes().to_vec(),
                Dtype::F16 => f16::from_f32(seconds).to_le_bytes().to_vec(),
                Dtype::BF16 => bf16::from_f32(seconds).to_le_bytes().to_vec(),
                other => return Err(VisionError::NotAFloat(other)),
            };
            tensors.push(TensorSpec {
                name: "second_per_grid_ts",
                dtype: model_dtype,
                shape: Vec::new(),
                field: TensorField::Batched { keep_on_cpu: true },
                contents: Contents::Small(bytes),
            });
        }
        Ok(tensors)
    }

    /// Returns the size of the pixel tensor in bytes, which fits into the address space.
    pub fn pixel_bytes(&self, format: PixelFormat) -> usize {
        self.pixels.shape.iter().product::<usize>() * format.dtype().size()
    }
}
