//! What was asked for: a handful of commands and flags, few enough to read by hand.

use crate::bench_peers::{Bench, DoorSides, SHORT};
use crate::cross::Target;
use crate::dist::Profile;
use crate::error::Error;
use crate::sglang_env;
use crate::test_run::TestOptions;
use crate::test_steps;
use crate::vllm_env::VLLM_VERSION;
use crate::vllm_overlay::{NEWEST, VERSIONS};

/// Printed by `cargo xtask help`.
pub(crate) const USAGE: &str = "\
usage: cargo xtask COMMAND

  test [--no-vllm | --vllm VERSION | --vllm all] [--sglang [VERSION]] [--no-budgets] [STEP…]
                    everything that has to pass: format, lints, docs, licences, tests, real engines of the newest vLLM;
                    or the steps that are named: format structure build tests lints docs licences arm etcd dynamo page
                    prometheus manifests weather vllm real-engines processor real-processor clients real-engine nixl
                    plugin dynamo-tensors wheel drift real-sglang
                    --vllm takes engines of another version, or of each, the newest first, and keeps what passed in
                    docs/versions.md; --no-vllm leaves them out, loudly; --sglang adds real SGLang servers,
                    of the newest version unless another one is named; --no-budgets lets steps take any time
  structure [CRATE] print lines per crate, circles of files and arrows against the order of modules; fails past a limit
                    of xtask/src/structure/limits.rs. With a crate: what its files take from each other in circles
  check             format, lints, and unit tests of the crates that differ from main
  soak [--minutes N] [--seed S]
                    mixed load in any weather, on simulated engines: kills, freezes, clients of all bad kinds; 2 minutes and a
                    random seed unless they are given
  vllm-env [--vllm VERSION]
                    make or reuse the Python environment with vLLM for CPU, print its path
  vllm-drift VERSION [--write]
                    say what a version of vLLM, as 0.34.0, changes of what Chiasm relies on, and exchange messages with its types;
                    fails if anything changed. --write makes it the known state of its minor version, after you have looked
  sglang-env [VERSION]
                    make or reuse what real SGLang for CPU needs beside that environment, print its path
  clients-env       make or reuse the Python environment with clients that other people use, print its path
  record-clients    record again what they send, for the tests: crates/chiasm/tests/recorded
  models            make or reuse the tiny random models, print their directory
  goldens [--vllm VERSION]
                    make the golden files again with the newest vLLM, say what changed
                    --vllm makes them on a copy with another version, and says what that makes otherwise
  dist [--profile dist|release] [--target TRIPLE] [--test]
                    build what people install: wheel, binary, bill of materials, licences, sums, below target/dist; release is the
                    fast way; --test installs the wheel beside the newest vLLM and serves from there
                    --target builds for x86_64-unknown-linux-gnu or aarch64-unknown-linux-gnu with glibc 2.28, with Zig of PyPI;
                    --test then plays the demo, in an emulator if need be
  agent-proto       write the Rust code of the protocol of agents again, crates/chiasm-agent/src/generated
  models-page       ask the newest vLLM which models it registers that take more than text, write docs/models.md and models.json
  versions-page     write docs/versions.md again, of the results that `test --vllm` has kept
  bench-peers pixels [--rounds N] [--json]
                    measure image preprocessing against llm-multimodal and transformers, write docs/benchmarks/pixels.*
                    --rounds takes 15 or more, --json prints the rows as well
  bench-peers handoff [--rounds N] [--json]
                    measure how pixels get from the frontend into the engine, write docs/benchmarks/handoff.*
                    --rounds takes 21 or more
  bench-peers index [--rounds N] [--json]
                    measure the prefix index against those of dynamo-kv-router, write docs/benchmarks/index.*
                    --rounds takes 15 or more
  bench-peers door [--rounds N] [--json] [--engines N] [--baseline PATH [--with-peers]]
                    measure what a request costs in the frontend against vllm-rs and Dynamo, write docs/benchmarks/door.*
                    --rounds takes 7 or more, --engines the simulated engines before which our frontend stands
                    --baseline measures against another commit's chiasm instead, and writes nothing; --with-peers does both
  bench-peers stream [--rounds N] [--json] [--baseline PATH [--with-peers]]
                    measure what a streamed token costs in the frontend against vllm-rs and Dynamo, write docs/benchmarks/stream.*
                    --rounds takes 5 or more; --baseline and --with-peers as for the door
  bench-peers processor [--rounds N | --short] [--json]
                    measure what vLLM's processor makes, against vllm launch render and one process as Dynamo runs it, write
                    docs/benchmarks/processor.*
                    --rounds takes 9 or more; --short goes once through all of it, prints the note and writes nothing
  bench-peers serve [--rounds N | --short] [--json]
                    measure the whole with real engines against vllm serve, vllm-rs and engines without a frontend, write
                    docs/benchmarks/serve.*
                    --rounds takes 5 or more; --short as for the processor
  bench-peers machines [--rounds N | --short] [--json]
                    measure what an agent between frontend and engine costs, against local engines and Dynamo, on loopback and, as
                    root, on a link of 10 Gbit/s; write docs/benchmarks/machines.*
                    --rounds takes 7 or more; --short as for the processor
  bench-peers roles [--rounds N | --short] [--json]
                    measure what a request costs in the frontend that one engine prefills and another one answers, against Dynamo;
                    write docs/benchmarks/roles.*
                    --rounds takes 7 or more; --short as for the processor
  bench-peers upstream [--rounds N | --short] [--json]
                    measure what a router costs before servers that run already, and what it has them find in their caches, against
                    SMG, Dynamo, Envoy and nginx; write docs/benchmarks/upstream.*
                    --rounds takes 7 or more; --short as for the processor
  help              this text

The environment (about 7 GB) and the models live in $XDG_CACHE_HOME/chiasm, else ~/.cache/chiasm.";

/// One parsed command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Help,
    VllmEnv {
        version: &'static str,
    },
    /// Compares a version of vLLM with what is known, or makes it what is known.
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
        /// The crate to describe; all crates are measured without one.
        name: Option<String>,
    },
    /// Formats, lints and unit tests of changed crates.
    Check,
    /// Builds what people install.
    Dist {
        profile: Profile,
        /// The system that is built for; `None` for this one.
        target: Option<Target>,
        /// Whether what was made is tried.
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

/// Reads the arguments after the program's name.
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
                    rounds: bench.fewest_rounds(),
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
                Command::VllmEnv { version: asked } | Command::Goldens { version: asked },
            ) => *asked = version(flags.next().map(String::as_str))?,
            ("--write", Command::VllmDrift { write, .. }) => *write = true,
            ("--json", Command::BenchPeers { json, .. }) => *json = true,
            ("--rounds", Command::BenchPeers { bench, rounds, .. }) => {
                let (found, fewest) =
                    (flags.next().map(String::as_str).unwrap_or_default(), bench.fewest_rounds());
                let number = found.parse().ok().filter(|&number| number >= fewest);
                *rounds =
                    number.ok_or_else(|| Error::Rounds { found: found.to_owned(), fewest })?;
            }
            ("--short", Command::BenchPeers { bench, rounds, .. }) if bench.has_short() => {
                *rounds = SHORT
            }
            ("--test", Command::Dist { test, .. }) => *test = true,
            ("--profile", Command::Dist { profile, .. }) => {
                let found = flags.next().map(String::as_str).unwrap_or_default();
                *profile = Profile::from_name(found)
                    .ok_or_else(|| Error::Profile { found: found.to_owned() })?;
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
        test_steps::named(steps)?;
    }
    Ok(command)
}

/// The version of this name, which may be short: `0.33`.
fn version(name: Option<&str>) -> Result<&'static str, Error> {
    let name = name.unwrap_or_default();
    let is_named = |version: &&str| *version == name || version.strip_suffix(".0") == Some(name);
    VERSIONS
        .into_iter()
        .find(is_named)
        .ok_or_else(|| Error::UnknownVersion { name: name.to_owned(), known: VERSIONS.join(", ") })
}

fn sglang_version(name: &str) -> Result<&'static str, Error> {
    let known = sglang_env::VERSIONS.into_iter().find(|version| *version == name);
    known.ok_or_else(|| Error::UnknownSglang {
        name: name.to_owned(),
        known: sglang_env::VERSIONS.join(", "),
    })
}

/// A full release number, of any version of vLLM.
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
    fn commands_are_read_by_name() {
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

    /// The options of `test` with these flags.
    fn options(flags: &str) -> Result<TestOptions, Error> {
        match parse_words(&format!("test {flags}"))? {
            Command::Test(options) => Ok(options),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn test_leaves_the_engines_out_only_when_told() {
        let all = options("").unwrap();
        assert_eq!(
            (all.versions, all.record, all.sglang, all.enforces_budgets),
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
    fn test_takes_the_steps_to_run() {
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
    fn drift_takes_a_full_release_number_of_any_version() {
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
    fn a_bench_takes_its_rounds_but_not_too_few() {
        let asked = |bench, rounds, json| Command::BenchPeers {
            bench,
            rounds,
            json,
            sides: DoorSides::default(),
        };
        let pixels = |rounds, json| asked(Bench::Pixels, rounds, json);
        assert_eq!(parse_words("bench-peers pixels").unwrap(), pixels(15, false));
        assert_eq!(
            parse_words("bench-peers handoff --json").unwrap(),
            asked(Bench::Handoff, 21, true)
        );
        assert_eq!(parse_words("bench-peers index").unwrap(), asked(Bench::Index, 15, false));
        assert_eq!(parse_words("bench-peers door").unwrap(), asked(Bench::Door, 7, false));
        assert_eq!(parse_words("bench-peers stream").unwrap(), asked(Bench::Stream, 5, false));
        assert_eq!(
            parse_words("bench-peers processor").unwrap(),
            asked(Bench::Processor, 9, false)
        );
        assert_eq!(
            parse_words("bench-peers processor --short").unwrap(),
            asked(Bench::Processor, 1, false)
        );
        assert_eq!(
            parse_words("bench-peers serve --short").unwrap(),
            asked(Bench::Serve, 1, false)
        );
        assert_eq!(parse_words("bench-peers machines").unwrap(), asked(Bench::Machines, 7, false));
        assert_eq!(
            parse_words("bench-peers machines --short").unwrap(),
            asked(Bench::Machines, 1, false)
        );
        assert_eq!(parse_words("bench-peers roles").unwrap(), asked(Bench::Roles, 7, false));
        assert_eq!(
            parse_words("bench-peers roles --short").unwrap(),
            asked(Bench::Roles, 1, false)
        );
        assert_eq!(parse_words("bench-peers upstream").unwrap(), asked(Bench::Upstream, 7, false));
        assert_eq!(
            parse_words("bench-peers upstream --short").unwrap(),
            asked(Bench::Upstream, 1, false)
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
    fn a_soak_takes_its_time_and_its_seed() {
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
    fn dist_takes_a_profile_that_it_knows() {
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
    fn the_door_takes_its_sides() {
        let sides =
            DoorSides { baseline: Some("/other/chiasm".into()), with_peers: true, engines: 2 };
        let door = Command::BenchPeers { bench: Bench::Door, rounds: 7, json: false, sides };
        let line = "bench-peers door --baseline /other/chiasm --engines 2 --with-peers";
        assert_eq!(parse_words(line).unwrap(), door);
        for line in [
            "bench-peers door --baseline",
            "bench-peers door --engines 0",
            "bench-peers index --engines 1",
        ] {
            assert!(parse_words(line).is_err(), "{line}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        let error = parse_words("tests").unwrap_err();
        assert!(error.to_string().contains("tests"), "{error}");
        let error = parse_words("models --no-vllm").unwrap_err();
        assert!(error.to_string().contains("--no-vllm"), "{error}");
        assert!(parse_words("test --no-vlm").is_err());
    }
}
