//! A real etcd with one member, on free loopback ports, in its own folder.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use super::Etcd;
use super::certificates::Authority;
use crate::etcd::api::EtcdClient;
use crate::fake::TEST_TIMEOUT;
use crate::http::{self, CALL_TIMEOUT};
use crate::{Access, Candidate, Registration, Source, SourceFollower, Tls};

pub(super) struct EtcdServer {
    child: Option<Child>,
    ports: [u16; 2],
    folder: TempDir,
    /// The name of the data folder. A new generation has no data.
    data_generation: u32,
    /// The authority for the certificates of the server and its clients.
    authority: Option<Authority>,
    /// The TLS files of clients.
    tls: Tls,
}

impl EtcdServer {
    /// Starts an etcd without TLS.
    pub(super) async fn start() -> Self {
        Self::start_with(false).await
    }

    /// Starts an etcd with TLS that requires client certificates.
    pub(super) async fn start_with_tls() -> Self {
        Self::start_with(true).await
    }

    async fn start_with(is_tls: bool) -> Self {
        let ports = || {
            let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
            listeners.map(|listener| listener.local_addr().unwrap().port())
        };
        let folder = TempDir::new().unwrap();
        let authority = is_tls.then(|| Authority::new(folder.path()));
        let tls = authority.as_ref().map(|authority| authority.tls("client")).unwrap_or_default();
        let mut server =
            Self { child: None, ports: ports(), folder, data_generation: 0, authority, tls };
        // Another process may take a port before etcd does.
        while !server.try_start().await {
            server.ports = ports();
            server.data_generation += 1;
            assert!(server.data_generation < 5, "etcd does not start: {}", server.log());
        }
        server
    }

    /// Starts the process and waits until it is healthy. Returns `false` if it exits.
    async fn try_start(&mut self) -> bool {
        let program = std::env::var_os("CHIASM_TEST_ETCD")
            .expect("CHIASM_TEST_ETCD must be the path of an etcd");
        let peer = format!("http://127.0.0.1:{}", self.ports[1]);
        let client = format!(
            "{}://127.0.0.1:{}",
            if self.authority.is_some() { "https" } else { "http" },
            self.ports[0]
        );
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        let mut command = Command::new(program);
        command.arg("--data-dir").arg(self.folder.path().join(self.data_generation.to_string()));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        if let Some(authority) = &self.authority {
            let identity = authority.sign("server", &["127.0.0.1"]);
            command
                .arg("--cert-file")
                .arg(identity.certificate)
                .arg("--key-file")
                .arg(identity.key);
            command.arg("--trusted-ca-file").arg(authority.file()).arg("--client-cert-auth");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().expect("CHIASM_TEST_ETCD can't be run"));
        let http = http::build_client_blocking(&self.tls).unwrap();
        let since = Instant::now();
        while since.elapsed() < TEST_TIMEOUT {
            let request = http.get(format!("{client}/health")).timeout(Duration::from_secs(1));
            if let Ok(response) = request.send().await
                && response.status().is_success()
            {
                return true;
            }
            if self.child.as_mut().unwrap().try_wait().unwrap().is_some() {
                return false;
            }
            sleep(Duration::from_millis(20)).await;
        }
        panic!("etcd does not become healthy: {}", self.log());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Restarts etcd on the same ports, with its data.
    pub(super) async fn restart(&mut self) {
        self.kill();
        assert!(self.try_start().await, "etcd does not start again: {}", self.log());
    }

    /// Restarts etcd on the same ports, without data.
    pub(super) async fn restart_empty(&mut self) {
        self.kill();
        self.data_generation += 1;
        self.restart().await;
    }

    /// Sends a signal that stops or continues the process. Its connections stay open.
    pub(super) fn signal(&self, signal: &str) {
        let pid = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.ports[0])
    }

    pub(super) fn tls(&self) -> Tls {
        self.tls.clone()
    }

    pub(super) fn etcd(&self) -> Etcd {
        let scheme = if self.authority.is_some() { "etcds" } else { "etcd" };
        format!("{scheme}://{}/test", self.address()).parse().unwrap()
    }

    pub(super) async fn client(&self) -> EtcdClient {
        EtcdClient::new(&self.etcd(), 0, &self.tls, CALL_TIMEOUT).await.unwrap()
    }

    pub(super) fn follow(&self) -> SourceFollower {
        Source::Etcd(self.etcd())
            .follow(&Access { etcd: self.tls.clone(), ..Access::default() })
            .unwrap()
    }

    /// Registers an agent with a lease of [`TTL`].
    pub(super) fn register(&self, address: &str) -> Registration {
        let agent = Candidate::new(address, Some("tiny".to_owned())).unwrap();
        Registration::start(self.etcd(), self.tls.clone(), &agent, TTL).unwrap()
    }
}

/// The shortest lease that etcd grants.
pub(super) const TTL: Duration = Duration::from_secs(2);

/// Waits until `registration` is registered, or is not.
pub(super) async fn wait_until_registered(registration: &Registration, is_registered: bool) {
    let mut receiver = registration.is_registered();
    let changed = timeout(TEST_TIMEOUT, receiver.wait_for(|&now| now == is_registered)).await;
    assert!(
        changed.is_ok_and(|changed| changed.is_ok()),
        "registered never became {is_registered}"
    );
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}
