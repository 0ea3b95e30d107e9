//! Launched engines that outlive their frontend, with simulated engines in place of vLLM's.

use std::path::Path;
use std::time::Duration;

use crate::support::{Server, chiasm, demo_model, send_signal, wait_for};
use serde_json::{Value, json};
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(60);
const ENGINES: u64 = 2;

/// A state folder and the engines recorded in it. Stops those that are left on drop.
struct StateFolder(TempDir);

impl StateFolder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self) -> String {
        self.0.path().display().to_string()
    }

    async fn serve(&self, keep: &str, flags: &[&str]) -> Server {
        let model = demo_model().display().to_string();
        let engines = ENGINES.to_string();
        let state = self.path();
        let vllm = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in_vllm.sh");
        let args = [
            &model,
            "--served-model-name",
            "m",
            "--engines",
            &engines,
            "--vllm",
            vllm,
            "--state-dir",
            &state,
        ];
        let args = [&args[..], &["--keep-engines", keep, "--drain-timeout", "1"], flags].concat();
        let server =
            Server::start_with(&args, &[("CHIASM_TEST_BINARY", env!("CARGO_BIN_EXE_chiasm"))]);
        server.wait_ready(ENGINES, TIMEOUT).await;
        server
    }

    /// Runs `chiasm engines`. Returns `true` if it succeeds, and its stdout.
    fn command(&self, args: &[&str]) -> (bool, String) {
        let output = chiasm(&["engines", "--state-dir", &self.path()])
            .args(args)
            .output()
            .expect("chiasm engines");
        (output.status.success(), String::from_utf8(output.stdout).expect("text"))
    }

    fn engines(&self) -> Vec<Value> {
        let (is_success, lines) = self.command(&["--json"]);
        assert!(is_success);
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// Returns the engines' process ids. An engine has none for a moment while it starts.
    fn pids(&self) -> Vec<u64> {
        self.engines().iter().filter_map(|engine| engine["pid"].as_u64()).collect()
    }

    /// Returns `true` if all engines are in this condition.
    fn all_are(&self, condition: &str) -> bool {
        self.engines().iter().all(|engine| engine["condition"] == condition)
    }
}

impl Drop for StateFolder {
    fn drop(&mut self) {
        self.command(&["--stop-all"]);
    }
}

/// Returns `true` if the process exists and is not a zombie.
fn is_running(pid: u64) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"))
        .unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

/// Asserts that the server answers several requests.
async fn check_answers(server: &Server) {
    let body = json!({"model": "m", "prompt": "a", "max_tokens": 3, "ignore_eos": true});
    for _ in 0..4 {
        assert_eq!(
            server.post("/v1/completions", &body).await.ok()["usage"]["completion_tokens"],
            3
        );
    }
}

#[tokio::test]
async fn frontend_with_same_command_takes_over_engines() {
    let state = StateFolder::new();
    let mut server = state.serve("600", &[]).await;
    check_answers(&server).await;
    let pids = state.pids();
    assert_eq!((pids.len() as u64, state.all_are("served")), (ENGINES, true));
    let name = state.engines()[0]["name"].as_str().expect("a name").to_owned();
    assert!(!state.command(&["--stop", &name]).0, "the engine has a frontend");
    for signal in ["KILL", "TERM"] {
        server.signal_and_wait(signal);
        assert_eq!((state.pids(), state.all_are("left")), (pids.clone(), true), "after {signal}");
        server = state.serve("600", &[]).await;
        let taken_over = async || server.count_logged("took over an engine") as u64 == ENGINES;
        wait_for("log lines about both engines", TIMEOUT, taken_over).await;
        check_answers(&server).await;
        assert_eq!((state.pids(), state.all_are("served")), (pids.clone(), true), "after {signal}");
    }

    // The frontend watches it like an engine that it has launched.
    send_signal(u32::try_from(pids[0]).expect("a process id"), "KILL");
    wait_for("another engine", TIMEOUT, async || !state.pids().contains(&pids[0])).await;
    server.wait_ready(ENGINES, TIMEOUT).await;

    server.signal_and_wait("TERM");
    let left = state.pids();
    let other = state.serve("600", &["--receiver-cache-gb", "1"]).await;
    check_answers(&other).await;
    assert_eq!(
        other.count_logged("took over an engine"),
        0,
        "the engines were launched with another command"
    );
    assert_eq!(state.pids().len() as u64, 2 * ENGINES);
    assert!(state.command(&["--stop-all"]).0);
    assert!(!left.iter().any(|&pid| is_running(pid)));
    assert_eq!(
        (state.pids().len() as u64, state.all_are("served")),
        (ENGINES, true),
        "engines with a frontend are kept"
    );
    drop(other);
    assert!(state.command(&["--stop-all"]).0);
    assert_eq!(state.engines(), Vec::<Value>::new());
}

#[tokio::test]
async fn orphaned_engines_end_after_their_timeout() {
    let state = StateFolder::new();
    let mut server = state.serve("1", &[]).await;
    let pids = state.pids();
    server.signal_and_wait("KILL");
    wait_for("the engines' end", TIMEOUT, async || !pids.iter().any(|&pid| is_running(pid))).await;
    assert!(state.all_are("ended"));
    let server = state.serve("1", &[]).await;
    check_answers(&server).await;
    assert_eq!(server.count_logged("took over an engine"), 0);
    assert!(state.all_are("served"));
}
