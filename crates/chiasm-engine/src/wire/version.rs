//! Everything that depends on the version of vLLM.
//!
//! The wire is internal to vLLM and has only been appended to so far, so one codec reads and writes
//! all versions in the window:
//!
//! | since | |
//! |---|---|
//! | 0.32 | `weight_version` ends `EngineCoreOutputs`; `LoRARequest` lost a field, so only what is before that is sent |
//! | 0.33 | `error` ends `EngineCoreOutput` |
//!
//! When a version changes something else, the difference is written down here and the codecs ask.

use chiasm_types::VllmVersion;

/// The minor releases of vLLM that are tested and supported, with all their patches: these and
/// those between them.
pub const WINDOW: [VllmVersion; 2] = [VllmVersion::minor(0, 31), VllmVersion::minor(0, 33)];

/// Tensors below this many bytes travel inside the msgpack (`VLLM_MSGPACK_ZERO_COPY_THRESHOLD`'s
/// default).
pub const INLINE_LIMIT: usize = 256;

/// Type of the msgpack extension that holds raw tensor bytes (`CUSTOM_TYPE_RAW_VIEW` in
/// `vllm/v1/serial_utils.py`).
pub const RAW_VIEW: i8 = 3;

/// Fields of an `EngineCoreRequest` that have no default, so an engine insists on them.
pub const REQUEST_REQUIRED_FIELDS: usize = 9;

/// Fields of an `EngineCoreRequest` in all versions of the window.
pub const REQUEST_FIELDS: usize = 22;

/// Fields of an `EngineCoreOutput` before `error`.
pub const OUTPUT_FIELDS: usize = 18;

/// Fields of `EngineCoreOutputs` in all versions of the window.
pub const OUTPUTS_FIELDS: usize = 9;

/// How an engine's version relates to the [`WINDOW`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// It is in the window.
    Supported,
    /// Newer: fields may have been appended.
    Newer,
    /// Older: fields that are relied on may be missing.
    Older,
    /// Not a release number: a development build, whose wire can be anything.
    Unknown,
}

/// Compares the `vllm_version` that an engine reports with the [`WINDOW`].
pub fn support(vllm_version: &str) -> Support {
    let [oldest, newest] = WINDOW;
    match VllmVersion::parse(vllm_version).map(|version| VllmVersion { patch: 0, ..version }) {
        None => Support::Unknown,
        Some(version) if version < oldest => Support::Older,
        Some(version) if version > newest => Support::Newer,
        Some(_) => Support::Supported,
    }
}

/// The window, for people: `0.32 to 0.33`.
pub fn window() -> String {
    let [oldest, newest] = WINDOW.map(|version| format!("{}.{}", version.major, version.minor));
    format!("{oldest} to {newest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number_and_not_by_digit() {
        for version in ["0.31.0", "0.32.10", "0.33.1rc2", "0.33.0+cpu"] {
            assert_eq!(support(version), Support::Supported, "{version}");
        }
        assert_eq!(support("0.9.2"), Support::Older);
        assert_eq!(support("0.30.7"), Support::Older);
        assert_eq!(support("0.34.0"), Support::Newer);
        assert_eq!(support("1.0.0"), Support::Newer);
        assert_eq!(support("dev"), Support::Unknown);
    }
}
