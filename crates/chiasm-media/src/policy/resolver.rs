//! Names to addresses, checked on the way to the connection.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::Semaphore;

/// Look-ups of the operating system at once. Each keeps a thread, also after whoever asked has
/// given up.
const MAX_LOOKUPS: usize = 64;

/// Addresses of a name that are tried, at most.
const MAX_ADDRESSES: usize = 16;

/// Whether to connect to an address.
pub(crate) type AddressRule = Arc<dyn Fn(IpAddr) -> bool + Send + Sync>;

/// How names become addresses.
pub(crate) type Lookup = Arc<
    dyn Fn(String) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>> + Send + Sync,
>;

/// The look-up of the operating system.
pub(crate) fn system_lookup() -> Lookup {
    let turns = Arc::new(Semaphore::new(MAX_LOOKUPS));
    Arc::new(move |host| {
        let turns = turns.clone();
        Box::pin(async move {
            let turn = turns.acquire_owned().await.map_err(io::Error::other)?;
            let look_up = move || {
                let _turn = turn;
                Ok((host.as_str(), 0).to_socket_addrs()?.map(|address| address.ip()).collect())
            };
            tokio::task::spawn_blocking(look_up).await?
        })
    })
}

/// All addresses of a name are refused by the rule.
#[derive(Debug, thiserror::Error)]
#[error("no address of the host is allowed")]
pub(crate) struct AddressRefused;

/// Hands the HTTP client only allowed addresses, so that what was checked is what is connected to.
pub(crate) struct GuardedResolver {
    pub(crate) lookup: Lookup,
    pub(crate) rule: AddressRule,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (lookup, rule) = (self.lookup.clone(), self.rule.clone());
        Box::pin(async move {
            let found = lookup(name.as_str().to_owned()).await?;
            let any = !found.is_empty();
            let allowed: Vec<SocketAddr> = found
                .into_iter()
                .filter(|&ip| rule(ip))
                .take(MAX_ADDRESSES)
                .map(|ip| SocketAddr::new(ip, 0))
                .collect();
            if any && allowed.is_empty() {
                return Err(AddressRefused.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}
