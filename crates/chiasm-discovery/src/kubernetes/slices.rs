//! The slices of a service, and which agents they name together.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use super::Port;
use super::message::{EndpointPort, EndpointSlice};
use crate::skipped::Skipped;
use crate::{MOST_ADDRESSES, address};

/// The longest name of an object of Kubernetes, and the longest uid, of which theirs have 36 bytes.
const LONGEST_NAME: usize = 253;
/// The most slices and agents that are kept, together: pods of two families of addresses are in two
/// slices.
const MOST_WEIGHT: usize = 2 * MOST_ADDRESSES;
/// So much weight has to be free before agents that were left out are listed again: a list for each
/// that goes would be too many.
const ROOM_AGAIN: usize = MOST_ADDRESSES / 10;

/// The slices that are there, as far as this process was told.
#[derive(Debug, Default)]
pub(super) struct Slices {
    by_name: BTreeMap<String, Vec<Agent>>,
    /// The slices and their agents, so that neither can grow without bound.
    weight: usize,
    /// Whether there was no room for all.
    has_left_out: bool,
    /// Whether it was said that there are too many.
    is_told: bool,
    skipped: Skipped,
}

/// An endpoint that is named.
#[derive(Debug)]
struct Agent {
    /// Of its pod. A pod of two families of addresses is in a slice of each.
    uid: Option<String>,
    is_v4: bool,
    address: String,
}

impl Slices {
    pub(super) fn clear(&mut self) {
        self.by_name.clear();
        self.weight = 0;
        self.has_left_out = false;
    }

    /// A slice is there, or changed.
    pub(super) fn put(&mut self, name: &str, slice: EndpointSlice, wanted: Option<&Port>) {
        self.remove(name);
        if name.len() > LONGEST_NAME {
            self.skip(name, "the name of the slice is too long");
            return;
        }
        let mut agents = agents_of(name, slice, wanted, &mut self.skipped);
        let room = MOST_WEIGHT.saturating_sub(self.weight);
        if agents.len() + 1 > room {
            self.has_left_out = true;
            self.tell();
            if room == 0 {
                return;
            }
            agents.truncate(room - 1);
        }
        self.weight += agents.len() + 1;
        self.by_name.insert(name.to_owned(), agents);
    }

    /// A slice is gone.
    pub(super) fn remove(&mut self, name: &str) {
        if let Some(agents) = self.by_name.remove(name) {
            self.weight -= agents.len() + 1;
        }
    }

    /// One address for each pod: IPv4 where it has both.
    pub(super) fn addresses(&mut self) -> BTreeSet<String> {
        let agents = || self.by_name.values().flatten();
        let have_v4: BTreeSet<&str> =
            agents().filter(|agent| agent.is_v4).filter_map(|agent| agent.uid.as_deref()).collect();
        let is_other = |agent: &&Agent| {
            !agent.is_v4 && agent.uid.as_deref().is_some_and(|uid| have_v4.contains(uid))
        };
        let mut addresses: BTreeSet<String> =
            agents().filter(|agent| !is_other(agent)).map(|agent| agent.address.clone()).collect();
        if addresses.len() > MOST_ADDRESSES {
            self.tell();
            while addresses.len() > MOST_ADDRESSES {
                addresses.pop_last();
            }
        }
        addresses
    }

    /// Whether agents were left out for lack of room, and there is room again: only a new list
    /// names them.
    pub(super) fn has_room_again(&self) -> bool {
        self.has_left_out && self.weight + ROOM_AGAIN <= MOST_WEIGHT
    }

    /// Counts the slice `name` as one that can't be used.
    pub(super) fn skip(&mut self, name: &str, problem: impl Display) {
        self.skipped.add(format_args!("slice {name}"), problem);
    }

    /// Logs what could not be used since the last call.
    pub(super) fn log_skipped(&mut self, source: impl Display) {
        self.skipped.log(source);
    }

    fn tell(&mut self) {
        if !std::mem::replace(&mut self.is_told, true) {
            tracing::warn!(
                most = MOST_ADDRESSES,
                "too many agents are named; the others are ignored"
            );
        }
    }
}

fn agents_of(
    name: &str,
    slice: EndpointSlice,
    wanted: Option<&Port>,
    skipped: &mut Skipped,
) -> Vec<Agent> {
    let endpoints = slice.endpoints.unwrap_or_default();
    if endpoints.is_empty() {
        // Then the ports may be missing as well, and nothing is wrong.
        return Vec::new();
    }
    let Some(port) = port_of(slice.ports.as_deref().unwrap_or_default(), wanted) else {
        let problem =
            "it has no such port, or several: kubernetes://namespace/service:port says which";
        skipped.add(format_args!("slice {name}"), problem);
        return Vec::new();
    };
    let (is_v4, is_v6) = (slice.address_type == "IPv4", slice.address_type == "IPv6");
    let agents = endpoints
        .into_iter()
        .filter(|endpoint| endpoint.conditions.is_named())
        .filter_map(|endpoint| {
            let host = endpoint.addresses?.into_iter().next()?;
            let said = if is_v6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
            match address::parse(&said) {
                Ok(address) => {
                    let uid = endpoint
                        .target_ref
                        .and_then(|target| target.uid)
                        .filter(|uid| uid.len() <= LONGEST_NAME);
                    Some(Agent { uid, is_v4, address })
                }
                Err(problem) => {
                    skipped.add(format_args!("slice {name}"), problem);
                    None
                }
            }
        });
    agents.collect()
}

/// The port that is wanted; without a wish the only one.
fn port_of(ports: &[EndpointPort], wanted: Option<&Port>) -> Option<u16> {
    let mut tcp = ports
        .iter()
        .filter(|port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"));
    match wanted {
        Some(Port::Name(name)) => tcp.find(|port| port.name.as_deref() == Some(name))?.port,
        // A slice of all ports says none.
        Some(&Port::Number(number)) => {
            tcp.any(|port| port.port.is_none_or(|port| port == number)).then_some(number)
        }
        None => {
            let only = tcp.next()?.port;
            if tcp.next().is_none() { only } else { None }
        }
    }
}

#[cfg(test)]
mod unit_tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(value: Value) -> EndpointSlice {
        serde_json::from_value(value).unwrap()
    }

    fn named(slices: &[Value], wanted: Option<&Port>) -> Vec<String> {
        let mut all = Slices::default();
        for (n, value) in slices.iter().enumerate() {
            all.put(&n.to_string(), slice(value.clone()), wanted);
        }
        all.addresses().into_iter().collect()
    }

    fn with_ports(ports: Value) -> Value {
        json!({"addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": ports})
    }

    #[test]
    fn the_wanted_port_is_taken() {
        let name = |name: &str| Some(Port::Name(name.to_owned()));
        let two = json!([{"name": "grpc", "port": 7000, "protocol": "TCP"}, {"name": "metrics", "port": 9000}]);
        for (ports, wanted, expected) in [
            (json!([{"name": "", "port": 7000}]), None, Some("10.0.0.1:7000")),
            (two.clone(), None, None),
            (two.clone(), name("grpc"), Some("10.0.0.1:7000")),
            (two.clone(), name("http"), None),
            (two.clone(), Some(Port::Number(9000)), Some("10.0.0.1:9000")),
            (two, Some(Port::Number(80)), None),
            (
                json!([{"name": "x", "port": 1, "protocol": "UDP"}, {"name": "x", "port": 2}]),
                name("x"),
                Some("10.0.0.1:2"),
            ),
            (json!([{"name": "", "port": null}]), Some(Port::Number(80)), Some("10.0.0.1:80")),
            (json!([{"name": "", "port": null}]), None, None),
            (json!(null), None, None),
        ] {
            let expected: Vec<&str> = expected.into_iter().collect();
            assert_eq!(
                named(&[with_ports(ports.clone())], wanted.as_ref()),
                expected,
                "{ports} {wanted:?}"
            );
        }
    }

    #[test]
    fn conditions_decide_who_is_named() {
        for (conditions, expected) in [
            (json!({}), true),
            (json!({"ready": true}), true),
            (json!({"ready": null}), true),
            (json!({"ready": false}), false),
            (json!({"ready": false, "serving": true, "terminating": true}), true),
            (json!({"ready": false, "serving": false, "terminating": true}), false),
            (json!({"ready": false, "serving": true, "terminating": false}), false),
        ] {
            let value = json!({"addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"], "conditions": conditions}],
                "ports": [{"port": 1}]});
            assert_eq!(!named(&[value], None).is_empty(), expected, "{conditions}");
        }
    }

    #[test]
    fn slices_are_merged_and_a_pod_has_one_address() {
        let of = |kind: &str, endpoints: &[(&str, &str)]| {
            let endpoints: Vec<Value> = endpoints
                .iter()
                .map(|(address, uid)| json!({"addresses": [address, "10.9.9.9"], "targetRef": {"kind": "Pod", "uid": uid}}))
                .collect();
            json!({"addressType": kind, "endpoints": endpoints, "ports": [{"port": 7}]})
        };
        let slices = [
            of("IPv4", &[("10.0.0.1", "a"), ("10.0.0.2", "b"), ("not an ip", "x")]),
            of("IPv6", &[("fd00::1", "a"), ("FD00:0::3", "c"), ("10.0.0.1", "y")]),
            of("IPv4", &[("10.0.0.2", "b")]),
            of("FQDN", &[("Agent.example.com", "d")]),
            json!({"addressType": "IPv4", "endpoints": null, "ports": null}),
        ];
        assert_eq!(
            named(&slices, None),
            ["10.0.0.1:7", "10.0.0.2:7", "[fd00::3]:7", "agent.example.com:7"]
        );
    }

    #[test]
    fn only_so_many_are_kept() {
        let mut slices = Slices::default();
        for n in 0..30_u32 {
            let endpoints: Vec<Value> = (0..1000)
                .map(|m| json!({"addresses": [format!("10.{n}.{}.{}", m / 250, m % 250)]}))
                .collect();
            let value =
                json!({"addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 7}]});
            slices.put(&n.to_string(), slice(value), None);
            assert!(slices.weight <= MOST_WEIGHT);
        }
        assert_eq!(slices.addresses().len(), MOST_ADDRESSES);
        assert!(!slices.has_room_again());
        slices.remove("0");
        assert!(slices.has_room_again());
        (1..30).for_each(|n: u32| slices.remove(&n.to_string()));
        assert_eq!(slices.weight, 0);
        slices.clear();
        assert!(!slices.has_room_again());
    }
}
