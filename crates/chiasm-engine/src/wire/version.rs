//! Everything that depends on the version of vLLM.
//!
//! The wire is internal to vLLM. So far vLLM has only appended to it, so one codec reads and writes
//! all versions of the window:
//!
//! | since | |
//! |---|---|
//! | 0.32 | `weight_version` ends `EngineCoreOutputs`; `LoRARequest` lost a field, so only the fields before it are sent |
//! | 0.33 | `error` ends `EngineCoreOutput` |
//!
//! Other differences between versions belong here, where the codecs look them up.

use chiasm_types::VllmVersion;

/// The oldest and the newest minor release of vLLM that are tested and supported. All releases
/// between them, and all patches, are supported too.
pub const WINDOW: [VllmVersion; 2] = [VllmVersion::minor(0, 31), VllmVersion::minor(0, 33)];

/// The size in bytes from which tensors are sent as aux frames. Smaller ones are inside the msgpack
/// (the default of `VLLM_MSGPACK_ZERO_COPY_THRESHOLD`).
pub const INLINE_LIMIT_BYTES: usize = 256;

/// The type of the msgpack extension for raw tensor bytes (`CUSTOM_TYPE_RAW_VIEW` in
/// `vllm/v1/serial_utils.py`).
pub const RAW_VIEW: i8 = 3;

/// The number of fields of an `EngineCoreRequest` without a default, which engines require.
pub const REQUEST_REQUIRED_FIELDS: usize = 9;

/// The number of fields of an `EngineCoreRequest` in all versions of the window.
pub const REQUEST_FIELDS: usize = 22;

/// The number of fields of an `EngineCoreOutput` before `error`.
pub const OUTPUT_FIELDS: usize = 18;

/// The number of fields of `EngineCoreOutputs` in all versions of the window.
pub const OUTPUTS_FIELDS: usize = 9;

/// The relation of an engine's version to the [`WINDOW`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// In the window.
    Supported,
    /// Newer: fields may have been appended.
    Newer,
    /// Older: required fields may be missing.
    Older,
    /// Not a release number: a development build, whose wire is not known.
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

/// Formats the window as text: `0.32 to 0.33`.
pub fn window() -> String {
    let [oldest, newest] = WINDOW.map(|version| format!("{}.{}", version.major, version.minor));
    format!("{oldest} to {newest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
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
