use std::fmt;

/// A release number of vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VllmVersion {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
    /// The third number, 0 if absent.
    pub patch: u32,
}

impl VllmVersion {
    /// Returns the first patch of a minor release.
    pub const fn minor(major: u32, minor: u32) -> Self {
        Self { major, minor, patch: 0 }
    }

    /// Parses the release number at the start of `text`: `0.32.0`, `0.32.1rc2`,
    /// `0.33.0.dev12+g1234`, `v0.32`. Returns `None` if there is none.
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

impl fmt::Display for VllmVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_number_is_parsed_without_suffix() {
        let version = |major, minor, patch| Some(VllmVersion { major, minor, patch });
        assert_eq!(VllmVersion::parse("0.32.0"), version(0, 32, 0));
        assert_eq!(VllmVersion::parse("v0.33"), version(0, 33, 0));
        assert_eq!(VllmVersion::parse("0.33.1rc2.dev5+gabc"), version(0, 33, 1));
        assert_eq!(VllmVersion::parse("dev"), None);
        assert_eq!(VllmVersion::parse(""), None);
    }
}
