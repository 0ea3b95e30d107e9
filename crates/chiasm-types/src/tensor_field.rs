/// The way an engine joins a tensor of one item with the same tensor of a request's other items:
/// vLLM's `MultiModalFieldConfig`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorField {
    /// Concatenated along a dimension.
    Flat {
        /// This item's extent along the dimension.
        rows: usize,
        /// The dimension; -1 is the last.
        dim: i64,
        /// `true` if the engine leaves the tensor in host memory.
        keep_on_cpu: bool,
    },
    /// Stacked along a new first dimension.
    Batched {
        /// `true` if the engine leaves the tensor in host memory.
        keep_on_cpu: bool,
    },
    /// The same for all items: the engine keeps one.
    Shared {
        /// `true` if the engine leaves the tensor in host memory.
        keep_on_cpu: bool,
    },
}

impl TensorField {
    /// Creates a field that is concatenated along the first dimension and moved to the engine's
    /// device. `rows` is this item's extent along that dimension.
    pub const fn rows(rows: usize) -> Self {
        Self::Flat { rows, dim: 0, keep_on_cpu: false }
    }
}
