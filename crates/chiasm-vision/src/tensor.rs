//! What comes out: the tensors of one item, as vLLM's wire describes them.

use chiasm_types::{Dtype, TensorField};

/// The form in which pixels are written, which says who normalises them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PixelFormat {
    /// Resized 8-bit pixels: the engine rescales and normalises (vLLM's `mm_device_do_normalize`).
    RawU8,
    /// Rescaled and normalised here as the model directory asks, computed in f32, then rounded to
    /// nearest even: [`Dtype::F32`], [`Dtype::F16`] or [`Dtype::BF16`]. Other types are refused by
    /// [`crate::VisionModel::process`].
    Normalized(Dtype),
}

impl PixelFormat {
    /// Element type of the pixel tensor.
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::RawU8 => Dtype::U8,
            Self::Normalized(dtype) => dtype,
        }
    }
}

/// One tensor of an item. Its elements lie densely, last dimension fastest, little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name among the item's mm_kwargs, for instance `pixel_values`.
    pub name: &'static str,
    /// Element type.
    pub dtype: Dtype,
    /// Extents.
    pub shape: Vec<usize>,
    /// How the engine joins it with the same tensor of other items.
    pub field: TensorField,
    /// The source of its bytes.
    pub contents: Contents,
}

/// The source of a tensor's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    /// [`crate::VisionModel::process`] writes them.
    Pixels,
    /// Known from the plan: these, little-endian.
    Small(Vec<u8>),
}
