//! The tensors of one item, as vLLM's wire format describes them.

use chiasm_types::{Dtype, TensorField};

/// The format of the pixel tensor, which decides where pixels are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PixelFormat {
    /// Resized 8-bit pixels. The engine rescales and normalises them (`mm_device_do_normalize` of
    /// vLLM).
    RawU8,
    /// Pixels rescaled and normalised here with the settings of the model directory. They are
    /// computed in f32, then rounded to nearest even.
    ///
    /// The type is [`Dtype::F32`], [`Dtype::F16`] or [`Dtype::BF16`];
    /// [`crate::VisionModel::process`] refuses others.
    Normalized(Dtype),
}

impl PixelFormat {
    /// Returns the element type of the pixel tensor.
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::RawU8 => Dtype::U8,
            Self::Normalized(dtype) => dtype,
        }
    }
}

/// One tensor of an item: dense, in row-major order, little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name of the tensor in the item's mm_kwargs, for instance `pixel_values`.
    pub name: &'static str,
    /// The element type.
    pub dtype: Dtype,
    /// The extents.
    pub shape: Vec<usize>,
    /// The rule by which the engine joins this tensor with those of other items.
    pub field: TensorField,
    /// The source of the bytes.
    pub contents: Contents,
}

/// The source of a tensor's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    /// The bytes are written by [`crate::VisionModel::process`].
    Pixels,
    /// The bytes are known from the plan: little-endian values.
    Small(Vec<u8>),
}
