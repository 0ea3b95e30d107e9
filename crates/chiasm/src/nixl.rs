//! Starts NIXL as the command line asks: to lend tensors to agents, or to read lent tensors.

use std::cmp::Reverse;
use std::env;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chiasm_agent::Lending;
use chiasm_backend::PrivateNetwork;
use chiasm_nixl::{Lender, NixlError, Reader, Settings};
use tokio::task::JoinError;

use crate::cli::{NixlArgs, ServeArgs, is_local_address};
use crate::error::CliError;

const LIBRARY: &str = "libnixl_capi.so";
/// UCX's variable with the network devices that it may use; an operator may set it.
const NET_DEVICES: &str = "UCX_NET_DEVICES";

/// The reason why NIXL can't be used.
#[derive(Debug, thiserror::Error)]
enum NixlUnavailable {
    /// The Python environment of this `vllm` lacks the library.
    #[error("there is no {LIBRARY} in the environment of {} (pip install nixl)", .0.display())]
    NoLibrary(PathBuf),
    #[error(transparent)]
    Nixl(#[from] NixlError),
    /// The thread that opened the library panicked.
    #[error(transparent)]
    Task(#[from] JoinError),
}

/// Starts the lender of a frontend's tensors, if `--nixl-library` is given. If NIXL can't be used,
/// logs and counts the reason; tensors are then sent in messages.
pub(crate) async fn start_lending(args: &ServeArgs) -> Result<Option<Lending>, CliError> {
    let lender = start_nixl(args, |settings| Lender::start(&settings)).await?;
    Ok(lender.map(|lender| match lender {
        Ok(lender) => Lending::new(Arc::new(lender)),
        Err(error) => Lending::unavailable(error),
    }))
}

/// Starts the reader of lent tensors for an agent, if `--nixl-library` is given and NIXL can be
/// used.
pub(crate) async fn start_reader(args: &ServeArgs) -> Result<Option<Reader>, CliError> {
    Ok(start_nixl(args, |settings| Reader::start(&settings)).await?.and_then(Result::ok))
}

/// Opens the library and calls `start`. Returns `None` without `--nixl-library`.
async fn start_nixl<T: Send + 'static>(
    args: &ServeArgs,
    start: impl FnOnce(Settings) -> Result<T, NixlError> + Send + 'static,
) -> Result<Option<Result<T, NixlUnavailable>>, CliError> {
    let NixlArgs { nixl_library, nixl_pool_bytes, nixl_deadline, nixl_private_network } =
        &args.agents.nixl;
    let Some(library) = nixl_library else {
        return match nixl_private_network {
            Some(_) => {
                Err(CliError::Usage("--nixl-private-network requires --nixl-library".to_owned()))
            }
            None => Ok(None),
        };
    };
    let devices = devices(*nixl_private_network)?;
    let library = match library.to_str() {
        Some("auto") => library_beside_vllm(&args.engines.vllm),
        _ => Ok(library.clone()),
    };
    let pool_bytes = *nixl_pool_bytes;
    let read_timeout = *nixl_deadline;
    let logged_devices = devices.clone();
    // Blocks for most of a second.
    let started = tokio::task::spawn_blocking(move || {
        let settings = Settings { library: library?, pool_bytes, read_timeout, devices };
        let library = settings.library.clone();
        Ok::<_, NixlUnavailable>((start(settings)?, library))
    });
    let started = started.await.unwrap_or_else(|error| Err(error.into()));
    match &started {
        Ok((_, library)) => {
            let library = library.display();
            let devices = logged_devices.as_deref().unwrap_or("those of UCX_NET_DEVICES");
            tracing::info!(
                %library,
                devices,
                pool_bytes,
                "NIXL is ready: agents read tensors from the memory of frontends"
            );
        }
        Err(error) => tracing::warn!(%error, "NIXL can't be used; tensors are sent in messages"),
    }
    Ok(Some(started.map(|(started, _)| started)))
}

/// Returns the network device that UCX may use: that of the private network, or the loopback device
/// without one. Returns `None` if the operator has set [`NET_DEVICES`].
fn devices(network: Option<PrivateNetwork>) -> Result<Option<String>, CliError> {
    let invalid = |why: String| Err(CliError::Usage(format!("--nixl-private-network: {why}")));
    if let Some(PrivateNetwork { address, .. }) = network
        && !is_local_address(address)
    {
        return invalid(format!("{address} is not an address of this machine"));
    }
    if env::var_os(NET_DEVICES).is_some() {
        return Ok(None);
    }
    let Some(PrivateNetwork { address, .. }) = network else { return Ok(Some("lo".to_owned())) };
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    match interface(address, &read("/proc/net/route"), &read("/proc/net/if_inet6")) {
        Some(interface) => Ok(Some(interface)),
        None => invalid(format!("the interface of {address} is unknown: set {NET_DEVICES} to it")),
    }
}

/// Returns the interface of an address of this machine, from the kernel's tables of routes and of
/// IPv6 addresses.
fn interface(address: IpAddr, routes: &str, addresses: &str) -> Option<String> {
    match address {
        address if address.is_loopback() => Some("lo".to_owned()),
        IpAddr::V4(address) => {
            let address = u32::from(address);
            let direct = routes.lines().skip(1).filter_map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                // The digits are those of a native 32-bit word that holds network byte order.
                let number =
                    |at: usize| u32::from_str_radix(words.get(at)?, 16).ok().map(u32::to_be);
                let destination = number(1)?;
                let gateway = number(2)?;
                let mask = number(7)?;
                let reaches = gateway == 0 && mask != 0 && address & mask == destination;
                reaches.then_some((mask.count_ones(), *words.first()?))
            });
            direct.max_by_key(|(bits, _)| *bits).map(|(_, interface)| interface.to_owned())
        }
        IpAddr::V6(address) => {
            let digits = format!("{:032x}", u128::from(address));
            let mut lines = addresses.lines().map(str::split_whitespace);
            lines.find_map(|mut words| {
                (words.next() == Some(&digits)).then(|| words.last().map(str::to_owned))?
            })
        }
    }
}

/// Finds the library of NIXL's wheel in the Python environment of this `vllm`.
fn library_beside_vllm(vllm: &Path) -> Result<PathBuf, NixlUnavailable> {
    let not_found = || NixlUnavailable::NoLibrary(vllm.to_owned());
    let program = if vllm.components().count() == 1 {
        env::split_paths(&env::var_os("PATH").unwrap_or_default())
            .map(|dir| dir.join(vllm))
            .find(|path| path.is_file())
    } else {
        Some(vllm.to_owned())
    };
    let root =
        program.as_deref().and_then(Path::parent).and_then(Path::parent).ok_or_else(not_found)?;
    let entries = |dir: &Path, prefix: &str| {
        let paths = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let has_prefix = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        };
        let mut entries: Vec<PathBuf> = paths.filter(has_prefix).collect();
        // The newest first. python3.12 is newer than python3.9, so a longer name counts first.
        entries.sort_by_cached_key(|path| Reverse((path.as_os_str().len(), path.clone())));
        entries
    };
    let pythons = entries(&root.join("lib"), "python3");
    let packages = pythons.into_iter().map(|python| python.join("site-packages"));
    let folders = packages.flat_map(|packages| entries(&packages, ".nixl_cu"));
    let mut libraries = folders.map(|folder| folder.join(LIBRARY));
    libraries.find(|library| library.is_file()).ok_or_else(not_found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0
eth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0
ib0 0000000A 00000000 0001 0 0 0 000000FF 0 0 0
ib1 0000010A 00000000 0001 0 0 0 0000FFFF 0 0 0
";
    const ADDRESSES: &str = "00000000000000000000000000000001 01 80 10 80       lo
fd000000000000000000000000000002 04 40 00 82     eth0
";

    #[test]
    fn interface_of_longest_matching_route_is_chosen() {
        let interface_of = |address: &str| interface(address.parse().unwrap(), ROUTES, ADDRESSES);
        for (address, expected) in [
            ("127.0.0.2", Some("lo")),
            ("192.0.2.7", Some("eth0")),
            ("10.3.0.1", Some("ib0")),
            ("10.0.1.9", Some("ib0")),
            ("10.1.0.9", Some("ib1")),
            ("10.0.0.1", Some("ib0")),
            ("203.0.113.1", None),
            ("fd00::2", Some("eth0")),
            ("::1", Some("lo")),
            ("fd00::3", None),
        ] {
            assert_eq!(interface_of(address).as_deref(), expected, "{address}");
        }
        assert_eq!(interface("10.1.0.9".parse().unwrap(), "", ""), None);
    }

    #[test]
    fn library_is_found_in_vllm_environment() {
        let root = tempfile::tempdir().unwrap();
        let vllm = root.path().join("bin/vllm");
        let error = library_beside_vllm(&vllm).unwrap_err().to_string();
        assert!(error.contains("pip install nixl"), "{error}");
        let packages = root.path().join("lib/python3.12/site-packages");
        for name in [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs", "nixl_cu13.libs"] {
            fs::create_dir_all(packages.join(name)).unwrap();
            fs::write(packages.join(name).join(LIBRARY), "").unwrap();
        }
        assert_eq!(
            library_beside_vllm(&vllm).unwrap(),
            packages.join(".nixl_cu13.mesonpy.libs").join(LIBRARY)
        );
    }

    #[test]
    fn private_network_needs_address_of_this_machine() {
        let devices_of = |text: &str| devices(Some(text.parse().unwrap()));
        let error = devices_of("192.0.2.77/24").unwrap_err();
        assert!(matches!(&error, CliError::Usage(_)), "{error}");
        assert!(error.to_string().contains("not an address of this machine"), "{error}");
        if env::var_os(NET_DEVICES).is_none() {
            assert_eq!(devices(None).unwrap().as_deref(), Some("lo"));
            assert_eq!(devices_of("127.0.0.2/8").unwrap().as_deref(), Some("lo"));
        }
    }
}
