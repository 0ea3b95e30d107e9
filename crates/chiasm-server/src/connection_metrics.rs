//! Metrics of client connections.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

/// Counts of open connections, and of those that the server closed, by cause. Clones share the
/// counts.
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
            "Connections closed by the server: the slot of an idle connection was needed (room), \
             the client did not read its answer for too long (unread), or the TLS handshake \
             failed (handshake)",
            self.closed.clone(),
        );
        // All series exist from the start.
        for cause in [ROOM, UNREAD, HANDSHAKE] {
            drop(self.closed.get_or_create(&cause));
        }
    }

    /// Counts a connection as open until the guard is dropped.
    pub(crate) fn track_open(&self) -> OpenGuard {
        self.open.inc();
        OpenGuard(self.open.clone())
    }

    /// Counts a connection that was closed because its slot was needed.
    pub(crate) fn count_closed_for_room(&self) {
        self.closed.get_or_create(&ROOM).inc();
    }

    /// Counts a connection that was closed because its client did not read.
    pub(crate) fn count_closed_unread(&self) {
        self.closed.get_or_create(&UNREAD).inc();
    }

    /// Counts a connection that was closed because the TLS handshake failed.
    pub(crate) fn count_failed_handshake(&self) {
        self.closed.get_or_create(&HANDSHAKE).inc();
    }
}

const ROOM: CauseLabel = CauseLabel { cause: "room" };
const UNREAD: CauseLabel = CauseLabel { cause: "unread" };
const HANDSHAKE: CauseLabel = CauseLabel { cause: "handshake" };

/// Counts a connection as open until this is dropped.
pub(crate) struct OpenGuard(Gauge);

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}
