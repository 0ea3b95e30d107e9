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

use super::NixlArgs;
use crate::error::CliError;

#[derive(Clone, Debug, Args)]
pub(crate) struct AgentArgs {
    /// Of chiasm agent: take media items that frontends have made tensors of, as they do with
    /// vLLM's processor, and with images while this agent has too many to process (--agent-media).
    /// Frontends are believed then that the tensors are what the engines want: wrong ones end an
    /// engine
    #[arg(long, env = "CHIASM_TAKE_TENSORS")]
    pub(crate) take_tensors: bool,
    /// Of chiasm agent: fetch images from where frontends have got them, within the limits and the
    /// policy of this agent's flags for media. Frontends send what that does not bring, as they do
    /// with all images otherwise
    #[arg(long, env = "CHIASM_FETCH_MEDIA")]
    pub(crate) fetch_media: bool,
    /// The agents of other machines whose engines are served too, as host:port; without --engines,
    /// --sim or --attach theirs alone
    #[arg(long, env = "CHIASM_AGENTS", value_name = "HOST:PORT", num_args = 1.., value_delimiter = ',')]
    pub(crate) agents: Vec<String>,
    /// How images reach agents that could make their tensors themselves
    #[arg(long, env = "CHIASM_AGENT_MEDIA", value_enum, default_value_t = AgentMediaArg::Auto)]
    pub(crate) agent_media: AgentMediaArg,
    /// Where agents are named: etcd://HOST:PORT,…/PREFIX, etcds://… (with TLS), or
    /// kubernetes://NAMESPACE/SERVICE[:PORT]; beside those of --agents. One that vanishes there
    /// goes on for as long as it answers
    #[arg(long, env = "CHIASM_DISCOVERY", value_name = "URL")]
    pub(crate) discovery: Option<Source>,
    /// Of an agent: where it names itself for frontends, etcd://HOST:PORT,…/PREFIX or etcds://…
    #[arg(long, env = "CHIASM_ANNOUNCE", value_name = "URL")]
    pub(crate) announce: Option<Etcd>,
    /// Of an agent: the address, as HOST:PORT, at which frontends reach it [default: the one that
    /// it listens on]
    #[arg(long, env = "CHIASM_ANNOUNCE_ADDRESS", value_name = "HOST:PORT", requires = "announce")]
    pub(crate) announce_address: Option<String>,
    /// PEM file of the authorities that sign the certificates of etcds:// servers [default: those
    /// of the web]
    #[arg(long, env = "CHIASM_ETCD_CA_FILE", value_name = "FILE")]
    pub(crate) etcd_ca_file: Option<PathBuf>,
    /// PEM file of the certificate that is shown to etcds:// servers
    #[arg(long, env = "CHIASM_ETCD_CERTFILE", value_name = "FILE", requires = "etcd_keyfile")]
    pub(crate) etcd_certfile: Option<PathBuf>,
    /// PEM file of that certificate's private key
    #[arg(long, env = "CHIASM_ETCD_KEYFILE", value_name = "FILE", requires = "etcd_certfile")]
    pub(crate) etcd_keyfile: Option<PathBuf>,
    /// File of 64 hex digits that nobody else knows, with which block keys are made; the same for
    /// all frontends and agents that work together (openssl rand -hex 32) [default: one in the
    /// state folder of this user, made when it is first needed]
    #[arg(long, env = "CHIASM_BLOCK_KEY_SECRET", value_name = "FILE")]
    pub(crate) block_key_secret: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) nixl: NixlArgs,
    #[command(flatten)]
    pub(crate) tls: AgentTlsArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AgentMediaArg {
    /// As files, and while an agent has more images to process than sending tensors takes, as
    /// tensors made here by a thread that has nothing else to do, if the agent has --take-tensors
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

    /// Starts to follow all sources that name agents. Needs a Tokio runtime.
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
                    "--announce needs --announce-address where an agent listens on all addresses";
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
    /// The agent, as HOST:PORT
    #[arg(value_name = "HOST:PORT")]
    pub(crate) agent: String,
    /// Take new requests again
    #[arg(long)]
    pub(crate) resume: bool,
    /// Wait for so many seconds at most until no request runs there
    #[arg(long, value_name = "SECONDS", value_parser = super::seconds, default_value = "0", conflicts_with = "resume")]
    pub(crate) wait: Duration,
    #[command(flatten)]
    pub(crate) tls: AgentTlsArgs,
}

/// Flags of `chiasm probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// The agent, as HOST:PORT
    #[arg(value_name = "HOST:PORT")]
    pub(crate) agent: String,
    /// Fail unless it takes new requests and frontends have admitted each of its engines: what is
    /// asked of a pod that is to be ready
    #[arg(long)]
    pub(crate) admitted: bool,
    #[command(flatten)]
    pub(crate) tls: AgentTlsArgs,
}

/// Flags of the mutual authentication of agents and frontends.
#[derive(Clone, Debug, Args)]
pub(crate) struct AgentTlsArgs {
    /// PEM file of the certificate that this process shows agents or frontends
    #[arg(long, env = "CHIASM_AGENT_CERTFILE", value_name = "FILE", requires_all = ["agent_keyfile", "agent_ca_file"])]
    pub(crate) agent_certfile: Option<PathBuf>,
    /// PEM file of that certificate's private key
    #[arg(long, env = "CHIASM_AGENT_KEYFILE", value_name = "FILE", requires_all = ["agent_certfile", "agent_ca_file"])]
    pub(crate) agent_keyfile: Option<PathBuf>,
    /// PEM file of the authorities that must have signed the other side's certificate
    #[arg(long, env = "CHIASM_AGENT_CA_FILE", value_name = "FILE", requires_all = ["agent_certfile", "agent_keyfile"])]
    pub(crate) agent_ca_file: Option<PathBuf>,
    /// Name that the certificates of agents must have, where the host that they are reached at is
    /// not in them, as with addresses of pods [default: that host]
    #[arg(long, env = "CHIASM_AGENT_TLS_NAME", value_name = "NAME", requires = "agent_ca_file")]
    pub(crate) agent_tls_name: Option<String>,
    /// Let agents and frontends speak without TLS on other addresses than this machine's own:
    /// whoever can reach them can use the engines, and read all prompts
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
        let is_here =
            host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        self.check_plaintext(address, is_here)
    }

    /// Checks that an agent may listen at `address` for plain text.
    pub(crate) fn check_plaintext_at(&self, address: SocketAddr) -> Result<(), CliError> {
        self.check_plaintext(&address.to_string(), address.ip().is_loopback())
    }

    fn check_plaintext(&self, address: &str, is_here: bool) -> Result<(), CliError> {
        if is_here || self.agent_plaintext {
            return Ok(());
        }
        Err(CliError::Usage(format!(
            "{address} is not an address of this machine alone: give --agent-certfile, \
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
