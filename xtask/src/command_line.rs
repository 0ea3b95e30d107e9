//! Parses the command line. There are few enough commands and flags to parse by hand.

use crate::bench_peers::{Bench, DoorSides, SHORT_ROUNDS};
use crate::cross::Target;
use crate::dist::Profile;
use crate::error::Error;
use crate::sglang_env;
use crate::test_run::TestOptions;
use crate::test_steps;
use crate::vllm_env::VLLM_VERSION;
use crate::vllm_overlay::{NEWEST, VERSIONS};

/// Printed by `cargo xtask help`.
pub(crate) const USAGE: &str = include_str!("usage.txt");

/// A parsed command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Help,
    VllmEnv {
        version: &'static str,
    },
    /// Compares a version of vLLM with its manifest, or writes its manifest.
    VllmDrift {
        version: String,
        write: bool,
    },
    SglangEnv {
        version: &'static str,
    },
    ClientsEnv,
    RecordClients,
    Models,
    Goldens {
        version: &'static str,
    },
    BenchPeers {
        bench: Bench,
        rounds: u32,
        json: bool,
        sides: DoorSides,
    },
    Test(TestOptions),
    /// Measures the structure of the code.
    Structure {
        /// The crate to describe; `None` measures all crates.
        name: Option<String>,
    },
    /// Checks format, lints and unit tests of changed crates.
    Check,
    /// Records the profile for release builds.
    Pgo,
    /// Builds the release artifacts.
    Dist {
        profile: Profile,
        /// The system to build for; `None` for this one.
        target: Option<Target>,
        /// Tests the artifacts after the build.
        test: bool,
    },
    AgentProto,
    ModelsPage,
    VersionsPage,
    Soak {
        minutes: u32,
        seed: Option<u64>,
    },
}

/// Parses the arguments after the program's name.
pub(crate) fn parse(arguments: &[String]) -> Result<Command, Error> {
    let Some((name, flags)) = arguments.split_first() else {
        return Ok(Command::Help);
    };
    let mut flags = flags.iter().peekable();
    let mut command = match name.as_str() {
        "help" | "--help" | "-h" => Command::Help,
        "vllm-env" => Command::VllmEnv { version: VLLM_VERSION },
        "vllm-drift" => match flags.next().map(String::as_str) {
            Some("--help" | "-h") => return Ok(Command::Help),
            version => Command::VllmDrift { version: release(version)?, write: false },
        },
        "sglang-env" => match flags.next().map(String::as_str) {
            Some("--help" | "-h") => return Ok(Command::Help),
            version => Command::SglangEnv {
                version: version.map_or(Ok(sglang_env::NEWEST), sglang_version)?,
            },
        },
        "clients-env" => Command::ClientsEnv,
        "record-clients" => Command::RecordClients,
        "models" => Command::Models,
        "pgo" => Command::Pgo,
        "dist" => Command::Dist { profile: Profile::Dist, target: None, test: false },
        "agent-proto" => Command::AgentProto,
        "models-page" => Command::ModelsPage,
        "versions-page" => Command::VersionsPage,
        "goldens" => Command::Goldens { version: NEWEST },
        "bench-peers" => match flags.next().map(String::as_str) {
            Some("--help" | "-h") => return Ok(Command::Help),
            name => {
                let unknown = || Error::UnknownBench { name: name.unwrap_or_default().to_owned() };
                let bench = name.and_then(Bench::from_name).ok_or_else(unknown)?;
                Command::BenchPeers {
                    bench,
                    rounds: bench.min_rounds(),
                    json: false,
                    sides: DoorSides::default(),
                }
            }
        },
        "test" => Command::Test(TestOptions {
            versions: vec![NEWEST],
            record: false,
            sglang: None,
            steps: Vec::new(),
            enforces_budgets: true,
        }),
        "structure" => match flags.next().map(String::as_str) {
            Some("--help" | "-h") => return Ok(Command::Help),
            name => Command::Structure { name: name.map(str::to_owned) },
        },
        "check" => Command::Check,
        "soak" => Command::Soak { minutes: 2, seed: None },
        _ => return Err(Error::UnknownCommand { name: name.clone() }),
    };
    while let Some(flag) = flags.next() {
        match (flag.as_str(), &mut command) {
            ("--no-vllm", Command::Test(options)) => options.versions.clear(),
            ("--no-budgets", Command::Test(options)) => options.enforces_budgets = false,
            ("--sglang", Command::Test(options)) => {
                let named =
                    flags.next_if(|next| next.starts_with(|first: char| first.is_ascii_digit()));
                options.sglang =
                    Some(named.map_or(Ok(sglang_env::NEWEST), |name| sglang_version(name))?);
            }
            ("--vllm", Command::Test(options)) => {
                options.record = true;
                options.versions = match flags.next().map(String::as_str) {
                    Some("all") => VERSIONS.into_iter().rev().collect(),
                    name => vec![version(name)?],
                }
            }
            (
                "--vllm",
                Command::VllmEnv { version: selected } | Command::Goldens { version: selected },
            ) => *selected = version(flags.next().map(String::as_str))?,
            ("--write", Command::VllmDrift { write, .. }) => *write = true,
            ("--json", Command::BenchPeers { json, .. }) => *json = true,
            ("--rounds", Command::BenchPeers { bench, rounds, .. }) => {
                let found = flags.next().map(String::as_str).unwrap_or_default();
                let min = bench.min_rounds();
                let number = found.parse().ok().filter(|&number| number >= min);
                *rounds = number.ok_or_else(|| Error::Rounds { found: found.to_owned(), min })?;
            }
            ("--short", Command::BenchPeers { bench, rounds, .. }) if bench.has_short_run() => {
                *rounds = SHORT_ROUNDS
            }
            ("--test", Command::Dist { test, .. }) => *test = true,
            ("--profile", Command::Dist { profile, .. }) => *profile = cargo_profile(flags.next())?,
            ("--profile", Command::BenchPeers { bench, sides, .. }) if bench.has_profile() => {
                sides.profile = cargo_profile(flags.next())?;
            }
            ("--target", Command::Dist { target, .. }) => {
                let found = flags.next().map(String::as_str).unwrap_or_default();
                *target = Some(Target::from_name(found).ok_or_else(|| Error::Target {
                    found: found.to_owned(),
                    known: Target::names(),
                })?);
            }
            ("--minutes", Command::Soak { minutes, .. }) => {
                let number =
                    flags.next().and_then(|found| found.parse().ok()).filter(|&number| number > 0);
                *minutes = number.ok_or(Error::Number { flag: "--minutes" })?;
            }
            ("--seed", Command::Soak { seed, .. }) => {
                let number = flags.next().and_then(|found| found.parse().ok());
                *seed = Some(number.ok_or(Error::Number { flag: "--seed" })?);
            }
            (
                "--baseline",
                Command::BenchPeers { bench: Bench::Door | Bench::Stream, sides, .. },
            ) => {
                sides.baseline = Some(flags.next().ok_or(Error::NoBaseline)?.into());
            }
            (
                "--with-peers",
                Command::BenchPeers { bench: Bench::Door | Bench::Stream, sides, .. },
            ) => sides.with_peers = true,
            ("--engines", Command::BenchPeers { bench: Bench::Door, sides, .. }) => {
                let found = flags.next().map(String::as_str).unwrap_or_default();
                let number = found.parse().ok().filter(|&number| number > 0);
                sides.engines = number.ok_or_else(|| Error::Engines { found: found.to_owned() })?;
            }
            ("--help" | "-h", _) => return Ok(Command::Help),
            (step, Command::Test(options)) if !step.starts_with('-') => {
                options.steps.push(step.to_owned())
            }
            _ => {
                return Err(Error::UnknownFlag { command: name.clone(), flag: flag.clone() });
            }
        }
    }
    if let Command::Test(TestOptions { steps, .. }) = &command {
        test_steps::select(steps)?;
    }
    Ok(command)
}

/// Returns the cargo profile with this name.
fn cargo_profile(name: Option<&String>) -> Result<Profile, Error> {
    let found = name.map(String::as_str).unwrap_or_default();
    Profile::from_name(found).ok_or_else(|| Error::Profile { found: found.to_owned() })
}

/// Returns the supported version with this name, which may be short: `0.33`.
fn version(name: Option<&str>) -> Result<&'static str, Error> {
    let name = name.unwrap_or_default();
    let is_named = |version: &&str| *version == name || version.strip_suffix(".0") == Some(name);
    VERSIONS
        .into_iter()
        .find(is_named)
        .ok_or_else(|| Error::UnknownVersion { name: name.to_owned(), known: VERSIONS.join(", ") })
}

/// Returns the supported version of SGLang with this name.
fn sglang_version(name: &str) -> Result<&'static str, Error> {
    let known = sglang_env::VERSIONS.into_iter().find(|version| *version == name);
    known.ok_or_else(|| Error::UnknownSglang {
        name: name.to_owned(),
        known: sglang_env::VERSIONS.join(", "),
    })
}

/// Parses the full release number of any version of vLLM.
fn release(name: Option<&str>) -> Result<String, Error> {
    let name = name.unwrap_or_default();
    let numbers: Vec<_> = name.split('.').map(str::parse::<u32>).collect();
    let is_release = numbers.len() == 3 && numbers.iter().all(Result::is_ok);
    is_release.then(|| name.to_owned()).ok_or_else(|| Error::Release { found: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(line: &str) -> Result<Command, Error> {
        parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn command_is_parsed_by_name() {
        assert_eq!(parse_words("vllm-env").unwrap(), Command::VllmEnv { version: VLLM_VERSION });
        assert_eq!(
            parse_words("vllm-env --vllm 0.33").unwrap(),
            Command::VllmEnv { version: "0.33.0" }
        );
        assert_eq!(parse_words("sglang-env").unwrap(), Command::SglangEnv { version: "0.5.23" });
        assert_eq!(
            parse_words("sglang-env 0.5.22").unwrap(),
            Command::SglangEnv { version: "0.5.22" }
        );
        assert!(parse_words("sglang-env 0.5.1").is_err());
        assert_eq!(parse_words("clients-env").unwrap(), Command::ClientsEnv);
        assert_eq!(parse_words("record-clients").unwrap(), Command::RecordClients);
        assert_eq!(parse_words("models").unwrap(), Command::Models);
        assert_eq!(parse_words("structure").unwrap(), Command::Structure { name: None });
        let name = Some("chiasm-kv".to_owned());
        assert_eq!(parse_words("structure chiasm-kv").unwrap(), Command::Structure { name });
        assert_eq!(parse_words("models-page").unwrap(), Command::ModelsPage);
        assert_eq!(parse_words("goldens").unwrap(), Command::Goldens { version: NEWEST });
        assert_eq!(
            parse_words("goldens --vllm 0.31").unwrap(),
            Command::Goldens { version: "0.31.0" }
        );
        assert_eq!(parse_words("").unwrap(), Command::Help);
        assert_eq!(parse_words("models --help").unwrap(), Command::Help);
    }

    /// Parses `test` with these flags.
    fn options(flags: &str) -> Result<TestOptions, Error> {
        match parse_words(&format!("test {flags}"))? {
            Command::Test(options) => Ok(options),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn test_runs_engines_unless_disabled() {
        let defaults = options("").unwrap();
        assert_eq!(
            (defaults.versions, defaults.record, defaults.sglang, defaults.enforces_budgets),
            (vec!["0.33.0"], false, None, true)
        );
        assert_eq!(options("--no-vllm").unwrap().versions, [""; 0]);
        let with_sglang = |flags| options(flags).map(|options| options.sglang);
        assert_eq!(with_sglang("--sglang --no-vllm").unwrap(), Some("0.5.23"));
        assert_eq!(with_sglang("--no-vllm --sglang 0.5.22").unwrap(), Some("0.5.22"));
        assert!(with_sglang("--sglang 0.1").is_err());
        let with_vllm = |flags| options(flags).map(|options| (options.versions, options.record));
        assert_eq!(with_vllm("--vllm 0.32").unwrap(), (vec!["0.32.0"], true));
        assert_eq!(with_vllm("--vllm all").unwrap(), (vec!["0.33.0", "0.32.0", "0.31.0"], true));
        let error = with_vllm("--vllm 0.30").unwrap_err().to_string();
        assert!(
            error.contains("0.31.0, 0.32.0, 0.33.0") && with_vllm("--vllm").is_err(),
            "{error}"
        );
    }

    #[test]
    fn test_takes_step_names() {
        assert_eq!(options("lints --no-budgets page").unwrap().steps, ["lints", "page"]);
        assert!(!options("tests --no-budgets").unwrap().enforces_budgets);
        assert_eq!(options("--sglang real-sglang").unwrap().steps, ["real-sglang"]);
        assert!(options("pages").unwrap_err().to_string().contains("`pages`"));
    }

    #[test]
    fn usage_names_all_steps() {
        for step in test_steps::plan(true, true) {
            assert!(
                USAGE.split_whitespace().any(|word| word.trim_end_matches(';') == step.name),
                "{}",
                step.name
            );
        }
    }

    #[test]
    fn drift_takes_full_release_number() {
        let drift = |version: &str, write| Command::VllmDrift { version: version.into(), write };
        assert_eq!(parse_words("vllm-drift 0.34.1").unwrap(), drift("0.34.1", false));
        assert_eq!(parse_words("vllm-drift 0.33.0 --write").unwrap(), drift("0.33.0", true));
        assert_eq!(parse_words("vllm-drift --help").unwrap(), Command::Help);
        for line in [
            "vllm-drift",
            "vllm-drift 0.33",
            "vllm-drift 0.34.0rc1",
            "vllm-drift --write",
            "vllm-drift v0.33.0",
        ] {
            assert!(parse_words(line).unwrap_err().to_string().contains("0.33.0"), "{line}");
        }
    }

    #[test]
    fn bench_with_too_few_rounds_is_refused() {
        let command = |bench, rounds, json| Command::BenchPeers {
            bench,
            rounds,
            json,
            sides: DoorSides::default(),
        };
        let pixels = |rounds, json| command(Bench::Pixels, rounds, json);
        assert_eq!(parse_words("bench-peers pixels").unwrap(), pixels(15, false));
        assert_eq!(
            parse_words("bench-peers handoff --json").unwrap(),
            command(Bench::Handoff, 21, true)
        );
        assert_eq!(parse_words("bench-peers index").unwrap(), command(Bench::Index, 15, false));
        assert_eq!(parse_words("bench-peers door").unwrap(), command(Bench::Door, 7, false));
        assert_eq!(parse_words("bench-peers stream").unwrap(), command(Bench::Stream, 5, false));
        assert_eq!(
            parse_words("bench-peers processor").unwrap(),
            command(Bench::Processor, 9, false)
        );
        assert_eq!(
            parse_words("bench-peers processor --short").unwrap(),
            command(Bench::Processor, 1, false)
        );
        assert_eq!(
            parse_words("bench-peers serve --short").unwrap(),
            command(Bench::Serve, 1, false)
        );
        assert_eq!(
            parse_words("bench-peers machines").unwrap(),
            command(Bench::Machines, 7, false)
        );
        assert_eq!(
            parse_words("bench-peers machines --short").unwrap(),
            command(Bench::Machines, 1, false)
        );
        assert_eq!(parse_words("bench-peers roles").unwrap(), command(Bench::Roles, 7, false));
        assert_eq!(
            parse_words("bench-peers roles --short").unwrap(),
            command(Bench::Roles, 1, false)
        );
        assert_eq!(
            parse_words("bench-peers upstream").unwrap(),
            command(Bench::Upstream, 7, false)
        );
        assert_eq!(
            parse_words("bench-peers upstream --short").unwrap(),
            command(Bench::Upstream, 1, false)
        );
        assert!(parse_words("bench-peers serve --rounds 4").is_err());
        assert!(parse_words("bench-peers door --short").is_err());
        assert!(
            parse_words("bench-peers handoff --rounds 20").unwrap_err().to_string().contains("21")
        );
        assert_eq!(parse_words("bench-peers pixels --json --rounds 40").unwrap(), pixels(40, true));
        for line in [
            "bench-peers pixels --rounds 14",
            "bench-peers pixels --rounds",
            "bench-peers pixels --rounds x",
        ] {
            let error = parse_words(line).unwrap_err();
            assert!(error.to_string().contains("15"), "{error}");
        }
        assert!(parse_words("bench-peers").is_err());
        assert!(parse_words("bench-peers pixel").unwrap_err().to_string().contains("`pixel`"));
        assert_eq!(parse_words("bench-peers --help").unwrap(), Command::Help);
    }

    #[test]
    fn soak_takes_minutes_with_optional_seed() {
        assert_eq!(parse_words("soak").unwrap(), Command::Soak { minutes: 2, seed: None });
        assert_eq!(
            parse_words("soak --seed 7 --minutes 60").unwrap(),
            Command::Soak { minutes: 60, seed: Some(7) }
        );
        for line in ["soak --minutes", "soak --minutes 0", "soak --seed x", "test --minutes 2"] {
            assert!(parse_words(line).is_err(), "{line}");
        }
    }

    #[test]
    fn dist_with_unknown_profile_is_refused() {
        assert_eq!(
            parse_words("dist").unwrap(),
            Command::Dist { profile: Profile::Dist, target: None, test: false }
        );
        let fast = Command::Dist { profile: Profile::Release, target: None, test: true };
        assert_eq!(parse_words("dist --profile release --test").unwrap(), fast);
        let target = Target::from_name("aarch64-unknown-linux-gnu");
        let foreign = Command::Dist { profile: Profile::Dist, target, test: false };
        assert_eq!(parse_words("dist --target aarch64-unknown-linux-gnu").unwrap(), foreign);
        let unknown = parse_words("dist --target sparc").unwrap_err().to_string();
        assert!(unknown.contains("aarch64") && unknown.contains("sparc"), "{unknown}");
        for line in ["dist --profile", "dist --profile debug"] {
            assert!(parse_words(line).unwrap_err().to_string().contains("`release`"), "{line}");
        }
    }

    #[test]
    fn door_takes_its_flags() {
        let sides = DoorSides {
            baseline: Some("/other/chiasm".into()),
            with_peers: true,
            engines: 2,
            profile: Profile::Release,
        };
        let door = Command::BenchPeers { bench: Bench::Door, rounds: 7, json: false, sides };
        let line = "bench-peers door --baseline /other/chiasm --engines 2 --with-peers \
                    --profile release";
        assert_eq!(parse_words(line).unwrap(), door);
        for line in [
            "bench-peers door --baseline",
            "bench-peers door --engines 0",
            "bench-peers index --engines 1",
            "bench-peers index --profile release",
        ] {
            assert!(parse_words(line).is_err(), "{line}");
        }
    }

    #[test]
    fn unknown_command_or_flag_is_named_in_error() {
        let error = parse_words("tests").unwrap_err();
        assert!(error.to_string().contains("tests"), "{error}");
        let error = parse_words("models --no-vllm").unwrap_err();
        assert!(error.to_string().contains("--no-vllm"), "{error}");
        assert!(parse_words("test --no-vlm").is_err());
    }
}
