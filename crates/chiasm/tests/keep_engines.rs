//! Launched engines that outlive their frontend, with simulated ones in the place of vLLM's.

use std::path::Path;
use std::time::Duration;

use crate::support::{Server, chiasm, demo_model, send_signal, wait_for};
use serde_json::{Value, json};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
const ENGINES: u64 = 2;

/// A state folder and what is known there. Ends the engines that are left when it is dropped.
struct State(TempDir);

impl State {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self) -> String {
        self.0.path().display().to_string()
    }

    async fn serve(&self, keep: &str, flags: &[&str]) -> Server {
        let (model, engines, state) =
            (demo_model().display().to_string(), ENGINES.to_string(), self.path());
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
        server.wait_ready(ENGINES, PATIENCE).await;
        server
    }

    fn command(&self, args: &[&str]) -> (bool, String) {
        let output = chiasm(&["engines", "--state-dir", &self.path()])
            .args(args)
            .output()
            .expect("chiasm engines");
        (output.status.success(), String::from_utf8(output.stdout).expect("text"))
    }

    fn engines(&self) -> Vec<Value> {
        let (listed, lines) = self.command(&["--json"]);
        assert!(listed);
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// The engines' processes. One that is being started has none for a moment.
    fn pids(&self) -> Vec<u64> {
        self.engines().iter().filter_map(|engine| engine["pid"].as_u64()).collect()
    }

    fn are(&self, condition: &str) -> bool {
        self.engines().iter().all(|engine| engine["condition"] == condition)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.command(&["--stop-all"]);
    }
}

fn runs(pid: u64) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"))
        .unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

async fn answers(server: &Server) {
    let body = json!({"model": "m", "prompt": "a", "max_tokens": 3, "ignore_eos": true});
    for _ in 0..4 {
        assert_eq!(
            server.post("/v1/completions", &body).await.ok()["usage"]["completion_tokens"],
            3
        );
    }
}

#[tokio::test]
async fn engines_are_taken_over_by_a_frontend_with_the_same_command() {
    let state = State::new();
    let mut server = state.serve("600", &[]).await;
    answers(&server).await;
    let pids = state.pids();
    assert_eq!((pids.len() as u64, state.are("served")), (ENGINES, true));
    let name = state.engines()[0]["name"].as_str().expect("a name").to_owned();
    assert!(!state.command(&["--stop", &name]).0, "it has a frontend");
    for signal in ["KILL", "TERM"] {
        server.end_by(signal);
        assert_eq!((state.pids(), state.are("left")), (pids.clone(), true), "after {signal}");
        server = state.serve("600", &[]).await;
        let taken_over = async || server.lines_logged("took over an engine") as u64 == ENGINES;
        wait_for("word of the engines", PATIENCE, taken_over).await;
        answers(&server).await;
        assert_eq!((state.pids(), state.are("served")), (pids.clone(), true), "after {signal}");
    }

    // It is watched as one that was launched here.
    send_signal(u32::try_from(pids[0]).expect("a process id"), "KILL");
    wait_for("another engine", PATIENCE, async || !state.pids().contains(&pids[0])).await;
    server.wait_ready(ENGINES, PATIENCE).await;

    server.end_by("TERM");
    let left = state.pids();
    let other = state.serve("600", &["--receiver-cache-gb", "1"]).await;
    answers(&other).await;
    assert_eq!(
        other.lines_logged("took over an engine"),
        0,
        "they were launched with another command"
    );
    assert_eq!(state.pids().len() as u64, 2 * ENGINES);
    assert!(state.command(&["--stop-all"]).0);
    assert!(!left.iter().any(|&pid| runs(pid)));
    assert_eq!(
        (state.pids().len() as u64, state.are("served")),
        (ENGINES, true),
        "those that have a frontend stay"
    );
    drop(other);
    assert!(state.command(&["--stop-all"]).0);
    assert_eq!(state.engines(), Vec::<Value>::new());
}

#[tokio::test]
async fn engines_that_nobody_takes_over_end_and_are_replaced() {
    let state = State::new();
    let mut server = state.serve("1", &[]).await;
    let pids = state.pids();
    server.end_by("KILL");
    wait_for("their end", PATIENCE, async || !pids.iter().any(|&pid| runs(pid))).await;
    assert!(state.are("ended"));
    let server = state.serve("1", &[]).await;
    answers(&server).await;
    assert_eq!(server.lines_logged("took over an engine"), 0);
    assert!(state.are("served"));
}
