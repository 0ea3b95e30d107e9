//! The slices of a service and the agents that they name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use super::Port;
use super::message::{EndpointPort, EndpointSlice};
use crate::skipped::Skipped;
use crate::{MAX_ADDRESSES, address};

/// The maximum length of an object's name in Kubernetes, also used for uids, which have 36 bytes.
const MAX_NAME_BYTES: usize = 253;
/// The maximum number of slices and agents together. Dual-stack pods are in two slices.
const MAX_WEIGHT: usize = 2 * MAX_ADDRESSES;
/// The free weight from which agents that did not fit are listed again. A new list for each removed
/// agent would be too many.
const RELIST_FREE_WEIGHT: usize = MAX_ADDRESSES / 10;

/// The slices of a service, according to the list and the watch.
#[derive(Debug, Default)]
pub(super) struct Slices {
    by_name: BTreeMap<String, Vec<Agent>>,
    /// The number of slices and agents, which bounds both.
    weight: usize,
    /// `true` if agents were left out for lack of room.
    has_excess: bool,
    /// `true` once it was logged that there are too many agents.
    excess_is_logged: bool,
    skipped: Skipped,
}

/// A named endpoint.
#[derive(Debug)]
struct Agent {
    /// The uid of the pod. A dual-stack pod is in one slice per address family.
    uid: Option<String>,
    is_v4: bool,
    address: String,
}

impl Slices {
    /// Removes all slices.
    pub(super) fn clear(&mut self) {
        self.by_name.clear();
        self.weight = 0;
        self.has_excess = false;
    }

    /// Adds or replaces a slice. `wanted` is the agents' port.
    pub(super) fn put(&mut self, name: &str, slice: EndpointSlice, wanted: Option<&Port>) {
        self.remove(name);
        if name.len() > MAX_NAME_BYTES {
            self.skip(name, "the name of the slice is too long");
            return;
        }
        let mut agents = read_agents(name, slice, wanted, &mut self.skipped);
        let room = MAX_WEIGHT.saturating_sub(self.weight);
        if agents.len() + 1 > room {
            self.has_excess = true;
            self.log_excess();
            if room == 0 {
                return;
            }
            agents.truncate(room - 1);
        }
        self.weight += agents.len() + 1;
        self.by_name.insert(name.to_owned(), agents);
    }

    /// Removes a slice.
    pub(super) fn remove(&mut self, name: &str) {
        if let Some(agents) = self.by_name.remove(name) {
            self.weight -= agents.len() + 1;
        }
    }

    /// Returns one address per pod, IPv4 if the pod has both families.
    pub(super) fn addresses(&mut self) -> BTreeSet<String> {
        let agents = || self.by_name.values().flatten();
        let uids_with_v4: BTreeSet<&str> =
            agents().filter(|agent| agent.is_v4).filter_map(|agent| agent.uid.as_deref()).collect();
        let is_second_address = |agent: &&Agent| {
            !agent.is_v4 && agent.uid.as_deref().is_some_and(|uid| uids_with_v4.contains(uid))
        };
        let mut addresses: BTreeSet<String> = agents()
            .filter(|agent| !is_second_address(agent))
            .map(|agent| agent.address.clone())
            .collect();
        if addresses.len() > MAX_ADDRESSES {
            self.log_excess();
            while addresses.len() > MAX_ADDRESSES {
                addresses.pop_last();
            }
        }
        addresses
    }

    /// Returns `true` if agents were left out for lack of room, and there is room again. Only a new
    /// list brings them back.
    pub(super) fn has_room_again(&self) -> bool {
        self.has_excess && self.weight + RELIST_FREE_WEIGHT <= MAX_WEIGHT
    }

    /// Counts the slice `name` as unusable.
    pub(super) fn skip(&mut self, name: &str, problem: impl Display) {
        self.skipped.add(format_args!("slice {name}"), problem);
    }

    /// Logs the unusable slices and endpoints since the last call.
    pub(super) fn log_skipped(&mut self, source: impl Display) {
        self.skipped.log(source);
    }

    fn log_excess(&mut self) {
        if !std::mem::replace(&mut self.excess_is_logged, true) {
            tracing::warn!(
                limit = MAX_ADDRESSES,
                "too many agents are named; the others are ignored"
            );
        }
    }
}

/// Returns the named endpoints of a slice. Unusable ones are counted in `skipped`.
fn read_agents(
    name: &str,
    slice: EndpointSlice,
    wanted: Option<&Port>,
    skipped: &mut Skipped,
) -> Vec<Agent> {
    let endpoints = slice.endpoints.unwrap_or_default();
    if endpoints.is_empty() {
        // A slice without endpoints may have no ports, which is not an error.
        return Vec::new();
    }
    let Some(port) = select_port(slice.ports.as_deref().unwrap_or_default(), wanted) else {
        let problem =
            "the agents' port is missing or ambiguous: use kubernetes://namespace/service:port";
        skipped.add(format_args!("slice {name}"), problem);
        return Vec::new();
    };
    let is_v4 = slice.address_type == "IPv4";
    let is_v6 = slice.address_type == "IPv6";
    let agents = endpoints
        .into_iter()
        .filter(|endpoint| endpoint.conditions.is_named())
        .filter_map(|endpoint| {
            let host = endpoint.addresses?.into_iter().next()?;
            let text = if is_v6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
            match address::parse(&text) {
                Ok(address) => {
                    let uid = endpoint
                        .target_ref
                        .and_then(|target| target.uid)
                        .filter(|uid| uid.len() <= MAX_NAME_BYTES);
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

/// Returns the number of the wanted port, or of the only port if none is wanted.
fn select_port(ports: &[EndpointPort], wanted: Option<&Port>) -> Option<u16> {
    let mut tcp = ports
        .iter()
        .filter(|port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"));
    match wanted {
        Some(Port::Name(name)) => tcp.find(|port| port.name.as_deref() == Some(name))?.port,
        // A port without a number stands for all ports.
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
    fn wanted_port_is_selected() {
        let name = |name: &str| Some(Port::Name(name.to_owned()));
        let two = json!([
            {"name": "grpc", "port": 7000, "protocol": "TCP"},
            {"name": "metrics", "port": 9000},
        ]);
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
    fn conditions_decide_which_endpoints_are_named() {
        for (conditions, expected) in [
            (json!({}), true),
            (json!({"ready": true}), true),
            (json!({"ready": null}), true),
            (json!({"ready": false}), false),
            (json!({"ready": false, "serving": true, "terminating": true}), true),
            (json!({"ready": false, "serving": false, "terminating": true}), false),
            (json!({"ready": false, "serving": true, "terminating": false}), false),
        ] {
            let value = json!({
                "addressType": "IPv4",
                "endpoints": [{"addresses": ["10.0.0.1"], "conditions": conditions}],
                "ports": [{"port": 1}],
            });
            assert_eq!(!named(&[value], None).is_empty(), expected, "{conditions}");
        }
    }

    #[test]
    fn merged_slices_have_one_address_per_pod() {
        let slice = |kind: &str, endpoints: &[(&str, &str)]| {
            let endpoint = |(address, uid): &(&str, &str)| {
                json!({
                    "addresses": [address, "10.9.9.9"],
                    "targetRef": {"kind": "Pod", "uid": uid},
                })
            };
            let endpoints: Vec<Value> = endpoints.iter().map(endpoint).collect();
            json!({"addressType": kind, "endpoints": endpoints, "ports": [{"port": 7}]})
        };
        let slices = [
            slice("IPv4", &[("10.0.0.1", "a"), ("10.0.0.2", "b"), ("not an ip", "x")]),
            slice("IPv6", &[("fd00::1", "a"), ("FD00:0::3", "c"), ("10.0.0.1", "y")]),
            slice("IPv4", &[("10.0.0.2", "b")]),
            slice("FQDN", &[("Agent.example.com", "d")]),
            json!({"addressType": "IPv4", "endpoints": null, "ports": null}),
        ];
        assert_eq!(
            named(&slices, None),
            ["10.0.0.1:7", "10.0.0.2:7", "[fd00::3]:7", "agent.example.com:7"]
        );
    }

    #[test]
    fn number_of_agents_is_bounded() {
        let mut slices = Slices::default();
        for n in 0..30_u32 {
            let endpoints: Vec<Value> = (0..1000)
                .map(|m| json!({"addresses": [format!("10.{n}.{}.{}", m / 250, m % 250)]}))
                .collect();
            let value =
                json!({"addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 7}]});
            slices.put(&n.to_string(), slice(value), None);
            assert!(slices.weight <= MAX_WEIGHT);
        }
        assert_eq!(slices.addresses().len(), MAX_ADDRESSES);
        assert!(!slices.has_room_again());
        slices.remove("0");
        assert!(slices.has_room_again());
        (1..30).for_each(|n: u32| slices.remove(&n.to_string()));
        assert_eq!(slices.weight, 0);
        slices.clear();
        assert!(!slices.has_room_again());
    }
}
