//! Upstreams, and the routers in front of them.

use std::cell::RefCell;
use std::error::Error;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use peers::USAGE;
use peers::flags::Flags;

use crate::client::get;
use crate::ours;
use crate::program::{Program, free_address};
use crate::routers::server::Stats;
use crate::side::{Counts, Inputs, Side, Versioned, command};
use crate::workload::Workload;

/// The time in which a router that answers must have found all its upstreams.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);
/// The default policy of SMG.
pub(crate) const SMG_DEFAULT: &str = "cache_aware";

/// Other projects' routers.
pub(crate) struct Programs {
    /// A Python with SMG.
    smg: Versioned,
    envoy: Versioned,
    nginx: Versioned,
}

impl Programs {
    /// Parses flags whose values are `PROGRAM,VERSION`.
    pub(crate) fn from_flags(flags: &Flags) -> Result<Self, Box<dyn Error>> {
        let versioned = |flag: &str| -> Result<Versioned, Box<dyn Error>> {
            let (program, version) = flags.get(flag)?.rsplit_once(',').ok_or(USAGE)?;
            Ok((PathBuf::from(program), version.to_owned()))
        };
        let [smg, envoy, nginx] = ["--smg", "--envoy", "--nginx"].map(versioned);
        Ok(Self { smg: smg?, envoy: envoy?, nginx: nginx? })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Router {
    /// Chiasm with `http://`: requests are passed on unchanged.
    Passing,
    /// Chiasm with `vllm+http://`: requests are passed on as tokens.
    Tokens,
    /// SMG with a policy.
    Smg(&'static str),
    /// SMG with its default policy, without log lines for successful requests.
    QuietSmg,
    Envoy,
    Nginx,
}

/// The capacity of an upstream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacity {
    /// The number of blocks of the cache.
    pub(crate) blocks: usize,
    /// The prompt tokens per second; `None` if prompts take no time.
    pub(crate) prefill_rate: Option<f64>,
}

pub(crate) struct Upstreams {
    programs: Vec<Program>,
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Upstreams {
    /// Starts `count` upstreams and waits until they listen.
    pub(crate) fn start(
        inputs: &Inputs,
        name: &str,
        count: usize,
        capacity: Capacity,
    ) -> Result<Self, Box<dyn Error>> {
        let mut upstreams = Self { programs: Vec::new(), addresses: Vec::new() };
        for number in 0..count {
            let listen = free_address()?;
            let mut upstream = command(&std::env::current_exe()?);
            upstream.args(["upstream", "--blocks", &capacity.blocks.to_string()]);
            upstream.args(["--listen", &listen.to_string()]);
            upstream.args(["--events", &free_address()?.to_string()]);
            upstream.args(["--replay", &free_address()?.to_string()]);
            if let Some(rate) = capacity.prefill_rate {
                upstream.args(["--prefill-rate", &rate.to_string()]);
            }
            let name = format!("{name}, upstream {number}");
            let mut program = Program::start(&name, &mut upstream, &inputs.scratch)?;
            program.wait_for_listener(listen)?;
            upstreams.programs.push(program);
            upstreams.addresses.push(listen);
        }
        Ok(upstreams)
    }
}

/// Returns the counts of each upstream.
pub(crate) async fn stats(addresses: &[SocketAddr]) -> Result<Vec<Stats>, Box<dyn Error>> {
    let mut stats = Vec::new();
    for address in addresses {
        stats.push(serde_json::from_str(&get(*address, "/stats").await?.text)?);
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

    /// Starts the router. The upstreams end with it.
    pub(crate) fn start(
        self,
        inputs: &Inputs,
        programs: &Programs,
        upstreams: Upstreams,
    ) -> Result<Side, Box<dyn Error>> {
        let name = self.name(programs);
        let address = free_address()?;
        let mut command = self.command(inputs, programs, address, &upstreams.addresses)?;
        let router = Program::start(&format!("{name}, router"), &mut command, &inputs.scratch)?;
        Ok(Side {
            // Routers pass on the upstream's count, unless they tokenize.
            counts: if self == Self::Tokens { Counts::Nothing } else { Counts::All },
            has_workers: self == Self::Nginx,
            engines: upstreams.programs,
            reports_engines: matches!(self, Self::Passing | Self::Tokens),
            ..Side::new(&name, address, String::new(), router)
        })
    }

    /// Waits until the router answers, and knows all its upstreams if it reports them.
    pub(crate) async fn wait(
        self,
        side: &mut Side,
        workload: &RefCell<Workload>,
    ) -> Result<(), Box<dyn Error>> {
        side.wait(workload).await?;
        // The text that /workers has once per known upstream. With tokens, Chiasm also has to know
        // the upstream's cache exactly, by its events.
        let known = match self {
            Self::Tokens => r#""knowledge":"exact""#,
            Self::Smg(_) | Self::QuietSmg => r#""is_healthy":true"#,
            Self::Passing | Self::Envoy | Self::Nginx => return Ok(()),
        };
        let start = Instant::now();
        while get(side.address, "/workers").await?.text.matches(known).count() < side.engines.len()
        {
            if start.elapsed() > DISCOVERY_TIMEOUT {
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
        match self {
            Self::Passing | Self::Tokens => {
                let scheme = if self == Self::Tokens { "vllm+http" } else { "http" };
                let mut chiasm = ours::frontend(inputs, &inputs.chiasm, address);
                for upstream in upstreams {
                    chiasm.args(["--upstream", &format!("{scheme}://{upstream}")]);
                }
                Ok(chiasm)
            }
            Self::Smg(policy) => smg(&programs.smg.0, policy, address, upstreams),
            Self::QuietSmg => {
                let mut smg = smg(&programs.smg.0, SMG_DEFAULT, address, upstreams)?;
                smg.args(["--log-level", "warn"]);
                Ok(smg)
            }
            Self::Envoy => {
                let config = config_folder(inputs, address)?.join("envoy.json");
                fs::write(&config, envoy_config(address, upstreams))?;
                let mut envoy = command(&programs.envoy.0);
                // Without `--concurrency` it has one thread per core.
                envoy.arg("--config-path").arg(config).arg("--use-dynamic-base-id");
                Ok(envoy)
            }
            Self::Nginx => {
                let folder = config_folder(inputs, address)?;
                let config = folder.join("nginx.conf");
                fs::write(&config, nginx_config(address, upstreams))?;
                let mut nginx = command(&programs.nginx.0);
                nginx.arg("-p").arg(&folder).arg("-c").arg(config).args(["-e", "error.log"]);
                Ok(nginx)
            }
        }
    }
}

fn smg(
    python: &Path,
    policy: &str,
    address: SocketAddr,
    upstreams: &[SocketAddr],
) -> Result<Command, Box<dyn Error>> {
    let mut smg = command(python);
    smg.args(["-B", "-m", "smg", "launch", "--host", "127.0.0.1"]);
    smg.args(["--port", &address.port().to_string()]);
    smg.args(["--policy", policy, "--backend", "vllm", "--worker-urls"]);
    smg.args(upstreams.iter().map(|upstream| format!("http://{upstream}")));
    // By default all processes have the same port for metrics, and missing workers are checked
    // every half minute.
    let metrics = free_address()?.port().to_string();
    smg.args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics]);
    smg.args(["--worker-startup-check-interval", "1"]);
    Ok(smg)
}

/// Creates a folder for a router's configuration and files.
fn config_folder(inputs: &Inputs, address: SocketAddr) -> Result<PathBuf, Box<dyn Error>> {
    let folder = inputs.scratch.join(format!("router-{}", address.port()));
    fs::create_dir(&folder)?;
    Ok(folder)
}

// The configurations keep connections open on both sides and have defaults otherwise.

fn envoy_config(address: SocketAddr, upstreams: &[SocketAddr]) -> String {
    let endpoints = upstreams.iter().map(|upstream| {
        let [host, port] = [upstream.ip().to_string(), upstream.port().to_string()];
        let socket = format!(r#"{{"address":"{host}","port_value":{port}}}"#);
        format!(r#"{{"endpoint":{{"address":{{"socket_address":{socket}}}}}}}"#)
    });
    include_str!("../../../../routers/envoy.json")
        .replace("{{host}}", &address.ip().to_string())
        .replace("{{port}}", &address.port().to_string())
        .replace("{{endpoints}}", &endpoints.collect::<Vec<_>>().join(","))
}

fn nginx_config(address: SocketAddr, upstreams: &[SocketAddr]) -> String {
    let servers: String =
        upstreams.iter().map(|upstream| format!("        server {upstream};\n")).collect();
    let config = include_str!("../../../../routers/nginx.conf");
    config.replace("{{servers}}", &servers).replace("{{address}}", &address.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn configurations_have_all_upstreams() {
        let addresses = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let nginx = nginx_config(addresses[0], &addresses[1..]);
        assert!(nginx.contains("listen 127.0.0.1:1;"), "{nginx}");
        let servers = "        server 127.0.0.1:2;\n        server 127.0.0.1:3;\n        #";
        assert!(nginx.contains(servers), "{nginx}");
        let envoy = envoy_config(addresses[0], &addresses[1..]);
        let envoy: Value = serde_json::from_str(&envoy).unwrap();
        let cluster = &envoy["static_resources"]["clusters"][0]["load_assignment"];
        let endpoints = cluster["endpoints"][0]["lb_endpoints"].as_array().unwrap();
        let port = |it: &Value| it["endpoint"]["address"]["socket_address"]["port_value"].as_u64();
        assert_eq!(endpoints.iter().map(port).collect::<Vec<_>>(), [Some(2), Some(3)]);
    }
}
