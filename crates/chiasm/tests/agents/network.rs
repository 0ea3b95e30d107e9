//! Other machines: network namespaces, and links into them that lose packets.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::support::chiasm;

/// The first address for benchmarks (RFC 2544). 2^17 of them are no machine's.
const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// Networks of four addresses, one for each link.
const NETWORKS: u32 = 1 << 15;
/// Networks of one process. Processes whose ids are not far apart have different ones.
const NETWORKS_OF_PROCESS: u32 = 8;
/// An interface that no link has: what is sent to it is dropped where it arrives, and nobody is
/// told.
const NOBODY: &str = "02:00:00:00:00:01";

/// A network namespace, which is removed with this value. Drop the processes in it and the links
/// into it first.
pub(crate) struct Machine {
    name: String,
}

impl Machine {
    /// A machine without a link.
    ///
    /// # Errors
    /// Why there can't be one: it takes root, and `ip` of iproute2.
    pub(crate) fn new() -> Result<Self, String> {
        let machine = Self { name: format!("chiasm-test-{}-{}", std::process::id(), number()) };
        ip(&["netns", "add", &machine.name])?;
        ip(&["-n", &machine.name, "link", "set", "lo", "up"])?;
        Ok(machine)
    }

    /// The binary under test, as a process of this machine. `ip` becomes it.
    pub(crate) fn chiasm(&self) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(chiasm(&[]).get_program());
        command
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // There is none if it could not be made.
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

/// A link between this machine and another one, which is removed with this value.
pub(crate) struct Link {
    machine: String,
    here: End,
    there: End,
}

struct End {
    device: String,
    address: Ipv4Addr,
}

/// Where packets go that a link loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Towards {
    /// This machine loses what comes from the other one.
    Here,
    /// The other machine loses what comes from this one.
    There,
}

impl Link {
    /// # Errors
    /// Why there can't be one.
    pub(crate) fn to(machine: &Machine) -> Result<Self, String> {
        let number = number();
        let network =
            (std::process::id() * NETWORKS_OF_PROCESS + number % NETWORKS_OF_PROCESS) % NETWORKS;
        let end = |side: char, host: u32| End {
            // At most 15 letters.
            device: format!("{side}{}-{number}", std::process::id()),
            address: Ipv4Addr::from_bits(FIRST.to_bits() + network * 4 + host),
        };
        let link = Self { machine: machine.name.clone(), here: end('h', 1), there: end('t', 2) };
        let Self { machine, here, there } = &link;
        ip(&[
            "link",
            "add",
            &here.device,
            "type",
            "veth",
            "peer",
            "name",
            &there.device,
            "netns",
            machine,
        ])?;
        ip(&["address", "add", &format!("{}/30", here.address), "dev", &here.device])?;
        ip(&[
            "-n",
            machine,
            "address",
            "add",
            &format!("{}/30", there.address),
            "dev",
            &there.device,
        ])?;
        ip(&["link", "set", &here.device, "up"])?;
        ip(&["-n", machine, "link", "set", &there.device, "up"])?;
        Ok(link)
    }

    /// The address at which this machine reaches the other one.
    pub(crate) fn address(&self) -> Ipv4Addr {
        self.there.address
    }

    /// Loses every packet that goes there from now on. Neither machine is told: each sends to an
    /// interface that is none.
    pub(crate) fn lose(&self, towards: Towards) {
        self.ip_neighbour(towards, "replace", &["lladdr", NOBODY, "nud", "permanent"]);
    }

    /// Loses no packet that goes there any more.
    pub(crate) fn carry(&self, towards: Towards) {
        self.ip_neighbour(towards, "delete", &[]);
    }

    /// Changes what the sender of packets knows of their receiver.
    fn ip_neighbour(&self, towards: Towards, change: &str, to: &[&str]) {
        let Self { machine, here, there } = self;
        let (at, sender, receiver) = match towards {
            Towards::There => (&[][..], here, there),
            Towards::Here => (&["-n", &**machine][..], there, here),
        };
        let (receiver, device) = (receiver.address.to_string(), &*sender.device);
        let changed = ip(&[at, &["neighbour", change, &receiver, "dev", device], to].concat());
        changed.expect("what a link does can be changed");
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // There is none if it could not be made.
        let _ = ip(&["link", "delete", &self.here.device]);
    }
}

/// Tells what one test makes from what another one does.
fn number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Relaxed)
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let what = format!("ip {}", arguments.join(" "));
    let output =
        Command::new("ip").args(arguments).output().map_err(|error| format!("{what}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{what}: {}", said.trim_end())) }
}
