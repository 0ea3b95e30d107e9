//! The machine of an agent: this one, or what stands for another, a network namespace behind a link
//! of 10 Gbit/s.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Command;

use crate::side::command;

/// The name of what lies before a machine that is none.
pub(crate) const LOOPBACK: &str = "loopback";
/// The name of the link that has the rate of a network.
pub(crate) const SHAPED: &str = "shaped link";
const RATE: &str = "10gbit";
/// Bytes that pass before the rate holds: two of the largest pieces that the kernel hands over at
/// once.
const BURST: &str = "128kb";
/// Longest that a packet waits for its turn; what would wait longer is dropped.
const QUEUE: &str = "20ms";
/// Addresses for benchmarks (RFC 2544): of this end of the link, and of the other.
const NEAR: Ipv4Addr = Ipv4Addr::new(198, 18, 89, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 89, 2);

pub(crate) struct Machine {
    /// The name of the way to it: [`LOOPBACK`] or [`SHAPED`].
    pub(crate) link: &'static str,
    /// Where its programs listen.
    pub(crate) host: IpAddr,
    namespace: Option<Namespace>,
}

impl Machine {
    /// This one, by its loopback.
    pub(crate) fn here() -> Self {
        Self { link: LOOPBACK, host: Ipv4Addr::LOCALHOST.into(), namespace: None }
    }

    /// One behind a link. None without root, or without `ip` and `tc` of iproute2: then nothing is
    /// measured there.
    pub(crate) fn behind_a_link() -> Result<Option<Self>, Box<dyn Error>> {
        let are_there = ["ip", "tc"].map(|tool| Command::new(tool).arg("-V").output().is_ok());
        if !rustix::process::geteuid().is_root() || are_there != [true; 2] {
            eprintln!("no {SHAPED}: it needs root, and ip and tc of iproute2");
            return Ok(None);
        }
        let name = format!("chiasm-bench-{}", std::process::id());
        let namespace = Namespace::new(&name)?;
        // Interfaces have names of 15 letters at most.
        let [near, far] = ["near", "far"].map(|end| format!("{end}{}", std::process::id()));
        let shape = ["root", "tbf", "rate", RATE, "burst", BURST, "latency", QUEUE];
        let addresses = [NEAR, FAR].map(|address| format!("{address}/30"));
        tool("ip", &["link", "add", &near, "type", "veth", "peer", "name", &far, "netns", &name])?;
        tool("ip", &["address", "add", &addresses[0], "dev", &near])?;
        tool("ip", &["-n", &name, "address", "add", &addresses[1], "dev", &far])?;
        tool("tc", &[&["qdisc", "add", "dev", &*near][..], &shape].concat())?;
        tool("tc", &[&["-n", &name, "qdisc", "add", "dev", &*far][..], &shape].concat())?;
        tool("ip", &["link", "set", &near, "up"])?;
        tool("ip", &["-n", &name, "link", "set", &far, "up"])?;
        tool("ip", &["-n", &name, "link", "set", "lo", "up"])?;
        Ok(Some(Self { link: SHAPED, host: FAR.into(), namespace: Some(namespace) }))
    }

    /// A program of ours that will run there, as the process that is started: `ip` becomes it.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let Some(Namespace(name)) = &self.namespace else { return command(program) };
        let mut ip = command(Path::new("ip"));
        ip.args(["netns", "exec", name]).arg(program);
        ip
    }
}

/// A network namespace, which is removed with this value, and with it the link into it.
struct Namespace(String);

impl Namespace {
    fn new(name: &str) -> Result<Self, Box<dyn Error>> {
        tool("ip", &["netns", "add", name])?;
        Ok(Self(name.to_owned()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = tool("ip", &["netns", "delete", &self.0]) {
            eprintln!("{error}");
        }
    }
}

fn tool(program: &str, arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let output = Command::new(program).args(arguments).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {} failed: {}", arguments.join(" "), said.trim_end()).into())
}
