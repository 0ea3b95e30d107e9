//! The conversion of the address that an engine binds to into one that clients can connect to.

/// Returns an address to connect to. A wildcard such as `tcp://*:port`, which engines bind to,
/// becomes this machine.
pub(super) fn connectable(endpoint: &str) -> String {
    ["*", "0.0.0.0", "[::]"]
        .iter()
        .find_map(|any| endpoint.strip_prefix("tcp://")?.strip_prefix(any)?.strip_prefix(':'))
        .map_or_else(|| endpoint.to_owned(), |port| format!("tcp://127.0.0.1:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_host_becomes_loopback() {
        for (given, connected) in [
            ("tcp://*:5557", "tcp://127.0.0.1:5557"),
            ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
            ("tcp://[::]:5557", "tcp://127.0.0.1:5557"),
            ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
            ("tcp://0.0.0.0.example:5557", "tcp://0.0.0.0.example:5557"),
            ("ipc:///run/*:1", "ipc:///run/*:1"),
        ] {
            assert_eq!(connectable(given), connected);
        }
    }
}
