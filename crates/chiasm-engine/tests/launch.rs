//! The launcher, with a shell script in place of vLLM.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use chiasm_engine::EngineError;
use chiasm_engine::launch::{EngineProcess, Keep, LaunchSpec};
use chiasm_engine::state::{Launched, ProcessId};

/// The timeout of conditions, longer than any step takes on a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

fn spec(behaviour: &str) -> LaunchSpec {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in_vllm.sh");
    LaunchSpec::new("engine_0", script, behaviour, "tcp://127.0.0.1:5000")
}

/// Lists the members of a process group that have not ended, by their command lines.
fn alive(group: u32) -> Vec<String> {
    let listed = Command::new("ps").args(["-eo", "pgid=,stat=,args="]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let is_member = |line: &&str| {
        let mut columns = line.split_whitespace();
        columns.next() == Some(&group.to_string())
            && !columns.next().unwrap_or("Z").starts_with('Z')
    };
    listed.lines().filter(is_member).map(str::to_owned).collect()
}

fn wait_until(description: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < STEP_TIMEOUT, "never: {description}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

async fn wait_until_running(process: &EngineProcess, members: usize) {
    let group = process.pid();
    tokio::task::spawn_blocking(move || wait_until("it runs", || alive(group).len() >= members))
        .await
        .unwrap();
}

#[tokio::test]
async fn failed_engine_is_reported_with_last_lines() {
    let process = spec("fails").launch().unwrap();
    let report = tokio::time::timeout(STEP_TIMEOUT, process.exited()).await.unwrap();
    assert_eq!(report.status.unwrap().code(), Some(3));
    assert!(
        report.last_lines.contains(&"ERROR no such model".to_owned()),
        "{:?}",
        report.last_lines
    );
    assert_eq!(report.to_string(), "exit status: 3");
    assert!(process.try_exited().is_some());
}

#[tokio::test]
async fn engine_gets_environment_gpus_flags() {
    let spec = LaunchSpec {
        gpus: Some(vec!["2".to_owned(), "3".to_owned()]),
        env: vec![("STAND_IN_EXTRA".into(), "yes".into())],
        extra_args: vec!["--enforce-eager".into()],
        ..spec("prints_settings")
    };
    let report = tokio::time::timeout(STEP_TIMEOUT, spec.launch().unwrap().exited()).await.unwrap();
    assert_eq!(report.last_lines, ["gpus=2,3 extra=yes last=--enforce-eager"]);
}

#[tokio::test]
async fn missing_program_is_named() {
    let spec = LaunchSpec { vllm: "/nowhere/vllm".into(), ..spec("obeys") };
    let error = spec.launch().unwrap_err();
    assert!(
        matches!(&error, EngineError::Spawn { program, .. } if program.ends_with("vllm")),
        "{error}"
    );
}

#[tokio::test]
async fn engine_ends_within_grace() {
    let process = spec("obeys").launch().unwrap();
    wait_until_running(&process, 2).await;
    let group = process.pid();
    let report = process.terminate(STEP_TIMEOUT).await;
    assert_eq!(report.status.unwrap().code(), Some(0));
    assert!(report.last_lines.contains(&"tidied up".to_owned()));
    assert_eq!(alive(group), Vec::<String>::new());
}

#[tokio::test]
async fn engine_is_killed_after_grace() {
    let process = spec("resists").launch().unwrap();
    wait_until_running(&process, 2).await;
    let group = process.pid();
    let report = process.terminate(Duration::from_millis(100)).await;
    assert!(report.to_string().starts_with("signal: 9"), "{report}");
    assert_eq!(alive(group), Vec::<String>::new());
}

#[tokio::test]
async fn remaining_children_are_killed() {
    let process = spec("leaves_a_child").launch().unwrap();
    let report = tokio::time::timeout(STEP_TIMEOUT, process.exited()).await.unwrap();
    assert!(report.status.unwrap().success());
    // The child ignores SIGTERM and never ends by itself, so the group was killed before the exit
    // was reported.
    assert_eq!(alive(process.pid()), Vec::<String>::new());
}

#[tokio::test]
async fn dropping_process_kills_its_group() {
    let process = spec("obeys").launch().unwrap();
    wait_until_running(&process, 2).await;
    let group = process.pid();
    drop(process);
    tokio::task::spawn_blocking(move || wait_until("it is gone", || alive(group).is_empty()))
        .await
        .unwrap();
}

/// The variable that makes a test run as the frontend, in a process that the test starts from
/// itself. Its value is the output file of a kept engine.
const FRONTEND: &str = "CHIASM_TEST_PLAYS_FRONTEND";

/// Starts an engine, prints its group and watchdog, and waits to be killed.
async fn frontend_to_be_killed(keep: Option<Keep>) {
    let process = LaunchSpec { keep, ..spec("obeys") }.launch().unwrap();
    wait_until_running(&process, 2).await;
    let watchdog = process.surviving_processes().and_then(|launched| launched.watchdog);
    println!("\ngroup={} watchdog={}", process.pid(), watchdog.map_or(0, |watchdog| watchdog.pid));
    std::future::pending::<()>().await;
}

/// Runs the test of this name as a frontend in another process, and kills that once it has launched
/// its engine. Returns the process ids of the engine and of its watchdog.
fn engine_of_killed_frontend(test: &str, output: &Path) -> (u32, u32) {
    let mut frontend = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("launch::{test}"), "--nocapture"])
        .env(FRONTEND, output)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(frontend.stdout.take().unwrap()).lines();
    let ids =
        lines.map(Result::unwrap).find_map(|line| line.strip_prefix("group=").map(str::to_owned));
    let ids = ids.expect("the frontend starts its engine");
    let (group, watchdog) = ids.split_once(" watchdog=").unwrap();
    let group = group.parse().unwrap();
    let watchdog = watchdog.parse().unwrap();
    assert!(!alive(group).is_empty());
    frontend.kill().unwrap();
    frontend.wait().unwrap();
    (group, watchdog)
}

#[tokio::test]
async fn engine_ends_with_killed_frontend() {
    if std::env::var_os(FRONTEND).is_some() {
        return frontend_to_be_killed(None).await;
    }
    let (group, _) =
        engine_of_killed_frontend("engine_ends_with_killed_frontend", Path::new("unused"));
    wait_until("the engine is gone", || alive(group).is_empty());
}

#[tokio::test]
async fn kept_engine_ends_unless_taken_over() {
    if let Some(output) = std::env::var_os(FRONTEND) {
        return frontend_to_be_killed(Some(Keep {
            time: Duration::from_secs(1),
            output: output.into(),
        }))
        .await;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("output");
    let (group, _) = engine_of_killed_frontend("kept_engine_ends_unless_taken_over", &output);
    wait_until("the engine is gone", || alive(group).is_empty());
    assert!(std::fs::read_to_string(output).unwrap().contains("tidied up"), "it got SIGTERM");
}

#[tokio::test]
async fn kept_engine_is_taken_over() {
    let long = Duration::from_secs(600);
    if let Some(output) = std::env::var_os(FRONTEND) {
        return frontend_to_be_killed(Some(Keep { time: long, output: output.into() })).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("output");
    let (group, watchdog) = engine_of_killed_frontend("kept_engine_is_taken_over", &output);
    let keep = Keep { time: long, output };
    let launched = Launched {
        process: ProcessId::from_pid(group).unwrap(),
        watchdog: ProcessId::from_pid(watchdog),
    };
    assert!(launched.watchdog.is_some(), "it counts down");
    let other = Launched {
        process: ProcessId { start: launched.process.start + 1, ..launched.process },
        ..launched
    };
    assert!(
        EngineProcess::take_over("e", other, &keep).unwrap().is_none(),
        "another process with its id"
    );

    let process = EngineProcess::take_over("e", launched, &keep).unwrap().unwrap();
    wait_until("its former watchdog is gone", || alive(watchdog).is_empty());
    assert!(process.try_exited().is_none() && !alive(group).is_empty());
    let report = process.terminate(STEP_TIMEOUT).await;
    assert_eq!(report.last_lines, ["tidied up"], "only output after the takeover is read");
    assert_eq!(alive(group), Vec::<String>::new());
}

#[tokio::test]
async fn detached_engine_runs_on() {
    let dir = tempfile::tempdir().unwrap();
    let keep = Keep { time: Duration::from_secs(600), output: dir.path().join("output") };
    let process = LaunchSpec { keep: Some(keep.clone()), ..spec("obeys") }.launch().unwrap();
    wait_until_running(&process, 2).await;
    let group = process.pid();
    let launched = process.surviving_processes().unwrap();
    process.detach();
    assert!(!alive(group).is_empty());
    let process = EngineProcess::take_over("e", launched, &keep).unwrap().unwrap();
    drop(process);
    tokio::task::spawn_blocking(move || wait_until("it is gone", || alive(group).is_empty()))
        .await
        .unwrap();
}
