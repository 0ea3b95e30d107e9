//! Counts of connections.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

/// How many connections are open, and why some were closed. Clones are the same counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionMetrics {
    open: Gauge,
    closed: Family<CauseLabel, Counter>,
}

impl ConnectionMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("connections", "Open connections of clients", self.open.clone());
        r.register(
            "closed_connections",
            "Connections closed by the server: their place was needed while their client was waited for (room), nothing of an \
             answer was read for too long (unread), or the client did not agree on TLS in time (handshake)",
            self.closed.clone(),
        );
        // All exist from the start.
        for cause in [ROOM, UNREAD, HANDSHAKE] {
            drop(self.closed.get_or_create(&cause));
        }
    }

    /// Counts a connection as open until the guard is dropped.
    pub(crate) fn opened(&self) -> Open {
        self.open.inc();
        Open(self.open.clone())
    }

    /// A connection was closed because its place was needed.
    pub(crate) fn closed_for_others(&self) {
        self.closed.get_or_create(&ROOM).inc();
    }

    /// A connection was closed because its client did not read.
    pub(crate) fn closed_unread(&self) {
        self.closed.get_or_create(&UNREAD).inc();
    }

    /// A connection was closed because its client did not agree on TLS.
    pub(crate) fn closed_unencrypted(&self) {
        self.closed.get_or_create(&HANDSHAKE).inc();
    }
}

const ROOM: CauseLabel = CauseLabel { cause: "room" };
const UNREAD: CauseLabel = CauseLabel { cause: "unread" };
const HANDSHAKE: CauseLabel = CauseLabel { cause: "handshake" };

/// One open connection.
pub(crate) struct Open(Gauge);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}
