//! Everything that depends on the version of vLLM.
//!
//! The wire is internal to vLLM and has only been appended to so far. When a version changes something, the
//! difference is written down here and the codecs ask.

use std::fmt;

/// The version of vLLM whose wire this crate was measured against.
pub const TESTED: Version = Version { major: 0, minor: 32, patch: 0 };

/// Tensors below this many bytes travel inside the msgpack (`VLLM_MSGPACK_ZERO_COPY_THRESHOLD`'s default).
pub const INLINE_LIMIT: usize = 256;

/// Type of the msgpack extension that holds raw tensor bytes (`CUSTOM_TYPE_RAW_VIEW` in `vllm/v1/serial_utils.py`).
pub const RAW_VIEW: i8 = 3;

/// Fields of an `EngineCoreRequest` that have no default, so an engine insists on them.
pub const REQUEST_REQUIRED_FIELDS: usize = 9;

/// Fields of an `EngineCoreRequest` in the tested version.
pub const REQUEST_FIELDS: usize = 22;

/// Fields of an `EngineCoreOutput` in the tested version.
pub const OUTPUT_FIELDS: usize = 18;

/// Fields of `EngineCoreOutputs` in the tested version.
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

/// How an engine's version relates to the tested one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// The wire was measured with this release.
    Tested,
    /// Newer: fields may have been appended.
    Newer,
    /// Older: fields that are relied on may be missing.
    Older,
    /// Not a release number: a development build, whose wire can be anything.
    Unknown,
}

impl Version {
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

/// Compares the `vllm_version` that an engine reports with [`TESTED`].
pub fn support(vllm_version: &str) -> Support {
    match Version::parse(vllm_version) {
        None => Support::Unknown,
        Some(version) if version < TESTED => Support::Older,
        Some(version) if version > TESTED => Support::Newer,
        Some(_) => Support::Tested,
    }
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
        assert_eq!(support("0.32.0"), Support::Tested);
        assert_eq!(support("0.9.2"), Support::Older);
        assert_eq!(support("0.32.10"), Support::Newer);
        assert_eq!(support("1.0.0"), Support::Newer);
        assert_eq!(support("dev"), Support::Unknown);
    }
}
