//! The machine of an agent: this one, or a network namespace behind a link of 10 Gbit/s in place of
//! another machine.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Command;

use crate::side::command;

const SHAPED: &str = "shaped link";
const RATE: &str = "10gbit";
/// The burst of the link: two of the largest pieces that the kernel hands over.
const BURST: &str = "128kb";
/// The maximum time of a packet in the queue. Packets that would wait longer are dropped.
const QUEUE: &str = "20ms";
/// The addresses of both ends of the link, from those for benchmarks (RFC 2544).
const NEAR: Ipv4Addr = Ipv4Addr::new(198, 18, 89, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 89, 2);

pub(crate) struct Machine {
    /// The name of the link.
    pub(crate) link: &'static str,
    /// The address of its programs.
    pub(crate) host: IpAddr,
    namespace: Option<Namespace>,
}

impl Machine {
    /// Returns this machine, reached over loopback.
    pub(crate) fn this() -> Self {
        Self { link: "loopback", host: Ipv4Addr::LOCALHOST.into(), namespace: None }
    }

    /// Creates a machine behind a link; `None` without root, or without `ip` and `tc` of iproute2.
    pub(crate) fn behind_link() -> Result<Option<Self>, Box<dyn Error>> {
        let has_tool = |tool: &str| Command::new(tool).arg("-V").output().is_ok();
        if !rustix::process::geteuid().is_root() || !has_tool("ip") || !has_tool("tc") {
            eprintln!("no {SHAPED}: it needs root, and ip and tc of iproute2");
            return Ok(None);
        }
        let id = std::process::id();
        let name = format!("chiasm-bench-{id}");
        let namespace = Namespace::new(&name)?;
        // Names of interfaces have 15 letters at most.
        let [near, far] = ["near", "far"].map(|end| format!("{end}{id}"));
        let shape = format!("root tbf rate {RATE} burst {BURST} latency {QUEUE}");
        run(&format!("ip link add {near} type veth peer name {far} netns {name}"))?;
        run(&format!("ip address add {NEAR}/30 dev {near}"))?;
        run(&format!("ip -n {name} address add {FAR}/30 dev {far}"))?;
        run(&format!("tc qdisc add dev {near} {shape}"))?;
        run(&format!("tc -n {name} qdisc add dev {far} {shape}"))?;
        run(&format!("ip link set {near} up"))?;
        run(&format!("ip -n {name} link set {far} up"))?;
        run(&format!("ip -n {name} link set lo up"))?;
        Ok(Some(Self { link: SHAPED, host: FAR.into(), namespace: Some(namespace) }))
    }

    /// Returns a command that runs a program on this machine. `ip` becomes the program's process.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let Some(Namespace(name)) = &self.namespace else { return command(program) };
        let mut ip = command(Path::new("ip"));
        ip.args(["netns", "exec", name]).arg(program);
        ip
    }
}

/// A network namespace. It is removed with this value, and so is the link into it.
struct Namespace(String);

impl Namespace {
    fn new(name: &str) -> Result<Self, Box<dyn Error>> {
        run(&format!("ip netns add {name}"))?;
        Ok(Self(name.to_owned()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = run(&format!("ip netns delete {}", self.0)) {
            eprintln!("{error}");
        }
    }
}

/// Runs a program with its arguments, which contain no spaces.
fn run(line: &str) -> Result<(), Box<dyn Error>> {
    let mut words = line.split(' ');
    let output = Command::new(words.next().unwrap_or_default()).args(words).output()?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{line} failed: {}", stderr.trim_end()).into());
    }
    Ok(())
}
