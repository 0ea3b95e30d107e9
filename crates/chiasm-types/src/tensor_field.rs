/// How an engine joins one tensor of an item with the same tensor of a request's other items:
/// vLLM's `MultiModalFieldConfig`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorField {
    /// Concatenated along a dimension.
    Flat {
        /// This item's extent of it.
        rows: usize,
        /// The dimension; -1 is the last.
        dim: i64,
        /// The engine leaves the tensor in host memory.
        keep_on_cpu: bool,
    },
    /// Stacked along a new first dimension.
    Batched {
        /// The engine leaves the tensor in host memory.
        keep_on_cpu: bool,
    },
    /// The same for all items: one stands for all.
    Shared {
        /// The engine leaves the tensor in host memory.
        keep_on_cpu: bool,
    },
}

impl TensorField {
    /// Concatenated along the first dimension, of which this item has `rows`, and moved to the
    /// engine's device.
    pub const fn rows(rows: usize) -> Self {
        Self::Flat { rows, dim: 0, keep_on_cpu: false }
    }
}
