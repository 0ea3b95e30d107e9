//! What `chiasm probe` says of an agent.

use std::process::Stdio;

use super::SOON;
use super::cluster::{Agent, Cluster};
use crate::support::{chiasm, wait_for};

/// Whether a probe of an agent succeeds.
fn probe(agent: &Agent, more: &[&str]) -> bool {
    let mut probe = chiasm(&["probe", &agent.address]);
    probe
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("chiasm runs")
        .success()
}

#[tokio::test]
async fn an_agent_is_admitted_while_a_frontend_has_all_of_its_engines_and_it_takes_requests() {
    let cluster = Cluster::new();
    let mut agents = [cluster.agent(1, &["--sim", "2"])];
    let is_admitted = |agents: &[Agent]| probe(&agents[0], &["--admitted"]);
    assert!(probe(&agents[0], &[]) && !is_admitted(&agents));
    // One that refuses its engines is connected, and no more than that.
    let refusing = cluster.serve(&agents, &["--mm-processor-kwargs", r#"{"max_pixels": 100352}"#]);
    refusing.logged("other settings of its processor");
    assert!(!is_admitted(&agents));
    drop(refusing);

    let frontend = cluster.serve(&agents, &[]);
    wait_for("admission", SOON, async || is_admitted(&agents)).await;
    let drain = |more: &[&str]| {
        assert!(
            chiasm(&["drain", &agents[0].address])
                .args(more)
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
    second.wait_ready(2, SOON).await;
    drop(frontend);
    wait_for("admission by the other", SOON, async || is_admitted(&agents)).await;
    drop(second);
    wait_for("the end of all frontends", SOON, async || !is_admitted(&agents)).await;
    agents[0].kill();
    assert!(!probe(&agents[0], &[]));
}
