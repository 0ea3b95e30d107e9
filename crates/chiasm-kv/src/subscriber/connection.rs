//! Where an engine that says where it publishes can be reached.

/// Engines bind to `tcp://*:port`, which can't be connected to: it is this machine.
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
    fn only_wildcard_hosts_become_this_machine() {
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
