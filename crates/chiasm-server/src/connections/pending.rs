//! Accepted connections that wait for a slot.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use chiasm_limit::Owner;
use tokio::time::{Interval, MissedTickBehavior};

use super::table::{ConnectionSlot, ConnectionTable};
use crate::connection::Connection;

/// The maximum number of pending connections. One more connection has one of them closed, which may
/// be the new one.
const MAX_PENDING: usize = 1024;
/// The interval at which pending connections check whether an open one has waited for its client
/// long enough to be closed. Freed slots need no polling: the table notifies about them.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// The maximum number of owners that are tried in one scan, as each try goes through the whole
/// table.
const MAX_OWNERS_PER_SCAN: usize = 16;

/// The pending connections. `S` is a connection's stream.
///
/// Connections are accepted before they have a slot and not left in the system's backlog, as their
/// owner is only known once they are accepted: in the backlog, connections that have to wait would
/// block those that don't.
pub(super) struct PendingConnections<S> {
    table: Arc<ConnectionTable>,
    waiting: VecDeque<(S, Arc<Connection>)>,
    retry: Interval,
    /// `true` if a connection has just entered the table, so that there may be slots for more.
    may_admit_more: bool,
}

impl<S> PendingConnections<S> {
    /// Creates an empty queue in front of a table.
    pub(super) fn new(table: Arc<ConnectionTable>) -> Self {
        let mut retry = tokio::time::interval(RETRY_INTERVAL);
        retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { table, waiting: VecDeque::new(), retry, may_admit_more: false }
    }

    /// Returns the slot of a new connection if there is one at once; otherwise the connection
    /// waits.
    ///
    /// If too many connections wait, the newest one of the owner with the most pending connections
    /// is closed, which may be the new one.
    pub(super) fn enter_or_wait(
        &mut self,
        stream: S,
        connection: Arc<Connection>,
    ) -> Option<(S, ConnectionSlot)> {
        if let Some(slot) = self.table.try_enter(&connection) {
            return Some((stream, slot));
        }
        self.waiting.push_back((stream, connection));
        if self.waiting.len() > MAX_PENDING {
            let index = self.newest_of_largest_owner();
            self.waiting.remove(index);
        }
        None
    }

    /// Returns the index of the newest connection of the owner with the most pending connections.
    fn newest_of_largest_owner(&self) -> usize {
        // The number of each owner's connections, and the index of its newest.
        let mut owners: HashMap<Owner, (usize, usize)> = HashMap::new();
        for (index, (_, connection)) in self.waiting.iter().enumerate() {
            let (count, last) = owners.entry(connection.owner()).or_default();
            *count += 1;
            *last = index;
        }
        owners.into_values().max().map_or(0, |(_, last)| last)
    }

    /// Waits until a pending connection gets a slot. Cancel-safe.
    pub(super) async fn next(&mut self) -> (S, ConnectionSlot) {
        loop {
            if self.waiting.is_empty() {
                std::future::pending::<()>().await;
            }
            if !self.may_admit_more {
                tokio::select! {
                    _ = self.retry.tick() => {}
                    () = self.table.slot_freed() => {}
                }
            }
            let entered = self.try_admit();
            self.may_admit_more = entered.is_some();
            if let Some(entered) = entered {
                return entered;
            }
        }
    }

    /// Admits the first connection that gets a slot. If one connection of an owner gets none, its
    /// others are not tried.
    fn try_admit(&mut self) -> Option<(S, ConnectionSlot)> {
        let mut tried: Vec<Owner> = Vec::with_capacity(MAX_OWNERS_PER_SCAN);
        for index in 0..self.waiting.len() {
            let connection = self.waiting.get(index)?.1.clone();
            if tried.contains(&connection.owner()) {
                continue;
            }
            if let Some(slot) = self.table.try_enter(&connection) {
                return self.waiting.remove(index).map(|(stream, _)| (stream, slot));
            }
            tried.push(connection.owner());
            if tried.len() == MAX_OWNERS_PER_SCAN {
                break;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::time::Instant;

    use super::*;
    use crate::connection_metrics::ConnectionMetrics;

    const A: u8 = 1;
    const B: u8 = 2;

    /// An empty queue in front of a table with `slots` slots.
    fn pending(slots: usize) -> PendingConnections<u8> {
        PendingConnections::new(ConnectionTable::new(slots, ConnectionMetrics::default()))
    }

    fn arrive(pending: &mut PendingConnections<u8>, owner: u8) -> Option<ConnectionSlot> {
        let connection = Connection::from_peer(Ipv4Addr::new(192, 0, 2, owner).into());
        pending.enter_or_wait(owner, Arc::new(connection)).map(|(_, slot)| slot)
    }

    /// An empty queue in front of a table that is full of engaged connections of owner A.
    fn full(slots: usize) -> (PendingConnections<u8>, Vec<ConnectionSlot>) {
        let mut pending = pending(slots);
        let slots: Vec<_> = (0..slots).map(|_| arrive(&mut pending, A).unwrap()).collect();
        slots.iter().for_each(|slot| slot.connection().engage());
        (pending, slots)
    }

    #[tokio::test(start_paused = true)]
    async fn pending_connection_does_not_block_other_owners() {
        let (mut pending, slots) = full(4);
        slots[0].connection().finish_request();
        // An owner with all slots does not get the slot of a connection that was engaged until now,
        // but an owner without any does.
        assert!(arrive(&mut pending, A).is_none());
        assert!(arrive(&mut pending, B).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn pending_connections_get_freed_slots_at_once() {
        let (mut pending, mut slots) = full(3);
        assert!(arrive(&mut pending, A).is_none() && arrive(&mut pending, B).is_none());
        let started = Instant::now();
        let entered = tokio::time::timeout(Duration::from_secs(3600), pending.next()).await;
        assert!(entered.is_err());
        slots.truncate(1);
        let first = pending.next().await;
        let second = pending.next().await;
        assert_eq!((first.0, second.0), (A, B));
        assert_eq!(started.elapsed(), Duration::from_secs(3600));
    }

    #[tokio::test(start_paused = true)]
    async fn pending_connection_replaces_an_idle_one() {
        let (mut pending, slots) = full(2);
        slots[0].connection().finish_request();
        assert!(arrive(&mut pending, A).is_none());
        let started = Instant::now();
        let entered = pending.next().await;
        assert_eq!(entered.0, A);
        assert!((1..2).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn pending_connections_are_bounded() {
        let (mut pending, slots) = full(1);
        for _ in 0..2 * MAX_PENDING {
            assert!(arrive(&mut pending, A).is_none());
        }
        // Connections of B replace those of A until both owners have as many.
        for _ in 0..MAX_PENDING {
            assert!(arrive(&mut pending, B).is_none());
        }
        assert_eq!(pending.waiting.len(), MAX_PENDING);
        assert_eq!(
            pending.waiting.iter().filter(|(owner, _)| *owner == B).count(),
            MAX_PENDING / 2
        );
        drop(slots);
        assert_eq!(pending.next().await.0, A);
    }
}
