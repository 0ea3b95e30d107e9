//! The plan of an image: its layout in the prompt and in tensors, computed from its size alone.

use chiasm_types::{Dtype, TensorField, TokenRun};

use crate::kernels::{Layer, Resampler};
use crate::{Contents, ImageSize, PixelFormat, TensorSpec, VisionError};

/// The layout of one image in the prompt and in tensors. Created by [`crate::VisionModel::plan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePlan {
    /// The size of the image before resizing.
    pub original: ImageSize,
    /// The size after resizing; the largest one if the image is resized to several.
    pub resized: ImageSize,
    /// The number of patches (Qwen-VL) or tiles of `resized`, along time, height and width.
    pub grid: [u32; 3],
    /// The number of embeddings of the image: the tokens of `placeholder` that embed.
    pub tokens: usize,
    /// The tokens that represent the image in the prompt, in place of its marker.
    pub placeholder: Vec<TokenRun>,
    pub(crate) pixels: PixelTensor,
    /// The other tensors, in the order in which the model's processor returns them.
    pub(crate) small_tensors: Vec<TensorSpec>,
}

/// The pixel tensor and the steps that produce it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PixelTensor {
    /// The name of the tensor in the item's mm_kwargs.
    pub(crate) name: &'static str,
    /// The extents; their product is the number of elements that the layers write.
    pub(crate) shape: Vec<usize>,
    pub(crate) field: TensorField,
    pub(crate) resampler: Resampler,
    /// The parts of the tensor, written one after the other.
    pub(crate) layers: Vec<Layer>,
}

impl PixelTensor {
    /// Returns the number of elements.
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ImagePlan {
    /// Creates a plan from its parts and counts its embeddings.
    ///
    /// # Errors
    /// [`VisionError::TooLarge`] if the pixels do not fit into the address space.
    pub(crate) fn new(
        original: ImageSize,
        resized: ImageSize,
        grid: [u32; 3],
        placeholder: Vec<TokenRun>,
        pixels: PixelTensor,
        small_tensors: Vec<TensorSpec>,
    ) -> Result<Self, VisionError> {
        let elements = pixels.layers.iter().try_fold(0_usize, |sum, layer| {
            let elements = layer.layout.checked_elements()?;
            sum.checked_add(elements).filter(|&sum| sum <= isize::MAX as usize / 4)
        });
        if elements.is_none() {
            return Err(VisionError::TooLarge {
                size: original,
                width: resized.width.into(),
                height: resized.height.into(),
            });
        }
        debug_assert_eq!(elements, Some(pixels.elements()));
        let tokens = placeholder.iter().filter(|run| run.embeds).map(|run| run.count).sum();
        Ok(Self { original, resized, grid, tokens, placeholder, pixels, small_tensors })
    }

    /// Returns the item's tensors in the order of the model's processor; the pixels come first.
    pub fn tensors(&self, format: PixelFormat) -> Vec<TensorSpec> {
        let pixels = TensorSpec {
            name: self.pixels.name,
            dtype: format.dtype(),
            shape: self.pixels.shape.clone(),
            field: self.pixels.field,
            contents: Contents::Pixels,
        };
        std::iter::once(pixels).chain(self.small_tensors.iter().cloned()).collect()
    }

    /// Returns the size of the pixel tensor in bytes.
    ///
    /// It fits into the address space for every format: otherwise there is no plan. It can still be
    /// unreasonably large: compare [`ImagePlan::tokens`] with the model's context length.
    pub fn pixel_bytes(&self, format: PixelFormat) -> usize {
        self.pixels.elements() * format.dtype().size()
    }
}

impl TensorSpec {
    /// Creates an int64 tensor with known values.
    pub(crate) fn integers(
        name: &'static str,
        shape: Vec<usize>,
        field: TensorField,
        values: &[i64],
    ) -> Self {
        let contents =
            Contents::Small(values.iter().flat_map(|value| value.to_le_bytes()).collect());
        Self { name, dtype: Dtype::I64, shape, field, contents }
    }
}
