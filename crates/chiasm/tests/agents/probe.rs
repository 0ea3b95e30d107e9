//! `chiasm probe` for agents.

use std::process::Stdio;

use super::TIMEOUT;
use super::cluster::{Agent, Cluster};
use crate::support::{chiasm, wait_for};

/// Returns `true` if a probe of the agent with `flags` succeeds.
fn probe(agent: &Agent, flags: &[&str]) -> bool {
    let mut probe = chiasm(&["probe", &agent.address]);
    probe
        .args(flags)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("chiasm runs")
        .success()
}

#[tokio::test]
async fn probe_reports_admission_by_a_frontend() {
    let cluster = Cluster::new();
    let mut agents = [cluster.agent(1, &["--sim", "2"])];
    let is_admitted = |agents: &[Agent]| probe(&agents[0], &["--admitted"]);
    assert!(probe(&agents[0], &[]) && !is_admitted(&agents));
    // A frontend that refuses the engines is connected, but does not admit them.
    let refusing = cluster.serve(&agents, &["--mm-processor-kwargs", r#"{"max_pixels": 100352}"#]);
    refusing.wait_for_log("other settings of the model's processor");
    assert!(!is_admitted(&agents));
    drop(refusing);

    let frontend = cluster.serve(&agents, &[]);
    wait_for("admission", TIMEOUT, async || is_admitted(&agents)).await;
    let drain = |flags: &[&str]| {
        assert!(
            chiasm(&["drain", &agents[0].address])
                .args(flags)
                .status()
                .expect("chiasm runs")
                .success()
        );
    };
    drain(&[]);
    assert!(!is_admitted(&agents) && probe(&agents[0], &[]));
    drain(&["--resume"]);
    assert!(is_admitted(&agents));
    let second = cluster.serve(&agents, &[]);
    second.wait_ready(2, TIMEOUT).await;
    drop(frontend);
    wait_for("admission by the other frontend", TIMEOUT, async || is_admitted(&agents)).await;
    drop(second);
    wait_for("the end of all frontends", TIMEOUT, async || !is_admitted(&agents)).await;
    agents[0].kill();
    assert!(!probe(&agents[0], &[]));
}
