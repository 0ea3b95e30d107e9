//! What an image will become, known from its size alone.

use chiasm_types::{Dtype, TokenRun};

use crate::kernels::PatchGrid;
use crate::{Contents, Field, ImageSize, PixelFormat, TensorSpec};

/// The layout of one image in the prompt and in tensors. Made by [`crate::VisionModel::plan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePlan {
    /// Size of the image as it came in.
    pub original: ImageSize,
    /// Size to which it is resized.
    pub resized: ImageSize,
    /// Patches along time, height and width.
    pub grid: [u32; 3],
    /// Embeddings that the image becomes: the tokens of `placeholder` that embed.
    pub tokens: usize,
    /// The tokens that stand for the image in the prompt, in place of its one marker.
    pub placeholder: Vec<TokenRun>,
    pub(crate) patches: PatchGrid,
}

impl ImagePlan {
    /// The item's tensors, in the order in which the model's processor returns them:
    /// `pixel_values [patches, 3 * temporal_patch * patch * patch]` and `image_grid_thw [3]`.
    pub fn tensors(&self, format: PixelFormat) -> Vec<TensorSpec> {
        let rows = self.patches.rows();
        vec![
            TensorSpec {
                name: "pixel_values",
                dtype: format.dtype(),
                shape: vec![rows, self.patches.row_len()],
                field: Field::Flat { rows },
                contents: Contents::Pixels,
            },
            TensorSpec {
                name: "image_grid_thw",
                dtype: Dtype::I64,
                shape: vec![3],
                field: Field::Batched { keep_on_cpu: true },
                contents: Contents::Small(
                    self.grid.iter().flat_map(|&extent| i64::from(extent).to_le_bytes()).collect(),
                ),
            },
        ]
    }

    /// Bytes of the pixel tensor. A plan exists only if this fits into memory's address space for every format;
    /// whether it is reasonable is for the caller to judge, by [`ImagePlan::tokens`] against the model's length.
    pub fn pixel_bytes(&self, format: PixelFormat) -> usize {
        self.patches.rows() * self.patches.row_len() * format.dtype().size()
    }
}
