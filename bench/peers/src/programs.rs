//! Ports and logs of programs that are started.

use std::error::Error;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::path::Path;

/// Below the ports that systems give to whoever wants any: a program that is being started would
/// get one that another was promised.
const PORTS: Range<u16> = 20_000..30_000;

/// Returns an address that nobody listens on now.
///
/// # Errors
/// All ports are taken.
pub fn free_address() -> Result<SocketAddr, Box<dyn Error>> {
    let mut ports = std::iter::repeat_with(|| fastrand::u16(PORTS)).take(PORTS.len());
    let free = ports.find_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()).ok_or("no port is free")?;
    Ok(free.local_addr()?)
}

/// Returns an error about a program, with the last lines of its log.
pub fn failed(name: &str, what: &str, log: &Path, lines: usize) -> Box<dyn Error> {
    let log = fs::read(log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let all: Vec<&str> = log.lines().collect();
    let tail = all[all.len().saturating_sub(lines)..].join("\n");
    format!("{name} {what}; the end of its log:\n{tail}").into()
}
