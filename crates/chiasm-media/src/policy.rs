//! What may be fetched: schemes, ports, hosts and network addresses.
//!
//! A URL is checked before anything is sent, the URL of each redirect as well. Addresses that names resolve to are checked
//! where connections are made: [`GuardedResolver`] hands out allowed ones only, and the client connects to those.

mod address;
mod domain;
mod resolver;

use std::net::IpAddr;
use std::sync::Arc;

use url::{Host, Url};

use crate::{MediaConfig, MediaError};

use address::is_public;
pub use domain::DomainRule;
pub(crate) use resolver::{AddressRefused, AddressRule, GuardedResolver, Lookup, system_lookup};

/// Ports of the web, which are allowed unless the configuration says otherwise.
const WEB_PORTS: [u16; 2] = [80, 443];

/// Longest URL that is fetched, in bytes; also of a redirect. What servers commonly accept.
pub(crate) const MAX_URL_BYTES: usize = 8 << 10;

/// Which URLs may be fetched.
pub(crate) struct UrlPolicy {
    /// `None` for any.
    ports: Option<Vec<u16>>,
    /// Empty for any.
    domains: Vec<DomainRule>,
    addresses: AddressRule,
}

impl UrlPolicy {
    pub(crate) fn new(config: &MediaConfig, addresses: AddressRule) -> Self {
        let web = || (!config.allow_private_addresses).then(|| WEB_PORTS.to_vec());
        let ports = config.allowed_ports.clone().or_else(web);
        Self { ports, domains: config.allowed_domains.clone(), addresses }
    }

    /// Whether addresses are allowed, as the configuration says.
    pub(crate) fn address_rule(config: &MediaConfig) -> AddressRule {
        if config.allow_private_addresses { Arc::new(|_| true) } else { Arc::new(is_public) }
    }

    /// What can be refused before anything is sent. Names are checked by the resolver, when they have addresses.
    pub(crate) fn check(&self, url: &Url) -> Result<(), MediaError> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(MediaError::UnsupportedScheme);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(MediaError::CredentialsInUrl);
        }
        if url.as_str().len() > MAX_URL_BYTES {
            return Err(MediaError::InvalidUrl { reason: "it is too long" });
        }
        let (Some(host), Some(port)) = (url.host(), url.port_or_known_default()) else {
            return Err(MediaError::InvalidUrl { reason: "it has no host" });
        };
        if !self.domains.is_empty() && !self.domains.iter().any(|rule| rule.allows(&host)) {
            return Err(MediaError::HostForbidden);
        }
        let literal: Option<IpAddr> = match host {
            Host::Domain(_) => None,
            Host::Ipv4(address) => Some(address.into()),
            Host::Ipv6(address) => Some(address.into()),
        };
        if literal.is_some_and(|address| !(self.addresses)(address)) {
            return Err(MediaError::AddressForbidden);
        }
        if self.ports.as_ref().is_some_and(|ports| !ports.contains(&port)) {
            return Err(MediaError::PortForbidden);
        }
        Ok(())
    }

    /// [`check`](Self::check), and never from an encrypted origin to one that anybody on the way could replace.
    pub(crate) fn check_redirect(&self, from: &Url, to: &Url) -> Result<(), MediaError> {
        if from.scheme() == "https" && to.scheme() == "http" {
            return Err(MediaError::InvalidRedirect);
        }
        self.check(to).map_err(|error| match error {
            MediaError::AddressForbidden | MediaError::PortForbidden | MediaError::HostForbidden => error,
            _ => MediaError::InvalidRedirect,
        })
    }
}
