//! Who may speak to whom.

use std::process::Stdio;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::cluster::{Agent, Cluster};
use super::{SOON, ask};
use crate::support::{Server, chiasm};

/// An authority and the certificates that it has signed, as files.
pub(crate) struct Authority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).expect("a certificate");
        std::fs::write(folder.path().join("ca.pem"), certificate.pem()).expect("written");
        Self { folder, issuer: Issuer::new(params, key) }
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// The flags of a process with a certificate for this name, which trusts `trusted`.
    pub(crate) fn flags(&self, name: &str, trusted: &Self) -> Vec<String> {
        let (chain, private) = self.sign(name);
        let own = [
            ("--agent-certfile", chain),
            ("--agent-keyfile", private),
            ("--agent-ca-file", trusted.file("ca.pem")),
        ];
        own.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
    }

    /// Writes a certificate for this name, and its key, in place of any before.
    fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new([name.to_owned()]).expect("parameters");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let (chain, private) =
            (self.file(&format!("{name}.pem")), self.file(&format!("{name}.key")));
        std::fs::write(&chain, certificate.pem()).expect("written");
        std::fs::write(&private, key.serialize_pem()).expect("written");
        (chain, private)
    }
}

fn agent(cluster: &Cluster, flags: &[String]) -> Agent {
    agent_at(cluster, "0", flags)
}

fn agent_at(cluster: &Cluster, port: &str, flags: &[String]) -> Agent {
    let flags: Vec<&str> =
        ["--sim", "1"].into_iter().chain(flags.iter().map(String::as_str)).collect();
    cluster.agent_at("127.0.0.1", port, &flags)
}

fn serve(cluster: &Cluster, agent: &Agent, flags: &[String]) -> Server {
    cluster.serve_at(&agent.address, &flags.iter().map(String::as_str).collect::<Vec<_>>())
}

#[tokio::test]
async fn both_sides_show_certificates_that_the_other_trusts_for_its_name() {
    let (cluster, ours, theirs) = (Cluster::new(), Authority::new(), Authority::new());
    let trusted = agent(&cluster, &ours.flags("127.0.0.1", &ours));
    let server = serve(&cluster, &trusted, &ours.flags("frontend", &ours));
    server.wait_ready(1, SOON).await;
    server.chat(&ask("hello", 3)).await.ok();
    let stranger = agent(&cluster, &ours.flags("gpu7", &ours));
    let plain = agent(&cluster, &[]);
    for (what, agent, flags, told) in [
        ("no certificate", &trusted, Vec::new(), "give this side --agent-certfile"),
        (
            "a certificate where none is wanted",
            &plain,
            ours.flags("frontend", &ours),
            "give the agent --agent-certfile",
        ),
        ("a certificate of others", &trusted, theirs.flags("frontend", &ours), ""),
        ("an agent of others", &trusted, ours.flags("frontend", &theirs), ""),
        ("an agent of another name", &stranger, ours.flags("frontend", &ours), ""),
    ] {
        let server = serve(&cluster, agent, &flags);
        let why = server.logged("no engines of this agent can be used");
        assert!(why.contains("can't be reached") && why.contains(told), "{what}: {why}");
        assert_eq!(server.ready_workers().await, 0, "{what}");
    }
}

#[tokio::test]
async fn agents_may_have_a_name_in_common_in_place_of_their_addresses() {
    let (cluster, ours) = (Cluster::new(), Authority::new());
    let agent = agent(&cluster, &ours.flags("agents.chiasm", &ours));
    let named = |name: &str| {
        [ours.flags("frontend", &ours), vec!["--agent-tls-name".to_owned(), name.to_owned()]]
            .concat()
    };
    let server = serve(&cluster, &agent, &named("agents.chiasm"));
    server.wait_ready(1, SOON).await;
    let is_probed = |name: &str| {
        let mut probe = chiasm(&["probe", &agent.address]);
        probe
            .args(named(name))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .expect("chiasm runs")
            .success()
    };
    assert!(is_probed("agents.chiasm"));
    // Neither another name nor the address that it is reached at.
    assert!(!is_probed("others.chiasm") && !is_probed("127.0.0.1") && !is_probed("no name"));
}

#[tokio::test]
async fn block_keys_of_another_secret_and_plans_of_another_processor_are_refused() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let agent = cluster.agent(1, &["--sim", "1"]);
    let server = other.serve_at(&agent.address, &[]);
    let why = server.logged("no engines of this agent can be used");
    assert!(why.contains("--block-key-secret"), "{why}");
    let server =
        cluster.serve_at(&agent.address, &["--mm-processor-kwargs", r#"{"max_pixels": 100352}"#]);
    let why = server.logged("engine lost");
    assert!(why.contains("other settings of its processor"), "{why}");
    assert_eq!(server.ready_workers().await, 0);
}

#[tokio::test]
async fn certificates_are_renewed_while_requests_run() {
    let (cluster, old, new) = (Cluster::new(), Authority::new(), Authority::new());
    let mut running = agent(&cluster, &old.flags("127.0.0.1", &old));
    let server = serve(&cluster, &running, &old.flags("frontend", &old));
    server.wait_ready(1, SOON).await;
    let mut body = ask("hello", 100);
    body["stream"] = true.into();
    let stream = server.open("/v1/chat/completions", &body).await;
    // Both get certificates of another authority, in the same files, and trust that one alone.
    for name in ["127.0.0.1", "frontend"] {
        let (chain, key) = new.sign(name);
        std::fs::copy(chain, old.file(&format!("{name}.pem"))).expect("copied");
        std::fs::copy(key, old.file(&format!("{name}.key"))).expect("copied");
    }
    std::fs::copy(new.file("ca.pem"), old.file("ca.pem")).expect("copied");
    let text = stream.text().await.expect("all of it");
    assert!(text.contains("[DONE]") && !text.contains("\"error\""), "{text}");
    // A frontend that comes now has only seen the new ones.
    let other = serve(&cluster, &running, &new.flags("frontend", &new));
    other.wait_ready(1, SOON).await;
    other.chat(&ask("hello", 3)).await.ok();
    // And when the first one has to connect again, it has read them too.
    running.kill();
    running = agent_at(&cluster, &running.port(), &new.flags("127.0.0.1", &new));
    server.wait_ready(1, SOON).await;
    server.chat(&ask("hello", 3)).await.ok();
    drop(running);
}
