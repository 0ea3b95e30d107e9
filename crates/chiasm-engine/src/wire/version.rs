//! Everything that depends on the version of vLLM.
//!
//! The wire is internal to vLLM and has only been appended to so far, so one codec reads and writes all versions in the window:
//!
//! | since | |
//! |---|---|
//! | 0.33 | `error` ends `EngineCoreOutput` |
//!
//! When a version changes something else, the difference is written down here and the codecs ask.

use std::fmt;

/// The minor releases of vLLM that are tested and supported, with all their patches: these and those between them.
pub const WINDOW: [Version; 2] = [Version::minor(0, 32), Version::minor(0, 33)];

/// Tensors below this many bytes travel inside the msgpack (`VLLM_MSGPACK_ZERO_COPY_THRESHOLD`'s default).
pub const INLINE_LIMIT: usize = 256;

/// Type of the msgpack extension that holds raw tensor bytes (`CUSTOM_TYPE_RAW_VIEW` in `vllm/v1/serial_utils.py`).
pub const RAW_VIEW: i8 = 3;

/// Fields of an `EngineCoreRequest` that have no default, so an engine insists on them.
pub const REQUEST_REQUIRED_FIELDS: usize = 9;

/// Fields of an `EngineCoreRequest` in all versions of the window.
pub const REQUEST_FIELDS: usize = 22;

/// Fields of an `EngineCoreOutput` before `error`.
pub const OUTPUT_FIELDS: usize = 18;

/// Fields of `EngineCoreOutputs` in all versions of the window.
pub const OUTPUTS_FIELDS: usize = 9;

/// The release number of a vLLM version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number, 0 when absent.
    pub patch: u32,
}

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

impl Version {
    const fn minor(major: u32, minor: u32) -> Self {
        Self { major, minor, patch: 0 }
    }

    /// Reads the release number that starts `text`: `0.32.0`, `0.32.1rc2`, `0.33.0.dev12+g1234`, `v0.32`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.strip_prefix('v').unwrap_or(text).splitn(3, '.');
        let major = numbers.next()?.parse().ok()?;
        let minor = leading_number(numbers.next()?)?;
        let patch = numbers.next().and_then(leading_number).unwrap_or(0);
        Some(Self { major, minor, patch })
    }
}

fn leading_number(text: &str) -> Option<u32> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().ok()
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Compares the `vllm_version` that an engine reports with the [`WINDOW`].
pub fn support(vllm_version: &str) -> Support {
    let [oldest, newest] = WINDOW;
    match Version::parse(vllm_version).map(|version| Version { patch: 0, ..version }) {
        None => Support::Unknown,
        Some(version) if version < oldest => Support::Older,
        Some(version) if version > newest => Support::Newer,
        Some(_) => Support::Supported,
    }
}

/// The window, for people: `0.32 to 0.33`.
pub(crate) fn window() -> String {
    let [oldest, newest] = WINDOW.map(|version| format!("{}.{}", version.major, version.minor));
    format!("{oldest} to {newest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_numbers_are_read_from_the_front() {
        let version = |major, minor, patch| Some(Version { major, minor, patch });
        assert_eq!(Version::parse("0.32.0"), version(0, 32, 0));
        assert_eq!(Version::parse("v0.33"), version(0, 33, 0));
        assert_eq!(Version::parse("0.33.1rc2.dev5+gabc"), version(0, 33, 1));
        assert_eq!(Version::parse("dev"), None);
        assert_eq!(Version::parse(""), None);
    }

    #[test]
    fn versions_compare_by_number_and_not_by_digit() {
        for version in ["0.32.0", "0.32.10", "0.33.1rc2", "0.33.0+cpu"] {
            assert_eq!(support(version), Support::Supported, "{version}");
        }
        assert_eq!(support("0.9.2"), Support::Older);
        assert_eq!(support("0.31.7"), Support::Older);
        assert_eq!(support("0.34.0"), Support::Newer);
        assert_eq!(support("1.0.0"), Support::Newer);
        assert_eq!(support("dev"), Support::Unknown);
    }
}
