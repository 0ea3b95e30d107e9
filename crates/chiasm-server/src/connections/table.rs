//! Slots for open connections, and the choice of the connection to close when all are taken.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_limit::Owner;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::connection::Connection;
use crate::connection_metrics::{ConnectionMetrics, OpenGuard};

/// The time after which a connection that waits for its client may be closed for any other.
const MAX_IDLE: Duration = Duration::from_secs(1);

/// The table of open connections, at most `limit`.
pub(super) struct ConnectionTable {
    limit: usize,
    state: Mutex<State>,
    freed: Notify,
    metrics: ConnectionMetrics,
}

#[derive(Default)]
struct State {
    slots: Vec<Option<Arc<Connection>>>,
    free: Vec<usize>,
    /// The number of connections of each owner that has any.
    open: HashMap<Owner, usize>,
}

impl ConnectionTable {
    /// Creates a table with `limit` slots, at least one.
    pub(super) fn new(limit: usize, metrics: ConnectionMetrics) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.max(1),
            state: Mutex::default(),
            freed: Notify::new(),
            metrics,
        })
    }

    /// Returns a slot if there is one. If all are taken, a connection that waits for its client may
    /// be closed for the new one: see [`State::closable_for`].
    pub(super) fn try_enter(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
    ) -> Option<ConnectionSlot> {
        let mut state = self.state();
        if state.count() >= self.limit {
            let index = state.closable_for(connection.owner(), self.limit)?;
            let closed = state.remove(index)?;
            self.metrics.count_closed_for_room();
            closed.close();
        }
        let index = state.insert(connection.clone());
        Some(ConnectionSlot {
            table: self.clone(),
            connection: connection.clone(),
            index,
            _open: self.metrics.track_open(),
        })
    }

    /// Waits until a slot has been freed since the last return.
    pub(super) async fn slot_freed(&self) {
        self.freed.notified().await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn owner_count(&self, owner: Owner) -> usize {
        self.open.get(&owner).copied().unwrap_or(0)
    }

    /// Returns the index of the connection to close for a new one of `owner` in a full table, if
    /// there is one.
    ///
    /// Only connections that wait for their clients qualify. Of these the owner with the most
    /// connections loses the one that has waited longest.
    ///
    /// A fair share is the table divided by its owners. If `owner` has less, owners with more than
    /// a fair share lose any waiting connection. Otherwise a connection has to have waited for
    /// [`MAX_IDLE`], and its owner must have at least as many as `owner`.
    fn closable_for(&self, owner: Owner, limit: usize) -> Option<usize> {
        let own_count = self.owner_count(owner);
        let fair_share = limit / (self.open.len() + usize::from(own_count == 0));
        let now = Instant::now();
        let closable = self.slots.iter().enumerate().filter_map(|(index, connection)| {
            let connection = connection.as_ref()?;
            let waited = connection.waiting_time(now)?;
            let their_count = self.owner_count(connection.owner());
            let by_share = own_count < fair_share && their_count > fair_share;
            let by_idle_time = waited >= MAX_IDLE && their_count >= own_count;
            (by_share || by_idle_time).then_some((their_count, waited, index))
        });
        closable.max().map(|(.., index)| index)
    }

    fn insert(&mut self, connection: Arc<Connection>) -> usize {
        *self.open.entry(connection.owner()).or_default() += 1;
        match self.free.pop() {
            Some(index) => {
                self.slots[index] = Some(connection);
                index
            }
            None => {
                self.slots.push(Some(connection));
                self.slots.len() - 1
            }
        }
    }

    fn remove(&mut self, index: usize) -> Option<Arc<Connection>> {
        let connection = self.slots.get_mut(index)?.take()?;
        self.free.push(index);
        let owner = connection.owner();
        if let Some(open) = self.open.get_mut(&owner) {
            *open -= 1;
            if *open == 0 {
                self.open.remove(&owner);
            }
        }
        Some(connection)
    }
}

/// A connection's slot in the table, freed on drop.
pub(super) struct ConnectionSlot {
    table: Arc<ConnectionTable>,
    connection: Arc<Connection>,
    index: usize,
    _open: OpenGuard,
}

impl ConnectionSlot {
    /// Returns the connection in the slot.
    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut state = self.table.state();
        let current = state.slots.get(self.index).and_then(Option::as_ref);
        // The slot of a connection that was closed for another one belongs to that one.
        if current.is_some_and(|current| Arc::ptr_eq(current, &self.connection)) {
            state.remove(self.index);
            self.table.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn connection(owner: u8) -> Arc<Connection> {
        Arc::new(Connection::from_peer(IpAddr::V4(Ipv4Addr::new(192, 0, 2, owner))))
    }

    fn table(limit: usize) -> Arc<ConnectionTable> {
        ConnectionTable::new(limit, ConnectionMetrics::default())
    }

    fn enter(table: &Arc<ConnectionTable>, owner: u8) -> Option<ConnectionSlot> {
        table.try_enter(&connection(owner))
    }

    fn is_open(slot: &ConnectionSlot) -> bool {
        let state = slot.table.state();
        state.slots[slot.index]
            .as_ref()
            .is_some_and(|current| Arc::ptr_eq(current, &slot.connection))
    }

    /// Returns the indices of the connections that are still open.
    fn open(slots: &[ConnectionSlot]) -> Vec<usize> {
        (0..slots.len()).filter(|&index| is_open(&slots[index])).collect()
    }

    const A: u8 = 1;
    const B: u8 = 2;
    const C: u8 = 3;

    #[tokio::test(start_paused = true)]
    async fn newcomer_replaces_longest_waiting_connection() {
        let table = table(4);
        let mut slots_of_a = Vec::new();
        for _ in 0..4 {
            slots_of_a.push(enter(&table, A).unwrap());
            tokio::time::advance(Duration::from_millis(10)).await;
        }
        // The first is engaged, and the second has just finished a request.
        slots_of_a[0].connection.engage();
        slots_of_a[1].connection.engage();
        slots_of_a[1].connection.finish_request();
        tokio::time::advance(Duration::from_millis(10)).await;
        let first = enter(&table, B).unwrap();
        assert_eq!(open(&slots_of_a), [0, 1, 3]);
        let second = enter(&table, B).unwrap();
        assert_eq!(open(&slots_of_a), [0, 1]);
        // Both have their fair share.
        assert!(enter(&table, B).is_none() && enter(&table, A).is_none());
        // The connection that has waited longest is closed for a third owner.
        let third = enter(&table, C).unwrap();
        assert_eq!((open(&slots_of_a), open(&[first, second, third])), (vec![0], vec![0, 1, 2]));
    }

    #[tokio::test(start_paused = true)]
    async fn engaged_connections_are_not_closed() {
        let table = table(2);
        let slots_of_a = [enter(&table, A).unwrap(), enter(&table, A).unwrap()];
        slots_of_a.iter().for_each(|place| place.connection.engage());
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert!(enter(&table, B).is_none());
        slots_of_a[1].connection.finish_request();
        let slot = enter(&table, B).unwrap();
        assert_eq!(open(&slots_of_a), [0]);
        // The slot of a connection that was closed for another one is not freed twice.
        let [first, second] = slots_of_a;
        drop(second);
        assert!(is_open(&slot));
        drop((first, slot));
        assert_eq!(table.state().count(), 0);
        assert!(table.state().open.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn single_owner_replaces_its_own_idle_connections() {
        let table = table(2);
        let slots_of_a = [enter(&table, A).unwrap(), enter(&table, A).unwrap()];
        assert!(enter(&table, A).is_none(), "their clients may be about to send requests");
        tokio::time::advance(MAX_IDLE).await;
        let third = enter(&table, A).unwrap();
        assert_eq!(open(&slots_of_a).len(), 1);
        assert!(is_open(&third));
    }

    #[tokio::test(start_paused = true)]
    async fn many_owners_do_not_keep_out_others() {
        let table = table(4);
        let slots: Vec<_> = (10..14).map(|owner| enter(&table, owner).unwrap()).collect();
        assert!(enter(&table, A).is_none());
        tokio::time::advance(MAX_IDLE).await;
        assert!(enter(&table, A).is_some());
        assert_eq!(open(&slots).len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn freed_slot_is_notified() {
        let table = table(1);
        let slot = enter(&table, A).unwrap();
        slot.connection.engage();
        assert!(enter(&table, A).is_none());
        assert!(tokio::time::timeout(MAX_IDLE, table.slot_freed()).await.is_err());
        drop(slot);
        table.slot_freed().await;
        assert!(enter(&table, A).is_some());
    }
}
