//! Finds a Python that the pinned packages are made for.

use std::process::Command;

use crate::child;
use crate::error::Error;

/// 3.11 is what the pins were tested with; vLLM 0.32 takes up to 3.14.
const VERSIONS: std::ops::RangeInclusive<u32> = 11..=14;
/// Names of Python programs, in the order in which they are tried.
const PROGRAMS: [&str; 2] = ["python3.11", "python3"];
/// Both imports are what `python -m venv` needs; Debian packs them apart from Python.
const QUESTION: &str = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])";

/// The name of a program that is a fitting Python with the modules to make environments.
pub(crate) fn find() -> Result<&'static str, Error> {
    choose(|program| {
        // A program may be on the PATH and still refuse to run, as version managers' stand-ins do.
        let answer = child::read(Command::new(program).args(["-c", QUESTION]), program);
        answer.map_err(|error| error.to_string())
    })
}

fn choose(ask: impl Fn(&str) -> Result<String, String>) -> Result<&'static str, Error> {
    let mut tried = Vec::new();
    for program in PROGRAMS {
        match ask(program) {
            Ok(version) if fits(&version) => return Ok(program),
            Ok(version) => tried.push(format!("{program} (is {version})")),
            Err(reason) => tried.push(format!("{program} ({reason})")),
        }
    }
    Err(Error::NoPython { tried: tried.join(", ") })
}

fn fits(version: &str) -> bool {
    version
        .strip_prefix("3.")
        .and_then(|minor| minor.parse().ok())
        .is_some_and(|minor| VERSIONS.contains(&minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_in_the_range_fit() {
        for version in ["3.11", "3.12", "3.14"] {
            assert!(fits(version), "{version}");
        }
        for version in ["3.10", "3.15", "2.7", "3.1", "4.11", "", "3.x"] {
            assert!(!fits(version), "{version}");
        }
    }

    #[test]
    fn the_tested_version_comes_first_and_a_broken_one_is_passed_over() {
        assert_eq!(choose(|_| Ok("3.11".into())).unwrap(), "python3.11");
        let broken = |program: &str| match program {
            "python3" => Ok("3.13".into()),
            _ => Err("not found".into()),
        };
        assert_eq!(choose(broken).unwrap(), "python3");
    }

    #[test]
    fn when_none_fits_the_error_says_what_was_there() {
        let old = |program: &str| match program {
            "python3" => Ok("3.9".into()),
            _ => Err("not found".into()),
        };
        let text = choose(old).unwrap_err().to_string();
        assert!(text.contains("python3.11 (not found), python3 (is 3.9)"), "{text}");
    }
}
