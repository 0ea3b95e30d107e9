//! How both kinds of sockets are opened and watched.

use std::time::Duration;

use futures_util::{Stream, StreamExt};
use zeromq::{SocketEvent, SocketOptions};

/// Options of a socket that gives up connecting after a while: an engine that isn't there yet is not an error, the zeromq
/// crate tries until then.
pub(super) fn options(connect_timeout: Duration) -> SocketOptions {
    let mut options = SocketOptions::default();
    options.connect_timeout(connect_timeout);
    options
}

/// Returns once a socket's only peer is gone. Receiving does not tell: it waits for another peer.
pub(super) async fn disconnected(monitor: &mut (impl Stream<Item = SocketEvent> + Unpin)) {
    while let Some(event) = monitor.next().await {
        if matches!(event, SocketEvent::Disconnected(_)) {
            return;
        }
    }
}

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
