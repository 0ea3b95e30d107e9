use std::fmt;
use std::sync::Arc;

use chiasm_types::BlockSize;

/// Everything that decides how a prompt is expanded and keyed for a worker. Workers of equal classes can be given one plan
/// of a request; a request is planned and keyed once per class that is present in the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanClass {
    /// The processor that decides tokens and tensors of media items: its name, version and settings. Part of every item's
    /// identity.
    pub processor: Arc<str>,
    /// What stands for a media item in the prompt that the worker is given.
    pub placeholders: PlaceholderForm,
    /// How the blocks of a prompt are named.
    pub keys: KeyScheme,
    /// Tokens per block.
    pub block_size: BlockSize,
}

/// What stands for a media item in the prompt that a worker is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaceholderForm {
    /// As many tokens as the item has, as the engine computes them.
    Expanded,
    /// The template's one marker: the worker expands it itself.
    Marker,
}

/// How the blocks of a prompt are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyScheme {
    /// Our own 127-bit keys, from tokens and media identities (`chiasm-kv`).
    Chiasm,
}

/// A plan class in one fleet. Numbers are not used again when a class is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlanClassId(pub u32);

impl fmt::Display for PlanClassId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "class_{}", self.0)
    }
}
