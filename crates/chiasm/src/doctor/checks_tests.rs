//! Fake facts, and what is found in them.

use std::io;
use std::num::NonZeroU32;

use chiasm_processor::ProcessorError;

use super::*;
use crate::doctor::environment::UnknownEnvironment;
use crate::doctor::finding::Severity::{self, Ok as Fine, Problem, Warning};

const GIB: u64 = 1 << 30;

fn environment() -> Environment {
    Environment {
        path: "/venv/bin/python".into(),
        python: "3.11.7".to_owned(),
        vllm: Some("0.33.0".to_owned()),
        plugin: Some(env!("CARGO_PKG_VERSION").to_owned()),
        missing: Vec::new(),
        sandbox: true,
    }
}

fn engine_facts() -> EngineFacts {
    EngineFacts {
        engines: NonZeroU32::new(2).unwrap(),
        arena_bytes: 5 * GIB,
        free_shm: Ok(64 * GIB),
        vllm: "/venv/bin/vllm".into(),
        environment: Ok(environment()),
        vllm_plugins: None,
        gpus: Ok(vec!["A GPU, 80 GiB".to_owned(), "A GPU, 80 GiB".to_owned()]),
    }
}

fn facts() -> Facts {
    Facts {
        of_engines: Some(engine_facts()),
        open_files: Some(1 << 20),
        address: "127.0.0.1:8000".parse().unwrap(),
        refused: None,
        clock: Clock { now: EARLIEST + Duration::from_secs(1), jump: Duration::ZERO },
        model: Some(ModelFact {
            name: "/m".to_owned(),
            found: FoundModel::Readable { native_images: true },
        }),
    }
}

/// Facts of a machine that is fine but for this.
fn with_engines(of_engines: EngineFacts) -> Facts {
    Facts { of_engines: Some(of_engines), ..facts() }
}

fn with_environment(environment: Environment) -> Facts {
    with_engines(EngineFacts { environment: Ok(environment), ..engine_facts() })
}

/// The one finding of this check, which has to be as bad as this and say these words.
#[track_caller]
fn expect(facts: &Facts, check: &str, severity: Severity, words: &[&str]) {
    let findings = all(facts);
    let of_check: Vec<_> = findings.iter().filter(|finding| finding.check == check).collect();
    let [finding] = of_check[..] else { panic!("{findings:?}") };
    assert_eq!(finding.severity, severity, "{finding:?}");
    let text = finding.as_text();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(finding.advice.is_empty(), severity == Fine, "what is not right has advice: {text}");
}

#[test]
fn a_machine_that_has_everything_is_fine() {
    let findings = all(&facts());
    assert!(findings.iter().all(|finding| finding.severity == Fine), "{findings:?}");
    let checks: Vec<_> = findings.iter().map(|finding| finding.check).collect();
    let expected = [
        "vllm",
        "plugin",
        "processor",
        "sandbox",
        "gpus",
        "shared-memory",
        "open-files",
        "port",
        "clock",
        "model",
    ];
    assert_eq!(checks, expected);
}

#[test]
fn a_version_of_vllm_is_held_against_the_window() {
    for (version, severity, word) in [
        (Some("0.30.1"), Problem, "too old"),
        (Some("0.99.0"), Warning, "not tested"),
        (Some("dev"), Warning, "no release"),
        (Some("0.33.0+cpu"), Fine, "0.33.0"),
        (None, Problem, "no vLLM"),
    ] {
        let environment = Environment { vllm: version.map(str::to_owned), ..environment() };
        expect(&with_environment(environment), "vllm", severity, &[word]);
    }
}

#[test]
fn a_command_that_is_not_there_is_a_problem_unless_no_engine_is_to_run_here() {
    let no_python =
        ProcessorError::NoPython { command: "vllm".into(), reason: "it is not in PATH".to_owned() };
    let environment = Err(UnknownEnvironment::NoPython(no_python));
    let lost = with_engines(EngineFacts { environment, ..engine_facts() });
    expect(&lost, "vllm", Problem, &["/venv/bin/vllm", "not in PATH", "--vllm"]);
    assert!(all(&lost).iter().all(|finding| finding.check != "plugin"));
    let frontend = Facts { of_engines: None, ..lost };
    expect(&frontend, "vllm", Fine, &["not needed"]);
    assert!(all(&frontend).iter().all(|finding| finding.severity == Fine));
}

#[test]
fn a_plugin_that_will_not_be_active_is_told() {
    let missing = Environment { plugin: None, ..environment() };
    expect(&with_environment(missing), "plugin", Warning, &["not installed", "pip install"]);
    let other = Environment { plugin: Some("0.0.9".to_owned()), ..environment() };
    expect(&with_environment(other), "plugin", Warning, &["0.0.9", env!("CARGO_PKG_VERSION")]);
    expect(
        &with_engines(EngineFacts { vllm_plugins: Some("other".to_owned()), ..engine_facts() }),
        "plugin",
        Warning,
        &["VLLM_PLUGINS"],
    );
    expect(
        &with_engines(EngineFacts {
            vllm_plugins: Some("other,chiasm".to_owned()),
            ..engine_facts()
        }),
        "plugin",
        Fine,
        &["chiasm_vllm"],
    );
}

#[test]
fn the_processor_needs_its_modules_and_wants_its_locks() {
    let environment =
        Environment { missing: vec!["torch".to_owned()], sandbox: false, ..environment() };
    let facts = with_environment(environment);
    expect(&facts, "processor", Warning, &["torch", "/venv/bin/python"]);
    expect(&facts, "sandbox", Warning, &["Landlock", "--processor native"]);
}

#[test]
fn gpus_are_counted_and_a_broken_driver_is_a_problem() {
    let with = |gpus| with_engines(EngineFacts { gpus, ..engine_facts() });
    expect(
        &with(Ok(vec!["A GPU".to_owned()])),
        "gpus",
        Warning,
        &["1 for 2 engines", "--share-gpu"],
    );
    expect(&with(Ok(Vec::new())), "gpus", Warning, &["none"]);
    expect(&with(Err(NoAnswer::Missing)), "gpus", Warning, &["none"]);
    expect(
        &with(Err(NoAnswer::Failed("no answer within 20 seconds".to_owned()))),
        "gpus",
        Problem,
        &["no answer"],
    );
}

#[test]
fn shared_memory_is_what_all_engines_may_take() {
    let with = |free_shm| with_engines(EngineFacts { free_shm, ..engine_facts() });
    expect(&with(Ok(10 * GIB)), "shared-memory", Fine, &["10.0"]);
    expect(&with(Ok(10 * GIB - 1)), "shared-memory", Warning, &["--shm-size", "--mm-arena-gb"]);
    expect(
        &with(Err(UnknownShm::Io(io::Error::other("no such folder")))),
        "shared-memory",
        Warning,
        &["no such folder"],
    );
}

#[test]
fn open_files_are_as_many_as_connections() {
    let with = |limit| Facts { open_files: limit, ..facts() };
    expect(&with(Some(64)), "open-files", Problem, &["64", "hard limit"]);
    expect(&with(Some(1024)), "open-files", Warning, &["1024", "ulimit -Hn"]);
    expect(&with(Some(8192)), "open-files", Fine, &["8192"]);
    expect(&with(None), "open-files", Fine, &["no limit"]);
}

#[test]
fn a_taken_port_a_wrong_clock_and_a_model_that_can_not_be_read_are_problems() {
    expect(
        &Facts { refused: Some("in use".to_owned()), ..facts() },
        "port",
        Problem,
        &["127.0.0.1:8000", "in use"],
    );
    let unset = Clock { now: Duration::from_secs(60), jump: Duration::ZERO };
    expect(&Facts { clock: unset, ..facts() }, "clock", Problem, &["2026"]);
    let jumping = Clock { jump: Duration::from_secs(90), ..facts().clock };
    expect(&Facts { clock: jumping, ..facts() }, "clock", Warning, &["90.0"]);
    for (found, severity, word) in [
        (FoundModel::Unreadable("no config.json".to_owned()), Problem, "no config.json"),
        (FoundModel::Nothing, Problem, "no id"),
        (FoundModel::Hangs, Problem, "does not answer"),
        (FoundModel::OfTheHub, Fine, "hub"),
    ] {
        let model = Some(ModelFact { name: "/m".to_owned(), found });
        expect(&Facts { model, ..facts() }, "model", severity, &["/m", word]);
    }
}
