//! Common configuration mistakes, and the error message for each.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Server, chiasm, demo_model};

/// Runs `chiasm`, which must exit with an error within 20 s. Returns its stderr.
fn run_failing(arguments: &[&str]) -> String {
    run_failing_with(arguments, &[])
}

/// Runs `chiasm` like [`run_failing`], with these environment variables.
fn run_failing_with(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = chiasm(arguments);
    command.envs(variables.iter().copied());
    // No network access, and no influence of the user's own files.
    command.env("HF_HUB_OFFLINE", "1").env("HF_HOME", "/nowhere").env("PATH", "/usr/bin:/bin");
    let mut child =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("chiasm starts");
    let started = Instant::now();
    while child.try_wait().expect("wait").is_none() {
        if started.elapsed() > Duration::from_secs(20) {
            let _ = child.kill();
            panic!("chiasm {arguments:?} does not exit");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("its output");
    assert!(!output.status.success(), "chiasm {arguments:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

#[test]
fn invalid_value_names_its_source() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("chiasm.yaml");
    fs::write(&file, "model: m\nport: eighty\n").expect("a file");
    let file = file.display().to_string();
    let error = run_failing(&["serve", "--config", &file]);
    assert!(error.contains("'eighty'") && error.contains(&file), "{error}");
    // The command line replaces the file's value, and the variable replaces it, too.
    let error = run_failing(&["serve", "--config", &file, "--port", "ninety"]);
    assert!(error.contains("'ninety'") && !error.contains(&file), "{error}");
    let variables = [("CHIASM_PORT", "abc")];
    let error = run_failing_with(&["serve", "--config", &file], &variables);
    assert!(error.contains("'abc'") && error.contains("variable CHIASM_PORT"), "{error}");
    let error = run_failing_with(&["serve", "m", "--port", "x"], &variables);
    assert!(error.contains("'x'") && !error.contains("variable"), "{error}");
    let variables = [("CHIASM_ENGINES", "2")];
    let error = run_failing_with(&["serve", "m", "--sim", "1"], &variables);
    assert!(error.contains("'--sim <N>'") && error.contains("variable CHIASM_ENGINES"), "{error}");
}

#[test]
fn configuration_errors_suggest_a_fix() {
    let model = demo_model().display().to_string();
    let empty = tempfile::tempdir().expect("a folder");
    let empty = empty.path().display().to_string();
    let gguf = tempfile::tempdir().expect("a folder");
    fs::write(gguf.path().join("model-q4_k_m.gguf"), "GGUF").expect("a file");
    let gguf = gguf.path().display().to_string();
    // A file that an interrupted download leaves.
    let torn = tempfile::tempdir().expect("a folder");
    for file in fs::read_dir(demo_model()).expect("the demo's model").flatten() {
        fs::copy(file.path(), torn.path().join(file.file_name())).expect("a copy");
    }
    fs::write(torn.path().join("config.json"), "{\"model_type\": ").expect("a torn file");
    let file = torn.path().join("config.json").display().to_string();
    let torn = torn.path().display().to_string();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let serve = |flags: &[&str]| run_failing(&[&["serve", &model, "--sim", "1"], flags].concat());
    for (mistake, stderr, hints) in [
        ("no model", run_failing(&["serve"]), &["<MODEL>"][..]),
        ("another word for serve", run_failing(&["server", &model]), &["'serve'"]),
        (
            "a path that is not there",
            run_failing(&["serve", "/no/folder"]),
            &["neither a directory", "id of a model on the hub"],
        ),
        (
            "a hub that can't be reached",
            run_failing(&["serve", "a/b"]),
            &["HF_HUB_OFFLINE", "give a model directory"],
        ),
        (
            "a torn file",
            run_failing(&["serve", &torn, "--sim", "1"]),
            &["config.json is not a JSON object"],
        ),
        (
            "a folder without a model",
            run_failing(&["serve", &empty, "--sim", "1"]),
            &["has no config.json", "give the folder"],
        ),
        (
            "a folder of GGUF files",
            run_failing(&["serve", &gguf, "--sim", "1"]),
            &["GGUF", "config.json", "hub id"],
        ),
        (
            "a negative number of engines",
            run_failing(&["serve", &model, "--engines", "-1"]),
            &["invalid value '-1' for '--engines"],
        ),
        (
            "a fraction as per cent",
            serve(&["--busy-kv-usage", "90"]),
            &["--busy-kv-usage", "90 per cent is 0.9"],
        ),
        (
            "a home that can't be written to",
            serve(&["--agents", "127.0.0.1:1", "--state-dir", "/proc/none"]),
            &["/proc/none", "another folder with --state-dir"],
        ),
        (
            "a kind of discovery alone",
            serve(&["--discovery", "etcd"]),
            &["--discovery", "etcd://HOST:PORT/PREFIX"],
        ),
        (
            "no vLLM",
            run_failing(&["serve", &model, "--port", "0"]),
            &["no program vllm", "--vllm PATH", "--sim N"],
        ),
        (
            "another vLLM",
            run_failing(&["serve", &model, "--vllm", "/no/vllm"]),
            &["no program /no/vllm"],
        ),
        (
            "no engines",
            run_failing(&["serve", &model, "--engines", "0"]),
            &["--engines", "--sim", "--attach"],
        ),
        ("two kinds of engines", serve(&["--engines", "2"]), &["--sim", "--engines"]),
        (
            "a flag of vLLM's in front of --",
            serve(&["--max-model-len", "5"]),
            &["flag of vLLM's engines", "-- --max-model-len"],
        ),
        (
            "a flag of its server",
            serve(&["--max-num-queued-reqs", "5"]),
            &["give Chiasm --max-requests"],
        ),
        (
            "a limit after -- that engines don't have",
            run_failing(&[
                "serve",
                &model,
                "--vllm",
                "/bin/true",
                "--",
                "--max-num-queued-tokens=9",
            ]),
            &["--max-num-queued-tokens", "--busy-pending-tokens"],
        ),
        ("a taken port", serve(&["--port", &port]), &["another server", "--port 0"]),
        (
            "another machine's address",
            serve(&["--host", "203.0.113.7"]),
            &["203.0.113.7", "an address of this machine"],
        ),
        (
            "a file for a folder",
            run_failing(&["serve", &file, "--sim", "1"]),
            &["is a file", "directory"],
        ),
        (
            "an engine's address without tcp://",
            run_failing(&["serve", &model, "--attach", "127.0.0.1:1"]),
            &["tcp://"],
        ),
        (
            "a key after --",
            run_failing(&["serve", &model, "--vllm", "/bin/true", "--", "--api-key=x"]),
            &["--api-key", "before --"],
        ),
        (
            "no folder of images",
            serve(&["--allowed-local-media-path", "/no"]),
            &["--allowed-local-media-path", "/no"],
        ),
        ("a host's name", serve(&["--host", "localhost"]), &["--host", "IP address"]),
        (
            "no room for any request",
            serve(&["--max-requests", "0"]),
            &["--max-requests", "1 or more"],
        ),
        (
            "little shared memory",
            serve(&["--mm-transfer", "shm", "--mm-arena-gb", "90000"]),
            &["--shm-size", "--mm-arena-gb"],
        ),
        ("an empty key", serve(&["--api-key", ""]), &["--api-key"]),
        (
            "no such certificate",
            serve(&["--ssl-certfile", "/no", "--ssl-keyfile", "/no"]),
            &["--ssl-certfile", "/no"],
        ),
        ("a certificate without its key", serve(&["--ssl-certfile", "/no"]), &["--ssl-keyfile"]),
        (
            "no such chat template",
            serve(&["--chat-template", "/no.jinja"]),
            &["/no.jinja", "give the path of a file"],
        ),
        (
            "settings that are not JSON",
            serve(&["--mm-processor-kwargs", "{"]),
            &["--mm-processor-kwargs", "JSON object"],
        ),
        ("an unknown parser", serve(&["--tool-call-parser", "x"]), &["'x'", "hermes"]),
        (
            "gRPC for traces",
            serve(&["--otlp-traces-endpoint", "grpc://h:4317"]),
            &["gRPC is not supported", "4318"],
        ),
    ] {
        for hint in hints {
            assert!(stderr.contains(hint), "{mistake}: {hint} is not in\n{stderr}");
        }
        assert!(stderr.lines().count() <= 8, "{mistake}: more than 8 lines\n{stderr}");
    }
}

#[tokio::test]
async fn public_address_without_key_logs_a_warning() {
    let model = demo_model().display().to_string();
    let open = Server::start(&[&model, "--sim", "1", "--host", "0.0.0.0"]);
    assert!(open.wait_for_log_line("anyone who can reach this address").contains("--api-key"));
}

#[test]
fn low_descriptor_limit_lowers_the_connection_limit() {
    let model = demo_model().display().to_string();
    let serve = chiasm(&["serve", &model, "--sim", "1", "--port", "0"]);
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "ulimit -n 256; exec \"$0\" \"$@\""])
        .arg(serve.get_program())
        .args(serve.get_args());
    let mut child = limited.stderr(Stdio::piped()).spawn().expect("sh starts");
    let lines =
        BufReader::new(child.stderr.take().expect("stderr is piped")).lines().map_while(Result::ok);
    let warning = lines
        .take_while(|line| !line.contains("serving"))
        .find(|line| line.contains("--max-connections"));
    child.kill().expect("a running process");
    child.wait().expect("an exit");
    assert!(warning.expect("a warning before serving").contains("connections=128"));
}

#[tokio::test]
async fn engine_startup_error_is_logged_with_a_hint() {
    let folder = tempfile::tempdir().expect("a folder");
    let vllm = folder.path().join("vllm");
    // The error comes first, followed by a screenful of consequential errors.
    let error = "ValueError: No available memory for the cache blocks. Try increasing";
    let noise = "for line in $(seq 60); do echo \"  File waits, line $line\"; done";
    fs::write(&vllm, format!("#!/bin/sh\necho '{error}'\n{noise}\nexit 1\n")).expect("a script");
    fs::set_permissions(&vllm, fs::Permissions::from_mode(0o755)).expect("a program");
    let model = demo_model().display().to_string();
    let vllm = vllm.display().to_string();
    let server = Server::start(&[&model, "--vllm", &vllm, "--mm-transfer", "inline"]);
    assert!(server.wait_for_log_line("what helps: ").contains("--gpu-memory-utilization"));
}

#[tokio::test]
async fn engine_of_unsupported_version_is_refused() {
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--sim", "1", "--sim-vllm-version", "0.20.0"]);
    assert!(
        server.wait_for_log_line("0.20.0").contains("0.3"),
        "the log names the supported versions"
    );
}
