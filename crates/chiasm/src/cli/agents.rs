//! Flags of frontends and agents on several machines.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use chiasm_agent::{AgentMedia, AgentTls, TlsError};
use chiasm_discovery::{
    Access, Candidate, ClusterAccess, DiscoveryError, Etcd, Registration, Source, SourceFollower,
    Tls,
};
use clap::{Args, ValueEnum};

use super::{NixlArgs, agent_address};
use crate::error::CliError;

#[derive(Clone, Debug, Args)]
pub(crate) struct AgentArgs {
    /// Accept tensors that frontends made: of media for vLLM's processor, and of images while this
    /// agent is overloaded (--agent-media of chiasm serve). Also decode videos from the parts of
    /// their files that frontends cut out, with the Python of --vllm. Frontends are trusted: wrong
    /// tensors kill an engine
    #[arg(long, env = "CHIASM_TAKE_TENSORS")]
    pub(crate) take_tensors: bool,
    /// Fetch images from their URLs, within the limits and the policy of this agent's media flags.
    /// Frontends then send only images that this agent can't fetch
    #[arg(long, env = "CHIASM_FETCH_MEDIA")]
    pub(crate) fetch_media: bool,
    /// Agents on other machines whose engines this frontend uses. Without --engines, --sim or
    /// --attach, this process starts no engines of its own
    #[arg(
        long,
        env = "CHIASM_AGENTS",
        value_name = "HOST:PORT",
        num_args = 1..,
        value_delimiter = ',',
        value_parser = agent_address
    )]
    pub(crate) agents: Vec<String>,
    /// Form in which images are sent to agents that could make the tensors themselves
    #[arg(long, env = "CHIASM_AGENT_MEDIA", value_enum, default_value_t = AgentMediaArg::Auto)]
    pub(crate) agent_media: AgentMediaArg,
    /// Service in which to discover agents, besides --agents: etcd://HOST:PORT,…/PREFIX, etcds://…
    /// (with TLS), or kubernetes://NAMESPACE/SERVICE[:PORT]. An agent that the service no
    /// longer lists stays in use while it answers
    #[arg(long, env = "CHIASM_DISCOVERY", value_name = "URL")]
    pub(crate) discovery: Option<Source>,
    /// Address of an etcd in which this agent announces itself to frontends:
    /// etcd://HOST:PORT,…/PREFIX, or etcds://… (with TLS)
    #[arg(long, env = "CHIASM_ANNOUNCE", value_name = "URL")]
    pub(crate) announce: Option<Etcd>,
    /// Address to announce to frontends; required if the agent listens on all addresses [default:
    /// the address it listens on]
    #[arg(
        long,
        env = "CHIASM_ANNOUNCE_ADDRESS",
        value_name = "HOST:PORT",
        requires = "announce",
        value_parser = agent_address
    )]
    pub(crate) announce_address: Option<String>,
    /// PEM file of the authorities that sign the certificates of etcds:// servers [default: the
    /// public authorities that Mozilla trusts]
    #[arg(long, env = "CHIASM_ETCD_CA_FILE", value_name = "FILE")]
    pub(crate) etcd_ca_file: Option<PathBuf>,
    /// PEM file of the client certificate for etcds:// servers
    #[arg(long, env = "CHIASM_ETCD_CERTFILE", value_name = "FILE", requires = "etcd_keyfile")]
    pub(crate) etcd_certfile: Option<PathBuf>,
    /// PEM file of the private key of --etcd-certfile
    #[arg(long, env = "CHIASM_ETCD_KEYFILE", value_name = "FILE", requires = "etcd_certfile")]
    pub(crate) etcd_keyfile: Option<PathBuf>,
    /// File with the secret for block keys: 64 hex digits (openssl rand -hex 32), the same for all
    /// frontends and agents of a fleet and known to nobody else [default: a file in this user's
    /// state folder, created when it is first needed]
    #[arg(long, env = "CHIASM_BLOCK_KEY_SECRET", value_name = "FILE")]
    pub(crate) block_key_secret: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) nixl: NixlArgs,
    #[command(flatten)]
    pub(crate) tls: AgentTlsArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AgentMediaArg {
    /// As files; as tensors made here if the agent has --take-tensors, the image would wait there
    /// for longer than sending its tensors takes, and a thread is idle here
    Auto,
    /// As files
    Encoded,
    /// As tensors made here, if the agent has --take-tensors, else as files
    Tensors,
}

impl From<AgentMediaArg> for AgentMedia {
    fn from(media: AgentMediaArg) -> Self {
        match media {
            AgentMediaArg::Auto => Self::Auto,
            AgentMediaArg::Encoded => Self::Encoded,
            AgentMediaArg::Tensors => Self::Tensors,
        }
    }
}

impl AgentArgs {
    /// Returns `true` if the frontend uses engines of agents.
    pub(crate) fn has_agents(&self) -> bool {
        !self.agents.is_empty() || self.discovery.is_some()
    }

    /// Starts to follow all sources of agents. Needs a Tokio runtime.
    pub(crate) fn sources(&self) -> Result<Vec<SourceFollower>, CliError> {
        let invalid =
            |flag: &str, error: DiscoveryError| CliError::Usage(format!("{flag}: {error}"));
        let cluster = match &self.discovery {
            Some(Source::Kubernetes(_)) => {
                ClusterAccess::from_pod_env(&|name| std::env::var(name).ok())
            }
            _ => Ok(None),
        };
        let access = Access {
            etcd: self.etcd_tls(),
            cluster: cluster.map_err(|error| invalid("--discovery", error))?,
        };
        let mut sources = Vec::new();
        if !self.agents.is_empty() {
            let listed: Source =
                self.agents.join(",").parse().map_err(|error| invalid("--agents", error))?;
            sources.push(listed.follow(&access).map_err(|error| invalid("--agents", error))?);
        }
        if let Some(source) = &self.discovery {
            sources.push(
                source.clone().follow(&access).map_err(|error| invalid("--discovery", error))?,
            );
        }
        Ok(sources)
    }

    /// Registers the agent of `model` that listens at `local_address`, if `--announce` is given.
    /// Needs a Tokio runtime.
    pub(crate) fn register(
        &self,
        local_address: Option<SocketAddr>,
        model: &str,
    ) -> Result<Option<Registration>, CliError> {
        let Some(etcd) = &self.announce else { return Ok(None) };
        let invalid =
            |flag: &str, error: DiscoveryError| CliError::Usage(format!("{flag}: {error}"));
        let address = match (&self.announce_address, local_address) {
            (Some(address), _) => address.clone(),
            (None, Some(local)) if !local.ip().is_unspecified() => local.to_string(),
            _ => {
                let message =
                    "--announce requires --announce-address if the agent listens on all addresses";
                return Err(CliError::Usage(message.to_owned()));
            }
        };
        let agent = Candidate::new(&address, Some(model.to_owned()))
            .map_err(|error| invalid("--announce-address", error))?;
        let registration =
            Registration::start(etcd.clone(), self.etcd_tls(), &agent, Registration::DEFAULT_TTL);
        registration.map(Some).map_err(|error| invalid("--announce", error))
    }

    /// Returns the TLS files for `etcds://` and `dynamo+etcds://`.
    pub(crate) fn etcd_tls(&self) -> Tls {
        let identity = match (self.etcd_certfile.clone(), self.etcd_keyfile.clone()) {
            (Some(certificate), Some(key)) => Some(chiasm_discovery::Identity { certificate, key }),
            _ => None,
        };
        Tls { authority: self.etcd_ca_file.clone(), identity }
    }
}

/// Flags of `chiasm drain`.
#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Address of the agent
    #[arg(value_name = "HOST:PORT", value_parser = agent_address)]
    pub(crate) agent: String,
    /// Let the agent take new requests again
    #[arg(long)]
    pub(crate) resume: bool,
    /// Maximum seconds to wait until the agent runs no request; fails if one still runs then. 0
    /// does not wait
    #[arg(
        long,
        value_name = "SECONDS",
        value_parser = super::seconds,
        default_value = "0",
        conflicts_with = "resume"
    )]
    pub(crate) wait: Duration,
    #[command(flatten)]
    pub(crate) tls: AgentTlsArgs,
}

/// Flags of `chiasm probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// Address of the agent
    #[arg(value_name = "HOST:PORT", value_parser = agent_address)]
    pub(crate) agent: String,
    /// Also require that the agent takes new requests and that frontends have admitted each of its
    /// engines, as for the readiness probe of a pod
    #[arg(long)]
    pub(crate) admitted: bool,
    #[command(flatten)]
    pub(crate) tls: AgentTlsArgs,
}

/// Flags of the mutual authentication of agents and frontends.
#[derive(Clone, Debug, Args)]
pub(crate) struct AgentTlsArgs {
    /// PEM file of the certificate that this process presents to agents or frontends
    #[arg(
        long,
        env = "CHIASM_AGENT_CERTFILE",
        value_name = "FILE",
        requires_all = ["agent_keyfile", "agent_ca_file"]
    )]
    pub(crate) agent_certfile: Option<PathBuf>,
    /// PEM file of the private key of --agent-certfile
    #[arg(
        long,
        env = "CHIASM_AGENT_KEYFILE",
        value_name = "FILE",
        requires_all = ["agent_certfile", "agent_ca_file"]
    )]
    pub(crate) agent_keyfile: Option<PathBuf>,
    /// PEM file of the authorities that must have signed the other side's certificate
    #[arg(
        long,
        env = "CHIASM_AGENT_CA_FILE",
        value_name = "FILE",
        requires_all = ["agent_certfile", "agent_keyfile"]
    )]
    pub(crate) agent_ca_file: Option<PathBuf>,
    /// Host name that agents' certificates must contain, for agents whose address is not in their
    /// certificate, such as pods [default: the host of the agent's address]
    #[arg(long, env = "CHIASM_AGENT_TLS_NAME", value_name = "NAME", requires = "agent_ca_file")]
    pub(crate) agent_tls_name: Option<String>,
    /// Allow agents and frontends to communicate without TLS on addresses other than loopback.
    /// Anyone who can reach them can then use the engines and read all prompts
    #[arg(long, env = "CHIASM_AGENT_PLAINTEXT")]
    pub(crate) agent_plaintext: bool,
}

impl AgentTlsArgs {
    /// Loads the certificates of this process, if any are given.
    pub(crate) fn load(&self) -> Result<Option<Arc<AgentTls>>, CliError> {
        let (Some(certificate), Some(key), Some(authorities)) =
            (&self.agent_certfile, &self.agent_keyfile, &self.agent_ca_file)
        else {
            return Ok(None);
        };
        let name = self.agent_tls_name.clone();
        AgentTls::load(certificate.clone(), key.clone(), authorities.clone(), name)
            .map(Some)
            .map_err(|error| {
                let flag = if matches!(error, TlsError::Name(_)) {
                    "--agent-tls-name"
                } else {
                    "--agent-certfile"
                };
                CliError::Usage(format!("{flag}: {error}"))
            })
    }

    /// Checks that a connection to an agent at `address` may be plain text.
    pub(crate) fn check_plaintext_towards(&self, address: &str) -> Result<(), CliError> {
        let host =
            address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
        let is_loopback =
            host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        self.check_plaintext(address, is_loopback)
    }

    /// Checks that an agent may listen at `address` for plain text.
    pub(crate) fn check_plaintext_at(&self, address: SocketAddr) -> Result<(), CliError> {
        self.check_plaintext(&address.to_string(), address.ip().is_loopback())
    }

    fn check_plaintext(&self, address: &str, is_loopback: bool) -> Result<(), CliError> {
        if is_loopback || self.agent_plaintext {
            return Ok(());
        }
        Err(CliError::Usage(format!(
            "{address} is not a loopback address: give --agent-certfile, \
             --agent-keyfile and --agent-ca-file, or --agent-plaintext on a network that nobody \
             else can reach"
        )))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::{Cli, Command};
    use crate::error::CliError;

    #[test]
    fn agent_address_without_host_and_port_is_refused() {
        for value in ["http://127.0.0.1:1", "a", "nonsense", "a:0"] {
            for words in
                [&["serve", "m", "--agents", value][..], &["probe", value], &["drain", value]]
            {
                let error = Cli::parse_args([&["chiasm"], words].concat()).unwrap_err().to_string();
                let expected = format!("'{value}' for");
                assert!(error.contains(&expected), "{error}");
                assert!(error.contains("expected HOST:PORT, such as gpu1:8100"), "{error}");
            }
        }
        assert!(Cli::parse_args(["chiasm", "probe", "[::1]:8100"]).is_ok());
    }

    #[test]
    fn plaintext_is_local_unless_allowed() {
        let parsed = |more: &[&str]| {
            let all = ["chiasm", "serve", "m"].into_iter().chain(more.iter().copied());
            let Command::Serve(args) = Cli::parse_from(all).command else { panic!("serve") };
            args.agents.tls
        };
        let args = parsed(&[]);
        for here in ["127.0.0.1:1", "127.0.0.3:8100", "[::1]:1", "localhost:1"] {
            args.check_plaintext_towards(here).unwrap();
        }
        for elsewhere in ["10.0.0.1:1", "gpu1:1", "[2001:db8::1]:1"] {
            let error = args.check_plaintext_towards(elsewhere).unwrap_err();
            assert!(
                matches!(&error, CliError::Usage(words) if words.contains("--agent-plaintext")),
                "{error}"
            );
        }
        assert!(args.check_plaintext_at("0.0.0.0:1".parse().unwrap()).is_err());
        parsed(&["--agent-plaintext"]).check_plaintext_towards("10.0.0.1:1").unwrap();
    }
}
