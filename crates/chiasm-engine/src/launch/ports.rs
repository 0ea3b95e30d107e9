//! Ports that nobody listens on.

use std::net::{Ipv4Addr, TcpListener};

use crate::error::EngineError;

/// `N` different ports that were free on all interfaces a moment ago.
///
/// Another process may take one before the engine does. The engine then fails to start and is to be
/// launched again with new ports; what can use Unix sockets
/// ([`KvEventEndpoints::ipc`](super::KvEventEndpoints::ipc)) or pass a port of 0 is better off.
pub fn free_ports<const N: usize>() -> Result<[u16; N], EngineError> {
    // All are held until all are found, so that they differ.
    let mut held = Vec::with_capacity(N);
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(EngineError::Port)?;
        *port = listener.local_addr().map_err(EngineError::Port)?.port();
        held.push(listener);
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_differ_and_can_be_bound() {
        let ports = free_ports::<8>().unwrap();
        let held: Vec<_> = ports
            .iter()
            .map(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap())
            .collect();
        assert_eq!(held.len(), 8);
    }
}
