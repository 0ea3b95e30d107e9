//! Engines of agents that encode, prefill or decode alone.

use super::cluster::{Agent, Cluster};
use super::{BLOCK, SOON, ask, workers};
use crate::support::{Answer, Server, scenario_run};

/// Whatever is not computed yet is computed by engines that are there for it.
const ALWAYS: [&str; 5] =
    ["--disturb-weight", "1000", "--hop-weight", "0", "--allow-private-media"];

fn prefilled(answer: &Answer) -> bool {
    answer.headers.contains_key("x-chiasm-prefill-worker")
}

/// The machine's number in the order of the frontend's workers, by pairs of them.
fn pair(answer: &Answer, header: &str) -> u32 {
    let name = answer.header(header);
    let number: u32 = name.trim_start_matches("worker_").parse().expect("a number");
    number / 2
}

#[tokio::test]
async fn prompts_are_handed_over_on_each_machine() {
    let cluster = Cluster::new();
    let both = ["--sim", "prefill=1,decode=1"];
    let agents = [cluster.agent(1, &both), cluster.agent(2, &both)];
    let server = cluster.serve(&agents, &ALWAYS);
    server.wait_ready(4, SOON).await;
    scenario_run::play_all(&server, "m", BLOCK, 8).await;
    assert!(server.metric("chiasm_prefilled_requests_total").await > 10.0);
    assert_eq!(server.metric("chiasm_recomputed_prompts_total").await, 0.0);
    let roles: Vec<String> =
        workers(&server).await.iter().map(|worker| worker["role"].to_string()).collect();
    assert_eq!(roles.iter().filter(|role| role.contains("prefill")).count(), 2);
    for topic in 0..6 {
        let answer =
            server.chat(&ask(&format!("{topic} {}", "one two three four ".repeat(40)), 2)).await;
        answer.ok();
        assert_eq!(pair(&answer, "x-chiasm-prefill-worker"), pair(&answer, "x-chiasm-worker"));
    }
}

#[tokio::test]
async fn pictures_are_encoded_on_the_machine_where_they_are_needed() {
    let cluster = Cluster::new();
    let roles = ["--sim", "encode=1,prefill=1,decode=1"];
    let agents = [cluster.agent(1, &roles), cluster.agent(2, &roles)];
    let server = cluster.serve(&agents, &ALWAYS);
    server.wait_ready(6, SOON).await;
    scenario_run::play_all(&server, "m", BLOCK, 8).await;
    assert!(server.metric("chiasm_encoded_items_total").await > 5.0);
    assert_eq!(server.metric("chiasm_unencoded_items_total").await, 0.0);
}

/// A frontend before an engine that prefills on one machine and one that decodes on another, and
/// what it says to a prompt.
async fn ask_two_machines(networks: [Option<&'static str>; 2]) -> (Server, Answer, Vec<Agent>) {
    let cluster = Cluster::new();
    let agent = |machine: u8, engines, network: Option<&'static str>| {
        let network =
            network.map_or(Vec::new(), |network| vec!["--roles-private-network", network]);
        cluster.agent(machine, &[vec!["--sim", engines], network].concat())
    };
    let agents = vec![agent(2, "prefill=1", networks[0]), agent(3, "decode=1", networks[1])];
    let server = cluster.serve(&agents, &ALWAYS);
    server.wait_ready(2, SOON).await;
    let answer = server.chat(&ask(&"one two three four ".repeat(40), 24)).await;
    answer.ok();
    (server, answer, agents)
}

#[tokio::test]
async fn prompts_are_handed_over_between_machines_of_one_private_network() {
    let (server, answer, _agents) =
        ask_two_machines([Some("127.0.0.2/24"), Some("127.0.0.3/24")]).await;
    assert!(prefilled(&answer));
    assert!(
        workers(&server).await.iter().all(|worker| worker["private_network"] == "127.0.0.0/24")
    );
    let (answer, prompt) =
        (answer.ok(), answer.ok()["usage"]["prompt_tokens"].as_u64().expect("a count"));
    // All but the last token came from the other machine's engine, which was asked for it.
    let said = answer["choices"][0]["message"]["content"].as_str().expect("text");
    assert!(
        said.starts_with(&format!(
            "no images; {} of {prompt} prompt tokens were cached",
            prompt - 1
        )),
        "{said}"
    );
    scenario_run::play_all(&server, "m", BLOCK, 8).await;
    assert!(server.metric("chiasm_prefilled_requests_total").await > 10.0);
    assert_eq!(server.metric("chiasm_recomputed_prompts_total").await, 0.0);
}

#[tokio::test]
async fn prompts_are_not_handed_over_between_other_machines() {
    let network = Some("127.0.0.2/24");
    for networks in [
        [None, None],
        [network, None],
        [None, Some("127.0.0.3/24")],
        [network, Some("127.0.0.3/30")],
    ] {
        let (server, answer, _agents) = ask_two_machines(networks).await;
        assert!(!prefilled(&answer), "{networks:?}");
        assert_eq!(server.metric("chiasm_recomputed_prompts_total").await, 0.0, "nobody tries");
    }
}
