//! Raw or normalised values, by what an engine does with them.

use chiasm_types::VllmVersion;

/// The kind of values that an engine is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatPolicy {
    /// Raw ones: the engine normalises. Sending it floats would normalise them twice, silently.
    Raw,
    /// Raw ones from this version of vLLM on, and from one that tells no number; normalised ones
    /// before it.
    RawSince(VllmVersion),
    /// Normalised ones, in the element type that the engine reports.
    Float,
}

impl FormatPolicy {
    /// Whether an engine that reports this version of vLLM is sent raw values.
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
