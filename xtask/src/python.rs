//! Finds a Python that is compatible with the pinned packages.

use std::process::Command;

use crate::child;
use crate::error::Error;

/// The supported minor versions of Python 3. The pins were tested with 3.11; vLLM 0.32 supports up
/// to 3.14.
const VERSIONS: std::ops::RangeInclusive<u32> = 11..=14;
/// The names of Python programs, in the order of attempts.
const PROGRAMS: [&str; 2] = ["python3.11", "python3"];
/// Prints the version. Imports what `python -m venv` needs, which Debian packages separately.
const SCRIPT: &str = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])";

/// Returns the name of the first supported Python that can make virtual environments.
pub(crate) fn find() -> Result<&'static str, Error> {
    choose(|program| {
        // A program on the PATH may refuse to run, as the shims of version managers do.
        let version = child::read(Command::new(program).args(["-c", SCRIPT]), program);
        version.map_err(|error| error.to_string())
    })
}

/// Returns the first of [`PROGRAMS`] whose version is supported.
fn choose(version: impl Fn(&str) -> Result<String, String>) -> Result<&'static str, Error> {
    let mut tried = Vec::new();
    for program in PROGRAMS {
        match version(program) {
            Ok(version) if is_supported(&version) => return Ok(program),
            Ok(version) => tried.push(format!("{program} (is {version})")),
            Err(reason) => tried.push(format!("{program} ({reason})")),
        }
    }
    Err(Error::NoPython { tried: tried.join(", ") })
}

fn is_supported(version: &str) -> bool {
    version
        .strip_prefix("3.")
        .and_then(|minor| minor.parse().ok())
        .is_some_and(|minor| VERSIONS.contains(&minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_outside_range_are_unsupported() {
        for version in ["3.11", "3.12", "3.14"] {
            assert!(is_supported(version), "{version}");
        }
        for version in ["3.10", "3.15", "2.7", "3.1", "4.11", "", "3.x"] {
            assert!(!is_supported(version), "{version}");
        }
    }

    #[test]
    fn tested_version_is_preferred_unless_broken() {
        assert_eq!(choose(|_| Ok("3.11".into())).unwrap(), "python3.11");
        let broken = |program: &str| match program {
            "python3" => Ok("3.13".into()),
            _ => Err("not found".into()),
        };
        assert_eq!(choose(broken).unwrap(), "python3");
    }

    #[test]
    fn unsupported_pythons_are_listed_in_error() {
        let old = |program: &str| match program {
            "python3" => Ok("3.9".into()),
            _ => Err("not found".into()),
        };
        let text = choose(old).unwrap_err().to_string();
        assert!(text.contains("python3.11 (not found), python3 (is 3.9)"), "{text}");
    }
}
