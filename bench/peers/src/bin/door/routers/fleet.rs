//! Some upstreams, and a router before them.

use std::cell::RefCell;
use std::error::Error;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use peers::programs::free_address;

use crate::client::Connection;
use crate::ours;
use crate::program::Program;
use crate::routers::proxies;
use crate::routers::server::Stats;
use crate::side::{Counts, Inputs, Side, command};
use crate::workload::Workload;

/// How long a router may take to know all its upstreams, once it has answered a request.
const ALL_KNOWN: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);
/// The policy that SMG has where none is named.
pub(crate) const SMG_DEFAULT: &str = "cache_aware";

/// Other projects' routers: a program and its version.
pub(crate) struct Programs {
    /// A Python that has SMG.
    pub(crate) smg: (PathBuf, String),
    pub(crate) envoy: (PathBuf, String),
    pub(crate) nginx: (PathBuf, String),
    /// A Python that has Dynamo.
    pub(crate) dynamo: (PathBuf, String),
}

/// What stands before upstreams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Router {
    /// Chiasm, by `http://`: requests go on as they came.
    Passing,
    /// Chiasm, by `vllm+http://`: as tokens.
    Tokens,
    /// SMG with this policy.
    Smg(&'static str),
    /// SMG with its default policy, which says nothing of requests that go well.
    QuietSmg,
    Envoy,
    Nginx,
}

/// How an upstream is started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// Blocks that its cache holds.
    pub(crate) blocks: usize,
    /// Tokens that it computes per second; none if it waits for nothing.
    pub(crate) rate: Option<f64>,
}

/// Servers of models that somebody else runs.
pub(crate) struct Upstreams {
    programs: Vec<Program>,
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Upstreams {
    /// Starts so many and waits until they listen.
    pub(crate) fn start(inputs: &Inputs, name: &str, count: usize, held: Held) -> Result<Self, Box<dyn Error>> {
        let mut upstreams = Self { programs: Vec::new(), addresses: Vec::new() };
        for number in 0..count {
            let [listen, events, replay] = [free_address()?, free_address()?, free_address()?];
            let mut upstream = command(&std::env::current_exe()?);
            upstream.args(["upstream", "--blocks", &held.blocks.to_string()]);
            for (flag, address) in [("--listen", listen), ("--events", events), ("--replay", replay)] {
                upstream.args([flag, &address.to_string()]);
            }
            upstream.args(held.rate.map(|rate| ["--prefill-rate".to_owned(), rate.to_string()]).into_iter().flatten());
            let name = format!("{name}, upstream {number}");
            let mut program = Program::start(&name, &mut upstream, &inputs.scratch)?;
            program.listens(listen)?;
            upstreams.programs.push(program);
            upstreams.addresses.push(listen);
        }
        Ok(upstreams)
    }
}

/// What each of these has counted.
pub(crate) async fn stats(addresses: &[SocketAddr]) -> Result<Vec<Stats>, Box<dyn Error>> {
    let mut stats = Vec::new();
    for address in addresses {
        stats.push(serde_json::from_str(&Connection::open(*address).await?.get("/stats").await?.1)?);
    }
    Ok(stats)
}

impl Router {
    pub(crate) const ALL: [Self; 7] = [
        Self::Passing,
        Self::Tokens,
        Self::Smg(SMG_DEFAULT),
        Self::Smg("round_robin"),
        Self::QuietSmg,
        Self::Envoy,
        Self::Nginx,
    ];

    pub(crate) fn name(self, programs: &Programs) -> String {
        match self {
            Self::Passing => "chiasm, http".to_owned(),
            Self::Tokens => "chiasm, vllm+http".to_owned(),
            Self::Smg(policy) => format!("SMG {policy} {}", programs.smg.1),
            Self::QuietSmg => format!("SMG quiet {}", programs.smg.1),
            Self::Envoy => format!("Envoy {}", programs.envoy.1),
            Self::Nginx => format!("nginx {}", programs.nginx.1),
        }
    }

    /// Starts it before these upstreams, which end with it.
    pub(crate) fn start(
        self,
        inputs: &Inputs,
        programs: &Programs,
        upstreams: Upstreams,
    ) -> Result<Side, Box<dyn Error>> {
        let (name, address) = (self.name(programs), free_address()?);
        let mut frontend = self.command(inputs, programs, address, &upstreams.addresses)?;
        let frontend = Program::start(&format!("{name}, router"), &mut frontend, &inputs.scratch)?;
        Ok(Side {
            // It passes on what the upstream has counted, but where it makes tokens itself.
            counts: if self == Self::Tokens { Counts::Nothing } else { Counts::All },
            has_workers: self == Self::Nginx,
            engines: upstreams.programs,
            tells_engines: matches!(self, Self::Passing | Self::Tokens),
            ..Side::new(&name, address, String::new(), frontend)
        })
    }

    /// Waits until it answers and knows as many upstreams as it has, where it tells.
    pub(crate) async fn wait(self, side: &mut Side, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
        side.wait(workload).await?;
        // What Chiasm and SMG say of an upstream that they use; in token mode Chiasm has to know
        // what it holds by its events.
        let known = match self {
            Self::Tokens => r#""knowledge":"exact""#,
            Self::Smg(_) | Self::QuietSmg => r#""is_healthy":true"#,
            Self::Passing | Self::Envoy | Self::Nginx => return Ok(()),
        };
        let start = Instant::now();
        while known_times(side, known).await? < side.engines.len() {
            if start.elapsed() > ALL_KNOWN {
                return Err(side.frontend.failed("does not know all its upstreams"));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    fn command(
        self,
        inputs: &Inputs,
        programs: &Programs,
        address: SocketAddr,
        upstreams: &[SocketAddr],
    ) -> Result<Command, Box<dyn Error>> {
        Ok(match self {
            Self::Passing | Self::Tokens => {
                let scheme = if self == Self::Tokens { "vllm+http" } else { "http" };
                let mut frontend = ours::frontend(inputs, &inputs.chiasm, address);
                frontend.args(upstreams.iter().flat_map(|at| ["--upstream".to_owned(), format!("{scheme}://{at}")]));
                frontend
            }
            Self::Smg(policy) => smg(&programs.smg.0, policy, address, upstreams)?,
            Self::QuietSmg => {
                let mut smg = smg(&programs.smg.0, SMG_DEFAULT, address, upstreams)?;
                smg.args(["--log-level", "warn"]);
                smg
            }
            Self::Envoy => {
                let mut envoy = command(&programs.envoy.0);
                let config = folder(inputs, address)?.join("envoy.json");
                fs::write(&config, proxies::envoy(address, upstreams))?;
                // As many threads as there are cores is its default.
                envoy.arg("--config-path").arg(config).arg("--use-dynamic-base-id");
                envoy
            }
            Self::Nginx => {
                let mut nginx = command(&programs.nginx.0);
                let folder = folder(inputs, address)?;
                let config = folder.join("nginx.conf");
                fs::write(&config, proxies::nginx(address, upstreams))?;
                nginx.arg("-p").arg(&folder).arg("-c").arg(config).args(["-e", "error.log"]);
                nginx
            }
        })
    }
}

/// How often a router says this of its upstreams.
async fn known_times(side: &Side, known: &str) -> Result<usize, Box<dyn Error>> {
    let (_, workers) = Connection::open(side.address).await?.get("/workers").await?;
    Ok(workers.matches(known).count())
}

fn smg(python: &Path, policy: &str, address: SocketAddr, upstreams: &[SocketAddr]) -> Result<Command, Box<dyn Error>> {
    let mut smg = command(python);
    smg.args(["-B", "-m", "smg", "launch", "--host", "127.0.0.1", "--port", &address.port().to_string()]);
    smg.args(["--policy", policy, "--backend", "vllm", "--worker-urls"]);
    smg.args(upstreams.iter().map(|upstream| format!("http://{upstream}")));
    // Its default is one port for all that run at once. It looks at workers that are not there yet
    // every half minute.
    let metrics = free_address()?.port().to_string();
    smg.args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics, "--worker-startup-check-interval", "1"]);
    Ok(smg)
}

/// A folder for what a router is configured with, and for what it writes.
fn folder(inputs: &Inputs, address: SocketAddr) -> Result<PathBuf, Box<dyn Error>> {
    let folder = inputs.scratch.join(format!("router-{}", address.port()));
    fs::create_dir(&folder)?;
    Ok(folder)
}
