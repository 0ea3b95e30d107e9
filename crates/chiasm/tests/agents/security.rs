//! Authentication between agents and frontends.

use std::process::Stdio;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::cluster::{Agent, Cluster};
use super::{TIMEOUT, chat_body};
use crate::support::{Server, chiasm};

/// A certificate authority and the certificates that it has signed, as files.
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

    /// Returns the flags of a process that has a certificate for `name` and trusts `trusted`.
    pub(crate) fn flags(&self, name: &str, trusted: &Self) -> Vec<String> {
        let (chain, private) = self.sign(name);
        let flags = [
            ("--agent-certfile", chain),
            ("--agent-keyfile", private),
            ("--agent-ca-file", trusted.file("ca.pem")),
        ];
        flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
    }

    /// Writes a new certificate for `name` and its key, replacing earlier files. Returns their
    /// paths.
    fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new([name.to_owned()]).expect("parameters");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let chain = self.file(&format!("{name}.pem"));
        let private = self.file(&format!("{name}.key"));
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
async fn untrusted_certificates_are_refused_by_both_sides() {
    let cluster = Cluster::new();
    let ours = Authority::new();
    let theirs = Authority::new();
    let trusted = agent(&cluster, &ours.flags("127.0.0.1", &ours));
    let server = serve(&cluster, &trusted, &ours.flags("frontend", &ours));
    server.wait_ready(1, TIMEOUT).await;
    server.chat(&chat_body("hello", 3)).await.ok();
    let other_name = agent(&cluster, &ours.flags("gpu7", &ours));
    let plain = agent(&cluster, &[]);
    for (case, agent, flags, hint) in [
        ("no certificate", &trusted, Vec::new(), "give this side --agent-certfile"),
        (
            "a certificate for an agent without TLS",
            &plain,
            ours.flags("frontend", &ours),
            "give the agent --agent-certfile",
        ),
        (
            "a frontend's certificate of another authority",
            &trusted,
            theirs.flags("frontend", &ours),
            "",
        ),
        (
            "an agent's certificate of another authority",
            &trusted,
            ours.flags("frontend", &theirs),
            "",
        ),
        ("an agent's certificate for another name", &other_name, ours.flags("frontend", &ours), ""),
    ] {
        let server = serve(&cluster, agent, &flags);
        let why = server.wait_for_log("no engines of this agent can be used");
        assert!(why.contains("can't be reached") && why.contains(hint), "{case}: {why}");
        assert_eq!(server.ready_workers().await, 0, "{case}");
    }
}

#[tokio::test]
async fn shared_certificate_name_replaces_agent_address() {
    let cluster = Cluster::new();
    let ours = Authority::new();
    let agent = agent(&cluster, &ours.flags("agents.chiasm", &ours));
    let named = |name: &str| {
        [ours.flags("frontend", &ours), vec!["--agent-tls-name".to_owned(), name.to_owned()]]
            .concat()
    };
    let server = serve(&cluster, &agent, &named("agents.chiasm"));
    server.wait_ready(1, TIMEOUT).await;
    let probe_succeeds = |name: &str| {
        let mut probe = chiasm(&["probe", &agent.address]);
        probe
            .args(named(name))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .expect("chiasm runs")
            .success()
    };
    assert!(probe_succeeds("agents.chiasm"));
    // Other names and the agent's own address are refused.
    for name in ["others.chiasm", "127.0.0.1", "no name"] {
        assert!(!probe_succeeds(name), "{name}");
    }
}

#[tokio::test]
async fn other_block_key_secret_or_processor_is_refused() {
    let cluster = Cluster::new();
    let other = Cluster::new();
    let agent = cluster.agent(1, &["--sim", "1"]);
    let server = other.serve_at(&agent.address, &[]);
    let why = server.wait_for_log("no engines of this agent can be used");
    assert!(why.contains("--block-key-secret"), "{why}");
    let server =
        cluster.serve_at(&agent.address, &["--mm-processor-kwargs", r#"{"max_pixels": 100352}"#]);
    let why = server.wait_for_log("engine not connected");
    assert!(why.contains("other settings of the model's processor"), "{why}");
    assert_eq!(server.ready_workers().await, 0);
}

#[tokio::test]
async fn certificates_are_renewed_while_requests_run() {
    let cluster = Cluster::new();
    let old = Authority::new();
    let new = Authority::new();
    let mut running = agent(&cluster, &old.flags("127.0.0.1", &old));
    let server = serve(&cluster, &running, &old.flags("frontend", &old));
    server.wait_ready(1, TIMEOUT).await;
    let mut body = chat_body("hello", 100);
    body["stream"] = true.into();
    let stream = server.open("/v1/chat/completions", &body).await;
    // Replace the files: both sides get certificates of the new authority and trust only that one.
    for name in ["127.0.0.1", "frontend"] {
        let (chain, key) = new.sign(name);
        std::fs::copy(chain, old.file(&format!("{name}.pem"))).expect("copied");
        std::fs::copy(key, old.file(&format!("{name}.key"))).expect("copied");
    }
    std::fs::copy(new.file("ca.pem"), old.file("ca.pem")).expect("copied");
    let text = stream.text().await.expect("a whole stream");
    assert!(text.contains("[DONE]") && !text.contains("\"error\""), "{text}");
    // A frontend that starts now has only the new certificates.
    let other = serve(&cluster, &running, &new.flags("frontend", &new));
    other.wait_ready(1, TIMEOUT).await;
    other.chat(&chat_body("hello", 3)).await.ok();
    // The first frontend has read them too, as its reconnection shows.
    running.kill();
    running = agent_at(&cluster, &running.port(), &new.flags("127.0.0.1", &new));
    server.wait_ready(1, TIMEOUT).await;
    server.chat(&chat_body("hello", 3)).await.ok();
    drop(running);
}
