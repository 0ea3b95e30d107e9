//! What an image will become, known from its size alone.

use chiasm_types::{Dtype, TensorField, TokenRun};

use crate::kernels::{Layer, Resampler};
use crate::{Contents, ImageSize, PixelFormat, TensorSpec, VisionError};

/// The layout of one image in the prompt and in tensors. Made by [`crate::VisionModel::plan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePlan {
    /// Size of the image as it came in.
    pub original: ImageSize,
    /// Size to which it is resized, or the largest of them if there are several.
    pub resized: ImageSize,
    /// What `resized` is cut into, along time, height and width: patches (Qwen-VL) or tiles.
    pub grid: [u32; 3],
    /// Embeddings that the image becomes: the tokens of `placeholder` that embed.
    pub tokens: usize,
    /// The tokens that stand for the image in the prompt, in place of its one marker.
    pub placeholder: Vec<TokenRun>,
    pub(crate) pixels: PixelTensor,
    /// The other tensors, in the order in which the model's processor returns them.
    pub(crate) small: Vec<TensorSpec>,
}

/// The tensor of pixels and how it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PixelTensor {
    /// Its name among the item's mm_kwargs.
    pub(crate) name: &'static str,
    /// Extents; their product is the number of elements that the layers write.
    pub(crate) shape: Vec<usize>,
    pub(crate) field: TensorField,
    pub(crate) resampler: Resampler,
    /// What is written, one after the other.
    pub(crate) layers: Vec<Layer>,
}

impl PixelTensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ImagePlan {
    /// Puts the parts together.
    ///
    /// # Errors
    /// [`VisionError::TooLarge`] if no memory holds the pixels.
    pub(crate) fn new(
        original: ImageSize,
        resized: ImageSize,
        grid: [u32; 3],
        placeholder: Vec<TokenRun>,
        pixels: PixelTensor,
        small: Vec<TensorSpec>,
    ) -> Result<Self, VisionError> {
        let elements = pixels.layers.iter().try_fold(0_usize, |sum, layer| {
            let elements = layer.layout.checked_elements()?;
            sum.checked_add(elements).filter(|&sum| sum <= isize::MAX as usize / 4)
        });
        if elements.is_none() {
            let (width, height) = (resized.width.into(), resized.height.into());
            return Err(VisionError::TooLarge { size: original, width, height });
        }
        debug_assert_eq!(elements, Some(pixels.elements()));
        let tokens = placeholder.iter().filter(|run| run.embeds).map(|run| run.count).sum();
        Ok(Self { original, resized, grid, tokens, placeholder, pixels, small })
    }

    /// The item's tensors, in the order in which the model's processor returns them; the pixels
    /// come first.
    pub fn tensors(&self, format: PixelFormat) -> Vec<TensorSpec> {
        let pixels = TensorSpec {
            name: self.pixels.name,
            dtype: format.dtype(),
            shape: self.pixels.shape.clone(),
            field: self.pixels.field,
            contents: Contents::Pixels,
        };
        std::iter::once(pixels).chain(self.small.iter().cloned()).collect()
    }

    /// Bytes of the pixel tensor. A plan exists only if this fits into memory's address space for
    /// every format; whether it is reasonable is for the caller to judge, by [`ImagePlan::tokens`]
    /// against the model's length.
    pub fn pixel_bytes(&self, format: PixelFormat) -> usize {
        self.pixels.elements() * format.dtype().size()
    }
}

impl TensorSpec {
    /// Integers, as int64.
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
