//! Agents whose engines only encode, prefill or decode.

use super::cluster::{Agent, Cluster};
use super::{BLOCK, TIMEOUT, chat_body, workers};
use crate::support::{Answer, Server, scenario_run};

/// Flags with which the router always sends stages to dedicated engines.
const ALWAYS_SPLIT: [&str; 5] =
    ["--disturb-weight", "1000", "--hop-weight", "0", "--allow-private-media"];

fn was_prefilled_elsewhere(answer: &Answer) -> bool {
    answer.headers.contains_key("x-chiasm-prefill-worker")
}

/// Returns the number of the machine that the worker in `header` belongs to. Workers are numbered
/// in pairs, two per machine.
fn pair(answer: &Answer, header: &str) -> u32 {
    let name = answer.header(header);
    let number: u32 = name.trim_start_matches("worker_").parse().expect("a number");
    number / 2
}

#[tokio::test]
async fn prompts_are_handed_over_within_a_machine() {
    let cluster = Cluster::new();
    let both = ["--sim", "prefill=1,decode=1"];
    let agents = [cluster.agent(1, &both), cluster.agent(2, &both)];
    let server = cluster.serve(&agents, &ALWAYS_SPLIT);
    server.wait_ready(4, TIMEOUT).await;
    scenario_run::play_all(&server, "m", BLOCK, 8).await;
    assert!(server.metric("chiasm_prefilled_requests_total").await > 10.0);
    assert_eq!(server.metric("chiasm_recomputed_prompts_total").await, 0.0);
    let roles: Vec<String> =
        workers(&server).await.iter().map(|worker| worker["role"].to_string()).collect();
    assert_eq!(roles.iter().filter(|role| role.contains("prefill")).count(), 2);
    for topic in 0..6 {
        let answer = server
            .chat(&chat_body(&format!("{topic} {}", "one two three four ".repeat(40)), 2))
            .await;
        answer.ok();
        assert_eq!(pair(&answer, "x-chiasm-prefill-worker"), pair(&answer, "x-chiasm-worker"));
    }
}

#[tokio::test]
async fn pictures_are_encoded_on_the_machine_that_needs_them() {
    let cluster = Cluster::new();
    let roles = ["--sim", "encode=1,prefill=1,decode=1"];
    let agents = [cluster.agent(1, &roles), cluster.agent(2, &roles)];
    let server = cluster.serve(&agents, &ALWAYS_SPLIT);
    server.wait_ready(6, TIMEOUT).await;
    scenario_run::play_all(&server, "m", BLOCK, 8).await;
    assert!(server.metric("chiasm_encoded_items_total").await > 5.0);
    assert_eq!(server.metric("chiasm_unencoded_items_total").await, 0.0);
}

/// Starts a frontend with a prefill engine on one machine and a decode engine on another, and sends
/// one prompt.
async fn chat_over_two_machines(
    networks: [Option<&'static str>; 2],
) -> (Server, Answer, Vec<Agent>) {
    let cluster = Cluster::new();
    let agent = |machine: u8, engines, network: Option<&'static str>| {
        let network =
            network.map_or(Vec::new(), |network| vec!["--roles-private-network", network]);
        cluster.agent(machine, &[vec!["--sim", engines], network].concat())
    };
    let agents = vec![agent(2, "prefill=1", networks[0]), agent(3, "decode=1", networks[1])];
    let server = cluster.serve(&agents, &ALWAYS_SPLIT);
    server.wait_ready(2, TIMEOUT).await;
    let answer = server.chat(&chat_body(&"one two three four ".repeat(40), 24)).await;
    answer.ok();
    (server, answer, agents)
}

#[tokio::test]
async fn prompts_are_handed_over_within_a_private_network() {
    let (server, answer, _agents) =
        chat_over_two_machines([Some("127.0.0.2/24"), Some("127.0.0.3/24")]).await;
    assert!(was_prefilled_elsewhere(&answer));
    assert!(
        workers(&server).await.iter().all(|worker| worker["private_network"] == "127.0.0.0/24")
    );
    let answer = answer.ok();
    let prompt = answer["usage"]["prompt_tokens"].as_u64().expect("a count");
    // All but the last prompt token were computed by the other machine's engine.
    let text = answer["choices"][0]["message"]["content"].as_str().expect("text");
    let expected = format!("no images; {} of {prompt} prompt tokens were cached", prompt - 1);
    assert!(text.starts_with(&expected), "{text}");
    scenario_run::play_all(&server, "m", BLOCK, 8).await;
    assert!(server.metric("chiasm_prefilled_requests_total").await > 10.0);
    assert_eq!(server.metric("chiasm_recomputed_prompts_total").await, 0.0);
}

#[tokio::test]
async fn prompts_stay_on_machines_of_different_networks() {
    let network = Some("127.0.0.2/24");
    for networks in [
        [None, None],
        [network, None],
        [None, Some("127.0.0.3/24")],
        [network, Some("127.0.0.3/30")],
    ] {
        let (server, answer, _agents) = chat_over_two_machines(networks).await;
        assert!(!was_prefilled_elsewhere(&answer), "{networks:?}");
        assert_eq!(server.metric("chiasm_recomputed_prompts_total").await, 0.0, "no attempt");
    }
}
