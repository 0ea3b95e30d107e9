//! The launcher with a shell script in the place of vLLM.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use chiasm_engine::EngineError;
use chiasm_engine::launch::{EngineProcess, Keep, LaunchSpec};
use chiasm_engine::state::{Launched, ProcessId};

/// How long a condition is waited for: long enough for a busy machine, as nothing is slow by
/// itself.
const PATIENCE: Duration = Duration::from_secs(60);

fn spec(behaviour: &str) -> LaunchSpec {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in_vllm.sh");
    LaunchSpec::new("engine_0", script, behaviour, "tcp://127.0.0.1:5000")
}

/// Members of a process group that have not ended, by their command lines.
fn alive(group: u32) -> Vec<String> {
    let listed = Command::new("ps").args(["-eo", "pgid=,stat=,args="]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let of_group = |line: &&str| {
        let mut columns = line.split_whitespace();
        columns.next() == Some(&group.to_string())
            && !columns.next().unwrap_or("Z").starts_with('Z')
    };
    listed.lines().filter(of_group).map(str::to_owned).collect()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

async fn until_it_runs(process: &EngineProcess, members: usize) {
    let group = process.pid();
    tokio::task::spawn_blocking(move || until("it runs", || alive(group).len() >= members))
        .await
        .unwrap();
}

#[tokio::test]
async fn an_engine_that_fails_is_reported_with_its_last_lines() {
    let process = spec("fails").launch().unwrap();
    let report = tokio::time::timeout(PATIENCE, process.exited()).await.unwrap();
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
async fn environment_gpus_and_flags_reach_the_engine() {
    let spec = LaunchSpec {
        gpus: Some(vec![2, 3]),
        env: vec![("STAND_IN_EXTRA".into(), "yes".into())],
        extra_args: vec!["--enforce-eager".into()],
        ..spec("tells")
    };
    let report = tokio::time::timeout(PATIENCE, spec.launch().unwrap().exited()).await.unwrap();
    assert_eq!(report.last_lines, ["gpus=2,3 extra=yes last=--enforce-eager"]);
}

#[tokio::test]
async fn a_program_that_is_not_there_is_named() {
    let spec = LaunchSpec { vllm: "/nowhere/vllm".into(), ..spec("obeys") };
    let error = spec.launch().unwrap_err();
    assert!(
        matches!(&error, EngineError::Spawn { program, .. } if program.ends_with("vllm")),
        "{error}"
    );
}

#[tokio::test]
async fn an_engine_that_obeys_is_left_the_time_to() {
    let process = spec("obeys").launch().unwrap();
    until_it_runs(&process, 2).await;
    let group = process.pid();
    let report = process.terminate(PATIENCE).await;
    assert_eq!(report.status.unwrap().code(), Some(0));
    assert!(report.last_lines.contains(&"tidied up".to_owned()));
    assert_eq!(alive(group), Vec::<String>::new());
}

#[tokio::test]
async fn an_engine_that_resists_is_killed_after_its_grace() {
    let process = spec("resists").launch().unwrap();
    until_it_runs(&process, 2).await;
    let group = process.pid();
    let report = process.terminate(Duration::from_millis(100)).await;
    assert!(report.to_string().starts_with("signal: 9"), "{report}");
    assert_eq!(alive(group), Vec::<String>::new());
}

#[tokio::test]
async fn what_an_engine_leaves_behind_is_killed_with_its_end() {
    let process = spec("leaves_a_child").launch().unwrap();
    let report = tokio::time::timeout(PATIENCE, process.exited()).await.unwrap();
    assert!(report.status.unwrap().success());
    // The child ignores SIGTERM and has no end of its own: it is gone because the group was killed
    // before the end was told.
    assert_eq!(alive(process.pid()), Vec::<String>::new());
}

#[tokio::test]
async fn dropping_the_process_kills_its_whole_group() {
    let process = spec("obeys").launch().unwrap();
    until_it_runs(&process, 2).await;
    let group = process.pid();
    drop(process);
    tokio::task::spawn_blocking(move || until("it is gone", || alive(group).is_empty()))
        .await
        .unwrap();
}

/// Set in the process that a test starts from itself to play the frontend, to the file that a kept
/// engine prints to.
const FRONTEND: &str = "CHIASM_TEST_PLAYS_FRONTEND";

/// Starts an engine, tells its group and watchdog, and waits to be killed.
async fn frontend_to_be_killed(keep: Option<Keep>) {
    let process = LaunchSpec { keep, ..spec("obeys") }.launch().unwrap();
    until_it_runs(&process, 2).await;
    let watchdog = process.outlives().and_then(|launched| launched.watchdog);
    println!("\ngroup={} watchdog={}", process.pid(), watchdog.map_or(0, |watchdog| watchdog.pid));
    std::future::pending::<()>().await;
}

/// Lets another process launch an engine in the test of this name, and kills that process. The
/// engine's process and watchdog.
fn left_by_a_killed_frontend(test: &str, output: &Path) -> (u32, u32) {
    let mut frontend = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("launch::{test}"), "--nocapture"])
        .env(FRONTEND, output)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(frontend.stdout.take().unwrap()).lines();
    let told =
        lines.map(Result::unwrap).find_map(|line| line.strip_prefix("group=").map(str::to_owned));
    let told = told.expect("the frontend starts its engine");
    let (group, watchdog) = told.split_once(" watchdog=").unwrap();
    let (group, watchdog) = (group.parse().unwrap(), watchdog.parse().unwrap());
    assert!(!alive(group).is_empty());
    frontend.kill().unwrap();
    frontend.wait().unwrap();
    (group, watchdog)
}

#[tokio::test]
async fn engines_do_not_outlive_a_frontend_that_is_killed() {
    if std::env::var_os(FRONTEND).is_some() {
        return frontend_to_be_killed(None).await;
    }
    let (group, _) = left_by_a_killed_frontend(
        "engines_do_not_outlive_a_frontend_that_is_killed",
        Path::new("unused"),
    );
    until("the engine is gone", || alive(group).is_empty());
}

#[tokio::test]
async fn a_kept_engine_that_nobody_takes_over_ends() {
    if let Some(output) = std::env::var_os(FRONTEND) {
        return frontend_to_be_killed(Some(Keep {
            time: Duration::from_secs(1),
            output: output.into(),
        }))
        .await;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("output");
    let (group, _) =
        left_by_a_killed_frontend("a_kept_engine_that_nobody_takes_over_ends", &output);
    until("the engine is gone", || alive(group).is_empty());
    assert!(std::fs::read_to_string(output).unwrap().contains("tidied up"), "it was asked to");
}

#[tokio::test]
async fn a_kept_engine_is_taken_over_and_is_then_as_any_other() {
    let long = Duration::from_secs(600);
    if let Some(output) = std::env::var_os(FRONTEND) {
        return frontend_to_be_killed(Some(Keep { time: long, output: output.into() })).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("output");
    let (group, watchdog) =
        left_by_a_killed_frontend("a_kept_engine_is_taken_over_and_is_then_as_any_other", &output);
    let keep = Keep { time: long, output };
    let launched =
        Launched { process: ProcessId::of(group).unwrap(), watchdog: ProcessId::of(watchdog) };
    assert!(launched.watchdog.is_some(), "it counts down");
    let successor = Launched {
        process: ProcessId { start: launched.process.start + 1, ..launched.process },
        ..launched
    };
    assert!(
        EngineProcess::take_over("e", successor, &keep).unwrap().is_none(),
        "another process with its number"
    );

    let process = EngineProcess::take_over("e", launched, &keep).unwrap().unwrap();
    until("its former watchdog is gone", || alive(watchdog).is_empty());
    assert!(process.try_exited().is_none() && !alive(group).is_empty());
    let report = process.terminate(PATIENCE).await;
    assert_eq!(report.last_lines, ["tidied up"], "what it says is heard from now on");
    assert_eq!(alive(group), Vec::<String>::new());
}

#[tokio::test]
async fn an_engine_that_is_left_runs_on() {
    let dir = tempfile::tempdir().unwrap();
    let keep = Keep { time: Duration::from_secs(600), output: dir.path().join("output") };
    let process = LaunchSpec { keep: Some(keep.clone()), ..spec("obeys") }.launch().unwrap();
    until_it_runs(&process, 2).await;
    let (group, launched) = (process.pid(), process.outlives().unwrap());
    process.leave();
    assert!(!alive(group).is_empty());
    let process = EngineProcess::take_over("e", launched, &keep).unwrap().unwrap();
    drop(process);
    tokio::task::spawn_blocking(move || until("it is gone", || alive(group).is_empty()))
        .await
        .unwrap();
}
