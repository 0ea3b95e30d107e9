//! The choice between raw and normalised values for an engine.

use chiasm_types::VllmVersion;

/// The policy for the values of an engine's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatPolicy {
    /// Raw values, which the engine normalises. It would silently normalise floats a second time.
    Raw,
    /// Raw values for this and later versions of vLLM and for versions without a number, normalised
    /// values for earlier versions.
    RawSince(VllmVersion),
    /// Normalised values, in the element type that the engine reports.
    Float,
}

impl FormatPolicy {
    /// Returns `true` if an engine with this version of vLLM gets raw values.
    pub fn is_raw(self, vllm_version: &str) -> bool {
        match self {
            Self::Raw => true,
            Self::RawSince(first) => {
                VllmVersion::parse(vllm_version).is_none_or(|found| found >= first)
            }
            Self::Float => false,
        }
    }
}
