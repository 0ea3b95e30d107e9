//! Free ports.

use std::net::{Ipv4Addr, TcpListener};

use crate::error::EngineError;

/// Finds `N` different ports that are free on all interfaces.
///
/// Another process may take a port before the engine does. The engine then fails to start and must
/// be launched again with new ports. Prefer Unix sockets
/// ([`KvEventEndpoints::ipc`](super::KvEventEndpoints::ipc)) or port 0 where possible.
///
/// # Errors
/// [`EngineError::Port`]: the system has no free port.
pub fn free_ports<const N: usize>() -> Result<[u16; N], EngineError> {
    // The listeners are kept until the end, so that the ports differ.
    let mut listeners = Vec::with_capacity(N);
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(EngineError::Port)?;
        *port = listener.local_addr().map_err(EngineError::Port)?.port();
        listeners.push(listener);
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_are_distinct() {
        let ports = free_ports::<8>().unwrap();
        let listeners: Vec<_> = ports
            .iter()
            .map(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap())
            .collect();
        assert_eq!(listeners.len(), 8);
    }
}
