/// How an engine joins one tensor of an item with the same tensor of a request's other items: vLLM's
/// `MultiModalFieldConfig`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorField {
    /// Concatenated along the first dimension, of which this item has `rows`.
    Flat {
        /// Extent of the first dimension.
        rows: usize,
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
