//! Who may speak to whom.

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::cluster::{Agent, Cluster};
use crate::support::Server;
use crate::{SOON, ask};

/// An authority and the certificates that it has signed, as files.
struct Authority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
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
    fn flags(&self, name: &str, trusted: &Self) -> Vec<String> {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new([name.to_owned()]).expect("parameters");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let (chain, private) = (self.file(&format!("{name}.pem")), self.file(&format!("{name}.key")));
        std::fs::write(&chain, certificate.pem()).expect("written");
        std::fs::write(&private, key.serialize_pem()).expect("written");
        let own =
            [("--agent-certfile", chain), ("--agent-keyfile", private), ("--agent-ca-file", trusted.file("ca.pem"))];
        own.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
    }
}

fn agent(cluster: &Cluster, flags: &[String]) -> Agent {
    let flags: Vec<&str> = ["--sim", "1"].into_iter().chain(flags.iter().map(String::as_str)).collect();
    cluster.agent(1, &flags)
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
    for (what, agent, flags) in [
        ("no certificate", &trusted, Vec::new()),
        ("a certificate of others", &trusted, theirs.flags("frontend", &ours)),
        ("an agent of others", &trusted, ours.flags("frontend", &theirs)),
        ("an agent of another name", &stranger, ours.flags("frontend", &ours)),
    ] {
        let server = serve(&cluster, agent, &flags);
        let why = server.logged("no engines of this agent can be used");
        assert!(why.contains("can't be reached"), "{what}: {why}");
        assert_eq!(server.ready_workers().await, 0, "{what}");
    }
}

#[tokio::test]
async fn block_keys_of_another_secret_and_plans_of_another_processor_are_refused() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let agent = cluster.agent(1, &["--sim", "1"]);
    let server = other.serve_at(&agent.address, &[]);
    let why = server.logged("no engines of this agent can be used");
    assert!(why.contains("--block-key-secret"), "{why}");
    let server = cluster.serve_at(&agent.address, &["--mm-processor-kwargs", r#"{"max_pixels": 100352}"#]);
    let why = server.logged("engine lost");
    assert!(why.contains("other settings of its processor"), "{why}");
    assert_eq!(server.ready_workers().await, 0);
}
