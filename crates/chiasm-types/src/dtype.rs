crate::every_variant! {
    /// The element type of a tensor that is handed to an engine.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Dtype {
        /// `torch.uint8`
        U8,
        /// `torch.bool`, one byte per element
        Bool,
        /// `torch.int8`
        I8,
        /// `torch.int16`
        I16,
        /// `torch.int32`
        I32,
        /// `torch.int64`
        I64,
        /// `torch.float16`
        F16,
        /// `torch.bfloat16`
        BF16,
        /// `torch.float32`
        F32,
        /// `torch.float64`
        F64,
    }
}

impl Dtype {
    /// Returns the number of bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::Bool | Self::I8 => 1,
            Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Returns the name in torch and on vLLM's wire, without the `torch.` prefix.
    pub const fn torch_name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::Bool => "bool",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
        }
    }

    /// Parses a name as [`Dtype::torch_name`] writes it. Returns `None` for types that Chiasm does
    /// not hand over.
    pub fn from_torch_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.torch_name() == name)
    }
}
