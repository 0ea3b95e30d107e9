//! Flags of engines with roles, which compute only some stages of requests.

use std::fmt;
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::str::FromStr;

use chiasm_backend::PrivateNetwork;
use chiasm_engine::{EcConnector, KvConnector};
use chiasm_router::StageWeights;
use chiasm_types::Role;
use clap::Args;

use super::{NotAnObject, json_object, non_negative};
use crate::error::CliError;

#[derive(Debug, Args)]
pub(crate) struct RoleArgs {
    /// Connector that hands prompts from prefill to decode engines: nixl, files:DIR for trials, or
    /// vLLM's --kv-transfer-config as JSON, to which each role's kv_role is added
    #[arg(
        long,
        env = "CHIASM_KV_CONNECTOR",
        value_name = "CONNECTOR",
        default_value = "nixl",
        value_parser = kv_connector
    )]
    pub(crate) kv_connector: KvConnector,
    /// vLLM flags for the engines of one role, such as decode='--max-num-seqs 512', after the flags
    /// for all; may be given several times
    #[arg(long, env = "CHIASM_ROLE_ARGS", value_name = "ROLE=FLAGS", value_delimiter = ';')]
    pub(crate) role_args: Vec<RoleFlags>,
    /// Private network over which prompts are handed to engines of other machines, unencrypted and
    /// to anyone who asks: this machine's address on it and the prefix length, such as 10.0.0.7/24.
    /// Machines on the same network hand prompts to each other [default: prompts stay on their
    /// machine]
    #[arg(long, env = "CHIASM_ROLES_PRIVATE_NETWORK", value_name = "ADDR/BITS")]
    pub(crate) roles_private_network: Option<PrivateNetwork>,
    /// Connector that hands embeddings from encode engines to the other engines of their machine:
    /// store (files in memory), files:DIR for trials, or vLLM's --ec-transfer-config as JSON, to
    /// which each role's ec_role is added
    #[arg(
        long,
        env = "CHIASM_EC_CONNECTOR",
        value_name = "CONNECTOR",
        default_value = "store",
        value_parser = ec_connector
    )]
    pub(crate) ec_connector: EcConnector,
    /// Maximum bytes of embeddings that engines of one machine store for each other; beyond it the
    /// least recently used are removed
    #[arg(
        long,
        env = "CHIASM_EMBEDDING_STORE_BYTES",
        value_name = "BYTES",
        default_value_t = 4 << 30
    )]
    pub(crate) embedding_store_bytes: u64,
    /// Cost of transferring one prompt block from the engine that computed it; one block of
    /// embeddings costs an eighth of that
    #[arg(
        long,
        env = "CHIASM_TRANSFER_WEIGHT",
        value_parser = non_negative,
        default_value_t = StageWeights::default().transfer
    )]
    pub(crate) transfer_weight: f64,
    /// Cost of transferring one prompt block from an engine on another machine
    #[arg(
        long,
        env = "CHIASM_NETWORK_TRANSFER_WEIGHT",
        value_parser = non_negative,
        default_value_t = StageWeights::default().network_transfer
    )]
    pub(crate) network_transfer_weight: f64,
    /// Cost of using a second engine, whatever the length of the prompt
    #[arg(
        long,
        env = "CHIASM_HOP_WEIGHT",
        value_parser = non_negative,
        default_value_t = StageWeights::default().hop
    )]
    pub(crate) hop_weight: f64,
    /// Weight of a prompt's work on a decode engine, for each request whose answer it delays; 1
    /// counts it in full
    #[arg(
        long,
        env = "CHIASM_DISTURB_WEIGHT",
        value_parser = non_negative,
        default_value_t = StageWeights::default().disturb
    )]
    pub(crate) disturb_weight: f64,
}

impl RoleArgs {
    /// Returns the vLLM flags for engines of a role.
    pub(crate) fn vllm_flags(&self, role: Role) -> impl Iterator<Item = String> {
        self.role_args
            .iter()
            .filter(move |args| args.role == role)
            .flat_map(|args| args.flags.iter().cloned())
    }

    /// Returns the weights of splitting a request.
    pub(crate) fn weights(&self) -> StageWeights {
        StageWeights {
            transfer: self.transfer_weight,
            network_transfer: self.network_transfer_weight,
            hop: self.hop_weight,
            disturb: self.disturb_weight,
        }
    }

    /// Returns the network over which engines of these roles hand prompts to other machines.
    ///
    /// # Errors
    /// [`CliError::Usage`] if nothing would use the network, or if its address is not of this
    /// machine.
    pub(crate) fn private_network(
        &self,
        mut roles: impl Iterator<Item = Role>,
    ) -> Result<Option<PrivateNetwork>, CliError> {
        let Some(network) = self.roles_private_network else { return Ok(None) };
        let invalid = |why: &str| Err(CliError::Usage(format!("--roles-private-network: {why}")));
        if roles.all(|role| role == Role::Aggregated) {
            return invalid("requires engines with roles, and this process has none");
        }
        if matches!(self.kv_connector, KvConnector::Files(_)) {
            return invalid(
                "prompts are handed over in files (--kv-connector), not over a network",
            );
        }
        if !is_local_address(network.address) {
            return invalid(&format!("{} is not an address of this machine", network.address));
        }
        Ok(Some(network))
    }
}

/// Returns `true` if a listener can bind the address.
pub(crate) fn is_local_address(address: IpAddr) -> bool {
    TcpListener::bind((address, 0)).is_ok()
}

/// The number of engines, as `4` or by role as `prefill=2,decode=4`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EngineCounts(Vec<(Role, u32)>);

impl EngineCounts {
    /// Creates a count of engines that compute all stages.
    pub(crate) fn aggregated(count: u32) -> Self {
        Self(vec![(Role::Aggregated, count)])
    }

    /// Returns the number of engines of all roles.
    pub(crate) fn total(&self) -> u64 {
        self.0.iter().map(|(_, count)| u64::from(*count)).sum()
    }

    /// Returns the number of engines of each role, in the order of the command line.
    pub(crate) fn by_role(&self) -> &[(Role, u32)] {
        &self.0
    }

    /// Returns `true` if some engines compute only some stages.
    pub(crate) fn has_roles(&self) -> bool {
        self.0.iter().any(|(role, _)| *role != Role::Aggregated)
    }

    /// Returns the role of each engine.
    pub(crate) fn roles(&self) -> impl Iterator<Item = Role> {
        self.0.iter().flat_map(|&(role, count)| std::iter::repeat_n(role, count as usize))
    }
}

/// Formats as `6`, or as `2 prefill + 4 decode`.
impl fmt::Display for EngineCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.has_roles() {
            return write!(f, "{}", self.total());
        }
        let parts: Vec<_> = self.0.iter().map(|(role, count)| format!("{count} {role}")).collect();
        f.pad(&parts.join(" + "))
    }
}

/// The error of an invalid value with roles.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RoleError {
    #[error("unknown role '{0}'; there are {all}", all = Role::ALL.map(Role::name).join(", "))]
    Unknown(String),
    #[error("expected a number, or a number by role such as prefill=1,decode=2")]
    Counts,
    #[error("{0} is given twice")]
    Twice(Role),
    #[error("expected a number of {0} engines")]
    Count(Role),
    #[error("expected an address such as tcp://127.0.0.1:29550")]
    Address,
    #[error("expected ROLE=FLAGS, such as decode='--max-num-seqs 512'")]
    Flags,
    #[error("a quotation mark is not closed")]
    Quotation,
}

/// The error of a value that is not a connector.
#[derive(Debug, thiserror::Error)]
enum ConnectorError {
    #[error("expected store, files:DIR, or a JSON object")]
    Ec,
    #[error("expected nixl, files:DIR, or a JSON object")]
    Kv,
    #[error(transparent)]
    Object(#[from] NotAnObject),
}

impl FromStr for EngineCounts {
    type Err = RoleError;

    fn from_str(text: &str) -> Result<Self, RoleError> {
        if let Ok(count) = text.parse() {
            return Ok(Self::aggregated(count));
        }
        let mut counts: Vec<(Role, u32)> = Vec::new();
        for part in text.split(',') {
            let (role, count) = part.split_once('=').ok_or(RoleError::Counts)?;
            let role = parse_role(role)?;
            if counts.iter().any(|(other, _)| *other == role) {
                return Err(RoleError::Twice(role));
            }
            counts.push((role, count.parse().map_err(|_| RoleError::Count(role))?));
        }
        Ok(Self(counts))
    }
}

/// The handshake address of an attached engine: `tcp://host:port`, or `prefill=tcp://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttachArg {
    pub(crate) role: Role,
    pub(crate) handshake: String,
}

impl FromStr for AttachArg {
    type Err = RoleError;

    fn from_str(text: &str) -> Result<Self, RoleError> {
        let (role, handshake) = match text.split_once('=') {
            Some((role, handshake)) => (parse_role(role)?, handshake),
            None => (Role::Aggregated, text),
        };
        match handshake.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')) {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self { role, handshake: handshake.to_owned() })
            }
            _ => Err(RoleError::Address),
        }
    }
}

/// The vLLM flags for the engines of a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RoleFlags {
    role: Role,
    flags: Vec<String>,
}

impl FromStr for RoleFlags {
    type Err = RoleError;

    fn from_str(text: &str) -> Result<Self, RoleError> {
        let (role, flags) = text.split_once('=').ok_or(RoleError::Flags)?;
        let flags = shlex::split(flags).ok_or(RoleError::Quotation)?;
        Ok(Self { role: parse_role(role)?, flags })
    }
}

fn parse_role(name: &str) -> Result<Role, RoleError> {
    Role::parse(name).ok_or_else(|| RoleError::Unknown(name.to_owned()))
}

fn ec_connector(text: &str) -> Result<EcConnector, ConnectorError> {
    match (text, text.strip_prefix("files:")) {
        ("store", _) => Ok(EcConnector::Store),
        (_, Some(folder)) if !folder.is_empty() => Ok(EcConnector::Files(PathBuf::from(folder))),
        _ if text.starts_with('{') => Ok(EcConnector::Other(json_object(text)?)),
        _ => Err(ConnectorError::Ec),
    }
}

fn kv_connector(text: &str) -> Result<KvConnector, ConnectorError> {
    match (text, text.strip_prefix("files:")) {
        ("nixl", _) => Ok(KvConnector::Nixl),
        (_, Some(folder)) if !folder.is_empty() => Ok(KvConnector::Files(PathBuf::from(folder))),
        _ if text.starts_with('{') => Ok(KvConnector::Other(json_object(text)?)),
        _ => Err(ConnectorError::Kv),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    #[test]
    fn engines_are_counted_by_role() {
        let roles = |text: &str| {
            text.parse::<EngineCounts>().map(|counts| counts.roles().collect::<Vec<_>>())
        };
        assert_eq!(roles("2"), Ok(vec![Role::Aggregated; 2]));
        assert_eq!(
            roles("prefill=1,decode=2"),
            Ok(vec![Role::Prefill, Role::Decode, Role::Decode])
        );
        let displayed = |text: &str| text.parse::<EngineCounts>().unwrap().to_string();
        assert_eq!([displayed("2"), displayed("aggregated=2")], ["2", "2"]);
        assert_eq!(displayed("prefill=1,decode=2"), "1 prefill + 2 decode");
        for invalid in
            ["", "x", "prefill", "prefill=x", "prefills=1", "decode=1,decode=2", "-1", "1,2"]
        {
            assert!(roles(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn attached_address_may_have_role() {
        let parsed = |text: &str| text.parse::<AttachArg>().map(|arg| (arg.role, arg.handshake));
        assert_eq!(parsed("tcp://h:1"), Ok((Role::Aggregated, "tcp://h:1".to_owned())));
        assert_eq!(parsed("decode=tcp://h:1"), Ok((Role::Decode, "tcp://h:1".to_owned())));
        assert!(parsed("decoder=tcp://h:1").is_err());
        assert!(
            ["h:1", "ipc:///x", "decode=tcp://h", "tcp://:1", "tcp://h:x"]
                .iter()
                .all(|text| parsed(text).is_err())
        );
    }

    #[test]
    fn role_flags_are_split_like_shell_words() {
        let flags = "prefill=--a 1 --b '{\"c\": 2}'".parse::<RoleFlags>().unwrap();
        assert_eq!(
            (flags.role, flags.flags),
            (Role::Prefill, vec!["--a".into(), "1".into(), "--b".into(), "{\"c\": 2}".into()])
        );
        assert!(
            "prefill=--a 'x".parse::<RoleFlags>().is_err() && "--a".parse::<RoleFlags>().is_err()
        );
    }

    #[test]
    fn unusable_private_network_is_refused() {
        let read = |words: &str| {
            let all = ["chiasm", "agent", "m"]
                .map(str::to_owned)
                .into_iter()
                .chain(shlex::split(words).unwrap());
            let args = match Cli::try_parse_from(all).map_err(|error| error.to_string())?.command {
                Command::Agent(args) => args,
                other => panic!("{other:?}"),
            };
            args.roles.private_network(args.engines.roles()).map_err(|error| error.to_string())
        };
        assert_eq!(read("--engines prefill=1"), Ok(None));
        let network =
            read("--engines prefill=1 --roles-private-network 127.0.0.2/24").unwrap().unwrap();
        assert_eq!(
            (network.address, network.network.to_string()),
            ([127, 0, 0, 2].into(), "127.0.0.0/24".to_owned())
        );
        for engines in ["--sim decode=1", "--attach decode=tcp://127.0.0.1:1"] {
            assert!(
                read(&format!("{engines} --roles-private-network 127.0.0.2/24")).unwrap().is_some(),
                "{engines}"
            );
        }
        for (words, why) in [
            ("--engines 2 --roles-private-network 127.0.0.2/24", "none"),
            ("--roles-private-network 127.0.0.2/24", "none"),
            (
                "--engines prefill=1 --kv-connector files:/kv --roles-private-network 127.0.0.2/24",
                "files",
            ),
            (
                "--engines prefill=1 --roles-private-network 192.0.2.7/24",
                "192.0.2.7 is not an address of this machine",
            ),
            ("--engines prefill=1 --roles-private-network 10.0.0.7", "such as 10.0.0.7/24"),
        ] {
            let error = read(words).unwrap_err();
            assert!(error.contains(why), "{words}: {error}");
        }
    }

    #[test]
    fn connector_is_name_or_json_object() {
        assert_eq!(kv_connector("nixl").unwrap(), KvConnector::Nixl);
        assert_eq!(kv_connector("files:/kv").unwrap(), KvConnector::Files("/kv".into()));
        assert!(matches!(kv_connector(r#"{"kv_connector": "X"}"#), Ok(KvConnector::Other(_))));
        assert_eq!(ec_connector("store").unwrap(), EcConnector::Store);
        assert_eq!(ec_connector("files:/ec").unwrap(), EcConnector::Files("/ec".into()));
        assert!(matches!(ec_connector(r#"{"ec_connector": "X"}"#), Ok(EcConnector::Other(_))));
        for invalid in ["", "files:", "NIXL", "[1]", "{"] {
            assert!(kv_connector(invalid).is_err() && ec_connector(invalid).is_err(), "{invalid}");
        }
    }
}
