//! Other machines, simulated by network namespaces, and links to them that can drop packets.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::support::chiasm;

/// The first of the 2^17 addresses reserved for benchmarks (RFC 2544), which no real machine has.
const FIRST_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// The number of networks in that range: four addresses, one network per link.
const NETWORKS: u32 = 1 << 15;
/// The number of networks per process. Processes with nearby ids use different networks.
const NETWORKS_PER_PROCESS: u32 = 8;
/// A MAC address that no interface has. Packets to it are dropped silently at the receiving end.
const UNUSED_MAC: &str = "02:00:00:00:00:01";

/// A network namespace, removed on drop. Drop the processes in it and the links to it first.
pub(crate) struct Machine {
    name: String,
}

impl Machine {
    /// Creates a machine without links.
    ///
    /// # Errors
    /// If the namespace can't be created: this needs root, and `ip` of iproute2.
    pub(crate) fn new() -> Result<Self, String> {
        let name = format!("chiasm-test-{}-{}", std::process::id(), next_number());
        let machine = Self { name };
        ip(&["netns", "add", &machine.name])?;
        ip(&["-n", &machine.name, "link", "set", "lo", "up"])?;
        Ok(machine)
    }

    /// Returns a command that runs the binary under test on this machine. `ip` replaces itself with
    /// the binary, so the process id is the binary's.
    pub(crate) fn chiasm(&self) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(chiasm(&[]).get_program());
        command
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Fails if the namespace was never created.
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

/// A link between this machine and another one, removed on drop.
pub(crate) struct Link {
    machine: String,
    here: End,
    there: End,
}

struct End {
    device: String,
    address: Ipv4Addr,
}

/// The direction in which a link drops packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the other machine to this one.
    Inbound,
    /// From this machine to the other one.
    Outbound,
}

impl Link {
    /// Creates a link to `machine`.
    ///
    /// # Errors
    /// If an `ip` command fails.
    pub(crate) fn create(machine: &Machine) -> Result<Self, String> {
        let number = next_number();
        let network =
            (std::process::id() * NETWORKS_PER_PROCESS + number % NETWORKS_PER_PROCESS) % NETWORKS;
        let end = |side: char, host: u32| End {
            // Device names have at most 15 characters.
            device: format!("{side}{}-{number}", std::process::id()),
            address: Ipv4Addr::from_bits(FIRST_ADDRESS.to_bits() + network * 4 + host),
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

    /// Returns the address at which this machine reaches the other one.
    pub(crate) fn address(&self) -> Ipv4Addr {
        self.there.address
    }

    /// Drops all packets in one direction from now on. Neither machine gets an error: the sender
    /// sends to a MAC address that nobody has.
    pub(crate) fn drop_packets(&self, direction: Direction) {
        self.ip_neighbour(direction, "replace", &["lladdr", UNUSED_MAC, "nud", "permanent"]);
    }

    /// Delivers packets in that direction again.
    pub(crate) fn restore(&self, direction: Direction) {
        self.ip_neighbour(direction, "delete", &[]);
    }

    /// Changes the sender's neighbour entry for the receiver.
    fn ip_neighbour(&self, direction: Direction, change: &str, entry: &[&str]) {
        let Self { machine, here, there } = self;
        let (namespace, sender, receiver) = match direction {
            Direction::Outbound => (&[][..], here, there),
            Direction::Inbound => (&["-n", &**machine][..], there, here),
        };
        let receiver = receiver.address.to_string();
        let device = &*sender.device;
        let command = ["neighbour", change, &receiver, "dev", device];
        ip(&[namespace, &command, entry].concat()).expect("the neighbour entry is changed");
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Fails if the link was never created.
        let _ = ip(&["link", "delete", &self.here.device]);
    }
}

/// Returns a number that no other namespace or link of this process has.
fn next_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Relaxed)
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let command = format!("ip {}", arguments.join(" "));
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .map_err(|error| format!("{command}: {error}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{command}: {}", stderr.trim_end())) }
}
