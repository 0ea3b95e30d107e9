//! A real etcd of one member, on free loopback ports, in a folder of its own.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use super::Etcd;
use super::certificates::Authority;
use crate::etcd::api::EtcdClient;
use crate::fake::PATIENCE;
use crate::http::{self, CALL_WITHIN};
use crate::{Access, Candidate, Following, Registration, Source, Tls};

pub(super) struct EtcdServer {
    child: Option<Child>,
    ports: [u16; 2],
    folder: TempDir,
    /// Of the data, so that it can begin with none.
    life: u32,
    /// Signs the server's certificate and those that it wants to see.
    authority: Option<Authority>,
    /// For whom speaks to it here.
    tls: Tls,
}

impl EtcdServer {
    /// In plain text.
    pub(super) async fn start() -> Self {
        Self::start_with(false).await
    }

    /// With TLS, for clients that have a certificate.
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
        let mut server = Self { child: None, ports: ports(), folder, life: 0, authority, tls };
        // Somebody else may take a port before etcd does.
        while !server.begin().await {
            server.ports = ports();
            server.life += 1;
            assert!(server.life < 5, "etcd does not start: {}", server.log());
        }
        server
    }

    async fn begin(&mut self) -> bool {
        let program = std::env::var_os("CHIASM_TEST_ETCD")
            .expect("CHIASM_TEST_ETCD has to name the etcd to test with");
        let peer = format!("http://127.0.0.1:{}", self.ports[1]);
        let client = format!(
            "{}://127.0.0.1:{}",
            if self.authority.is_some() { "https" } else { "http" },
            self.ports[0]
        );
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        let mut command = Command::new(program);
        command.arg("--data-dir").arg(self.folder.path().join(self.life.to_string()));
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
        let http = http::client(&self.tls).unwrap();
        let since = Instant::now();
        while since.elapsed() < PATIENCE {
            let asked = http.get(format!("{client}/health")).timeout(Duration::from_secs(1)).send();
            if let Ok(answer) = asked.await
                && answer.status().is_success()
            {
                return true;
            }
            if self.child.as_mut().unwrap().try_wait().unwrap().is_some() {
                return false;
            }
            sleep(Duration::from_millis(20)).await;
        }
        panic!("etcd does not get healthy: {}", self.log());
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

    /// Starts it again on the same ports, with its data.
    pub(super) async fn restart(&mut self) {
        self.kill();
        assert!(self.begin().await, "etcd does not start again: {}", self.log());
    }

    /// Starts it again on the same ports, with nothing.
    pub(super) async fn restart_empty(&mut self) {
        self.kill();
        self.life += 1;
        self.restart().await;
    }

    /// Stops or continues the process, which keeps its connections.
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
        EtcdClient::new(&self.etcd(), 0, &self.tls, CALL_WITHIN).await.unwrap()
    }

    pub(super) fn follow(&self) -> Following {
        Source::Etcd(self.etcd())
            .follow(&Access { etcd: self.tls.clone(), ..Access::default() })
            .unwrap()
    }

    /// Registers an agent with the shortest lease that etcd grants.
    pub(super) fn register(&self, address: &str) -> Registration {
        let agent = Candidate::new(address, Some("tiny".to_owned())).unwrap();
        Registration::start(self.etcd(), self.tls.clone(), &agent, TTL).unwrap()
    }
}

pub(super) const TTL: Duration = Duration::from_secs(2);

/// Waits until an agent is registered, or is not.
pub(super) async fn until_registered(registration: &Registration, is: bool) {
    let mut registered = registration.is_registered();
    let found = timeout(PATIENCE, registered.wait_for(|&now| now == is)).await;
    assert!(found.is_ok_and(|found| found.is_ok()), "it never was registered: {is}");
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}
