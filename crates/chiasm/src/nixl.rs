//! What lends tensors to agents, or reads them out of frontends' memory, as the command line says.

use std::env;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chiasm_agent::Lending;
use chiasm_backend::PrivateNetwork;
use chiasm_nixl::{Lender, NixlError, Reader, Settings};
use tokio::task::JoinError;

use crate::cli::{NixlArgs, ServeArgs, is_of_this_machine};
use crate::error::CliError;

const LIBRARY: &str = "libnixl_capi.so";
/// What an operator may say to UCX.
const NET_DEVICES: &str = "UCX_NET_DEVICES";

/// NIXL can't be used.
#[derive(Debug, thiserror::Error)]
enum NoNixl {
    /// The environment of this `vllm` has no library.
    #[error("there is no {LIBRARY} in the environment of {} (pip install nixl)", .0.display())]
    NoLibrary(PathBuf),
    #[error(transparent)]
    Nixl(#[from] NixlError),
    /// The thread that opened the library has panicked.
    #[error(transparent)]
    Task(#[from] JoinError),
}

/// What a frontend lends tensors with, if it is to. Where NIXL can't be used that is told and
/// counted, and tensors are sent.
pub(crate) async fn lending(args: &ServeArgs) -> Result<Option<Lending>, CliError> {
    let lender = started(args, |settings| Lender::start(&settings)).await?;
    Ok(lender.map(|lender| match lender {
        Ok(lender) => Lending::new(Arc::new(lender)),
        Err(error) => Lending::unavailable(error),
    }))
}

/// What an agent reads lent tensors with, if it is to and NIXL can be used.
pub(crate) async fn reader(args: &ServeArgs) -> Result<Option<Reader>, CliError> {
    if args.agents.nixl.nixl_library.is_some() && !args.agents.take_tensors {
        return Err(CliError::Usage(
            "--nixl-library: an agent reads tensors where it takes any (--take-tensors)".to_owned(),
        ));
    }
    Ok(started(args, |settings| Reader::start(&settings)).await?.and_then(Result::ok))
}

async fn started<T: Send + 'static>(
    args: &ServeArgs,
    start: impl FnOnce(Settings) -> Result<T, NixlError> + Send + 'static,
) -> Result<Option<Result<T, NoNixl>>, CliError> {
    let NixlArgs { nixl_library, nixl_pool_bytes, nixl_deadline, nixl_private_network } =
        &args.agents.nixl;
    let Some(library) = nixl_library else {
        return match nixl_private_network {
            Some(_) => Err(CliError::Usage(
                "--nixl-private-network is given without --nixl-library".to_owned(),
            )),
            None => Ok(None),
        };
    };
    let devices = devices(*nixl_private_network)?;
    let found = match library.to_str() {
        Some("auto") => beside_vllm(&args.engines.vllm),
        _ => Ok(library.clone()),
    };
    let (pool_bytes, within) = (*nixl_pool_bytes, *nixl_deadline);
    let told = devices.clone();
    // Takes most of a second.
    let started = tokio::task::spawn_blocking(move || {
        let settings = Settings { library: found?, pool_bytes, within, devices };
        let library = settings.library.clone();
        Ok::<_, NoNixl>((start(settings)?, library))
    });
    let started = started.await.unwrap_or_else(|error| Err(error.into()));
    match &started {
        Ok((_, library)) => {
            let (library, devices) =
                (library.display(), told.as_deref().unwrap_or("those of UCX_NET_DEVICES"));
            tracing::info!(%library, devices, pool_bytes, "agents read tensors by NIXL");
        }
        Err(error) => tracing::warn!(%error, "NIXL can't be used: tensors are sent"),
    }
    Ok(Some(started.map(|(started, _)| started)))
}

/// The network devices that UCX may use: as the operator says to UCX himself, else that of the
/// private network, else this machine's own.
fn devices(network: Option<PrivateNetwork>) -> Result<Option<String>, CliError> {
    let wrong = |why: String| Err(CliError::Usage(format!("--nixl-private-network: {why}")));
    if let Some(PrivateNetwork { address, .. }) = network
        && !is_of_this_machine(address)
    {
        return wrong(format!("{address} is no address of this machine"));
    }
    if env::var_os(NET_DEVICES).is_some() {
        return Ok(None);
    }
    let Some(PrivateNetwork { address, .. }) = network else { return Ok(Some("lo".to_owned())) };
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    match interface(address, &read("/proc/net/route"), &read("/proc/net/if_inet6")) {
        Some(interface) => Ok(Some(interface)),
        None => {
            wrong(format!("which interface has {address} can't be told: name it in {NET_DEVICES}"))
        }
    }
}

/// The interface of an address of this machine, by the kernel's tables of routes and of IPv6
/// addresses.
fn interface(address: IpAddr, routes: &str, addresses: &str) -> Option<String> {
    match address {
        address if address.is_loopback() => Some("lo".to_owned()),
        IpAddr::V4(address) => {
            let address = u32::from(address);
            let direct = routes.lines().skip(1).filter_map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                // The kernel's own order of bytes, as the hexadecimal digits of a word of memory.
                let number =
                    |at: usize| u32::from_str_radix(words.get(at)?, 16).ok().map(u32::to_be);
                let (destination, gateway, mask) = (number(1)?, number(2)?, number(7)?);
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

/// The library of NIXL's wheel in the environment of this `vllm`.
fn beside_vllm(vllm: &Path) -> Result<PathBuf, NoNixl> {
    let none = || NoNixl::NoLibrary(vllm.to_owned());
    let program = match vllm.components().count() {
        1 => env::split_paths(&env::var_os("PATH").unwrap_or_default())
            .map(|dir| dir.join(vllm))
            .find(|path| path.is_file()),
        _ => Some(vllm.to_owned()),
    };
    let root = program.as_deref().and_then(Path::parent).and_then(Path::parent).ok_or_else(none)?;
    let below = |dir: &Path, starts: &str| {
        let names = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_one = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(starts))
        };
        let mut found: Vec<PathBuf> = names.filter(is_one).collect();
        // What is newest by its name.
        found.sort_by(|one, other| other.cmp(one));
        found
    };
    let packages =
        below(&root.join("lib"), "python3").into_iter().map(|python| python.join("site-packages"));
    let folders = packages.flat_map(|packages| below(&packages, ".nixl_cu"));
    folders.map(|folder| folder.join(LIBRARY)).find(|library| library.is_file()).ok_or_else(none)
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
    fn an_address_has_the_interface_of_its_nearest_route() {
        let of = |address: &str| interface(address.parse().unwrap(), ROUTES, ADDRESSES);
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
            assert_eq!(of(address).as_deref(), expected, "{address}");
        }
        assert_eq!(interface("10.1.0.9".parse().unwrap(), "", ""), None);
    }

    #[test]
    fn the_library_of_vllms_environment_is_found() {
        let root = tempfile::tempdir().unwrap();
        let vllm = root.path().join("bin/vllm");
        let error = beside_vllm(&vllm).unwrap_err().to_string();
        assert!(error.contains("pip install nixl"), "{error}");
        let packages = root.path().join("lib/python3.12/site-packages");
        for name in [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs", "nixl_cu13.libs"] {
            fs::create_dir_all(packages.join(name)).unwrap();
            fs::write(packages.join(name).join(LIBRARY), "").unwrap();
        }
        assert_eq!(
            beside_vllm(&vllm).unwrap(),
            packages.join(".nixl_cu13.mesonpy.libs").join(LIBRARY)
        );
    }

    #[test]
    fn a_network_has_to_be_this_machines() {
        let of = |text: &str| devices(Some(text.parse().unwrap()));
        assert!(
            matches!(of("192.0.2.77/24"), Err(CliError::Usage(why)) if why.contains("no address of this machine"))
        );
        if env::var_os(NET_DEVICES).is_none() {
            assert_eq!(devices(None).unwrap().as_deref(), Some("lo"));
            assert_eq!(of("127.0.0.2/8").unwrap().as_deref(), Some("lo"));
        }
    }
}
