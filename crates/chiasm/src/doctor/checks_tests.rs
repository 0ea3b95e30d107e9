//! Tests of the checks on made-up facts.

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
        engine_facts: Some(engine_facts()),
        open_files: Some(1 << 20),
        address: "127.0.0.1:8000".parse().unwrap(),
        bind_error: None,
        clock: Clock { now: MIN_TIME + Duration::from_secs(1), jump: Duration::ZERO },
        model: Some(ModelFact {
            name: "/m".to_owned(),
            found: FoundModel::Readable { native_images: true },
        }),
    }
}

/// Returns facts of a machine that is fine except for `engine_facts`.
fn with_engines(engine_facts: EngineFacts) -> Facts {
    Facts { engine_facts: Some(engine_facts), ..facts() }
}

fn with_environment(environment: Environment) -> Facts {
    with_engines(EngineFacts { environment: Ok(environment), ..engine_facts() })
}

/// Asserts that `check` has exactly one finding, with this severity and these words.
#[track_caller]
fn expect(facts: &Facts, check: &str, severity: Severity, words: &[&str]) {
    let findings = run_all(facts);
    let matching: Vec<_> = findings.iter().filter(|finding| finding.check == check).collect();
    let [finding] = matching[..] else { panic!("{findings:?}") };
    assert_eq!(finding.severity, severity, "{finding:?}");
    let text = finding.to_text();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(
        finding.advice.is_empty(),
        severity == Fine,
        "exactly warnings and problems have advice: {text}"
    );
}

#[test]
fn complete_machine_has_no_warning() {
    let findings = run_all(&facts());
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
fn vllm_version_is_checked_against_window() {
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
fn missing_vllm_is_problem_only_with_local_engines() {
    let no_python =
        ProcessorError::NoPython { command: "vllm".into(), reason: "it is not in PATH".to_owned() };
    let environment = Err(UnknownEnvironment::NoPython(no_python));
    let without_vllm = with_engines(EngineFacts { environment, ..engine_facts() });
    expect(&without_vllm, "vllm", Problem, &["/venv/bin/vllm", "not in PATH", "--vllm"]);
    assert!(run_all(&without_vllm).iter().all(|finding| finding.check != "plugin"));
    let frontend = Facts { engine_facts: None, ..without_vllm };
    expect(&frontend, "vllm", Fine, &["not needed"]);
    assert!(run_all(&frontend).iter().all(|finding| finding.severity == Fine));
}

#[test]
fn inactive_plugin_is_warning() {
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
fn missing_module_or_sandbox_is_warning() {
    let environment =
        Environment { missing: vec!["torch".to_owned()], sandbox: false, ..environment() };
    let facts = with_environment(environment);
    expect(&facts, "processor", Warning, &["torch", "/venv/bin/python"]);
    expect(&facts, "sandbox", Warning, &["Landlock", "--processor native"]);
}

#[test]
fn few_gpus_are_warning_but_broken_driver_is_problem() {
    let with = |gpus| with_engines(EngineFacts { gpus, ..engine_facts() });
    expect(
        &with(Ok(vec!["A GPU".to_owned()])),
        "gpus",
        Warning,
        &["1 for 2 engines", "--share-gpu"],
    );
    expect(&with(Ok(Vec::new())), "gpus", Warning, &["none"]);
    expect(&with(Err(CommandError::NotFound)), "gpus", Warning, &["none"]);
    expect(
        &with(Err(CommandError::Failed("no answer within 20 s".to_owned()))),
        "gpus",
        Problem,
        &["no answer"],
    );
}

#[test]
fn shared_memory_must_fit_arenas_of_each_engine() {
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
fn open_files_are_compared_with_connections() {
    let with = |limit| Facts { open_files: limit, ..facts() };
    expect(&with(Some(64)), "open-files", Problem, &["64", "hard limit"]);
    expect(&with(Some(1024)), "open-files", Warning, &["1024", "ulimit -Hn"]);
    expect(&with(Some(8320)), "open-files", Fine, &["8320"]);
    expect(&with(None), "open-files", Fine, &["no limit"]);
}

#[test]
fn bad_port_or_clock_or_model_is_problem() {
    expect(
        &Facts { bind_error: Some("in use".to_owned()), ..facts() },
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
        (FoundModel::Invalid, Problem, "no id"),
        (FoundModel::Hangs, Problem, "does not answer"),
        (FoundModel::HubId, Fine, "hub"),
    ] {
        let model = Some(ModelFact { name: "/m".to_owned(), found });
        expect(&Facts { model, ..facts() }, "model", severity, &["/m", word]);
    }
}
