//! Name resolution for the HTTP client, limited to allowed addresses.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::Semaphore;

/// The maximum number of concurrent look-ups by the operating system. Each occupies a thread, even
/// after its caller has given up.
const MAX_LOOKUPS: usize = 64;

/// The maximum number of addresses tried per name.
const MAX_ADDRESSES: usize = 16;

/// Returns `true` for addresses that may be connected to.
pub(crate) type AddressRule = Arc<dyn Fn(IpAddr) -> bool + Send + Sync>;

/// Resolves a name to its addresses.
pub(crate) type Lookup = Arc<
    dyn Fn(String) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>> + Send + Sync,
>;

/// Returns the look-up of the operating system.
pub(crate) fn system_lookup() -> Lookup {
    let permits = Arc::new(Semaphore::new(MAX_LOOKUPS));
    Arc::new(move |host| {
        let permits = permits.clone();
        Box::pin(async move {
            let permit = permits.acquire_owned().await.map_err(io::Error::other)?;
            let look_up = move || {
                let _permit = permit;
                Ok((host.as_str(), 0).to_socket_addrs()?.map(|address| address.ip()).collect())
            };
            tokio::task::spawn_blocking(look_up).await?
        })
    })
}

/// The error for a name none of whose addresses is allowed.
#[derive(Debug, thiserror::Error)]
#[error("no address of the host is allowed")]
pub(crate) struct AddressRefused;

/// A resolver that gives the HTTP client only allowed addresses. The client connects to exactly the
/// addresses that were checked.
pub(crate) struct GuardedResolver {
    pub(crate) lookup: Lookup,
    pub(crate) rule: AddressRule,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let lookup = self.lookup.clone();
        let rule = self.rule.clone();
        Box::pin(async move {
            let found = lookup(name.as_str().to_owned()).await?;
            let has_addresses = !found.is_empty();
            let allowed: Vec<SocketAddr> = found
                .into_iter()
                .filter(|&ip| rule(ip))
                .take(MAX_ADDRESSES)
                .map(|ip| SocketAddr::new(ip, 0))
                .collect();
            if has_addresses && allowed.is_empty() {
                return Err(AddressRefused.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}
