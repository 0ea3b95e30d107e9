//! Places for connections, and who has to make room when all are taken.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_limit::Owner;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::connection::Connection;
use crate::connection_metrics::{ConnectionMetrics, Open};

/// A connection whose client has been waited for so long may be closed for any other one.
const PATIENCE: Duration = Duration::from_secs(1);

/// The open connections, at most so many.
pub(super) struct Table {
    limit: usize,
    state: Mutex<State>,
    freed: Notify,
    metrics: ConnectionMetrics,
}

#[derive(Default)]
struct State {
    places: Vec<Option<Arc<Connection>>>,
    free: Vec<usize>,
    /// Connections of each owner that has any.
    open: HashMap<Owner, usize>,
}

impl Table {
    pub(super) fn new(limit: usize, metrics: ConnectionMetrics) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.max(1),
            state: Mutex::default(),
            freed: Notify::new(),
            metrics,
        })
    }

    /// A place, if there is one. If all are taken, a connection whose client is waited for may be
    /// closed for the new one: see [`State::closable_for`].
    pub(super) fn try_enter(self: &Arc<Self>, connection: &Arc<Connection>) -> Option<Place> {
        let mut state = self.state();
        if state.count() >= self.limit {
            let index = state.closable_for(connection.owner(), self.limit)?;
            let closed = state.remove(index)?;
            self.metrics.closed_for_others();
            closed.close();
        }
        let index = state.insert(connection.clone());
        Some(Place {
            table: self.clone(),
            connection: connection.clone(),
            index,
            _open: self.metrics.opened(),
        })
    }

    /// Waits until a place has become free since this returned last.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn count(&self) -> usize {
        self.places.len() - self.free.len()
    }

    fn of(&self, owner: Owner) -> usize {
        self.open.get(&owner).copied().unwrap_or(0)
    }

    /// The place of the connection to be closed for a new one of `owner` in a full table, if there
    /// is any: of those whose client is waited for the one whose owner has the most, and of these
    /// the one that has waited longest.
    ///
    /// A fair share is the table divided by its owners. If `owner` has less, owners with more than
    /// that lose any that waits. Otherwise one has to have waited for [`PATIENCE`], and its owner
    /// not to have fewer than the new one's.
    fn closable_for(&self, owner: Owner, limit: usize) -> Option<usize> {
        let mine = self.of(owner);
        let fair = limit / (self.open.len() + usize::from(mine == 0));
        let now = Instant::now();
        let closable = self.places.iter().enumerate().filter_map(|(index, connection)| {
            let connection = connection.as_ref()?;
            let waits = connection.waits(now)?;
            let theirs = self.of(connection.owner());
            let by_share = mine < fair && theirs > fair;
            let by_patience = waits >= PATIENCE && theirs >= mine;
            (by_share || by_patience).then_some((theirs, waits, index))
        });
        closable.max().map(|(.., index)| index)
    }

    fn insert(&mut self, connection: Arc<Connection>) -> usize {
        *self.open.entry(connection.owner()).or_default() += 1;
        match self.free.pop() {
            Some(index) => {
                self.places[index] = Some(connection);
                index
            }
            None => {
                self.places.push(Some(connection));
                self.places.len() - 1
            }
        }
    }

    fn remove(&mut self, index: usize) -> Option<Arc<Connection>> {
        let connection = self.places.get_mut(index)?.take()?;
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

/// A connection's place in the table, until it is dropped.
pub(super) struct Place {
    table: Arc<Table>,
    connection: Arc<Connection>,
    index: usize,
    _open: Open,
}

impl Place {
    /// The connection that has it.
    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.table.state();
        let place = state.places.get(self.index).and_then(Option::as_ref);
        // A connection that had to make room has lost its place to another one.
        if place.is_some_and(|there| Arc::ptr_eq(there, &self.connection)) {
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

    fn table(limit: usize) -> Arc<Table> {
        Table::new(limit, ConnectionMetrics::default())
    }

    fn enter(table: &Arc<Table>, owner: u8) -> Option<Place> {
        table.try_enter(&connection(owner))
    }

    fn has_place(place: &Place) -> bool {
        let state = place.table.state();
        state.places[place.index]
            .as_ref()
            .is_some_and(|there| Arc::ptr_eq(there, &place.connection))
    }

    /// Tells which of these connections are still there.
    fn left(places: &[Place]) -> Vec<usize> {
        (0..places.len()).filter(|&index| has_place(&places[index])).collect()
    }

    const A: u8 = 1;
    const B: u8 = 2;
    const C: u8 = 3;

    #[tokio::test(start_paused = true)]
    async fn who_comes_later_gets_the_place_that_has_waited_longest() {
        let table = table(4);
        let mut of_a = Vec::new();
        for _ in 0..4 {
            of_a.push(enter(&table, A).unwrap());
            tokio::time::advance(Duration::from_millis(10)).await;
        }
        // The first one is answered, the second one has just been.
        of_a[0].connection.engage();
        of_a[1].connection.engage();
        of_a[1].connection.answered();
        tokio::time::advance(Duration::from_millis(10)).await;
        let first = enter(&table, B).unwrap();
        assert_eq!(left(&of_a), [0, 1, 3]);
        let second = enter(&table, B).unwrap();
        assert_eq!(left(&of_a), [0, 1]);
        // Both have their fair share.
        assert!(enter(&table, B).is_none() && enter(&table, A).is_none());
        // The one that has waited longest makes room for a third owner.
        let third = enter(&table, C).unwrap();
        assert_eq!((left(&of_a), left(&[first, second, third])), (vec![0], vec![0, 1, 2]));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_at_work_are_left_alone() {
        let table = table(2);
        let of_a = [enter(&table, A).unwrap(), enter(&table, A).unwrap()];
        of_a.iter().for_each(|place| place.connection.engage());
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert!(enter(&table, B).is_none());
        of_a[1].connection.answered();
        let place = enter(&table, B).unwrap();
        assert_eq!(left(&of_a), [0]);
        // The place of a connection that had to go is not freed twice.
        let [first, second] = of_a;
        drop(second);
        assert!(has_place(&place));
        drop((first, place));
        assert_eq!(table.state().count(), 0);
        assert!(table.state().open.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_alone_replaces_what_has_waited_for_a_while() {
        let table = table(2);
        let of_a = [enter(&table, A).unwrap(), enter(&table, A).unwrap()];
        assert!(enter(&table, A).is_none(), "they may be about to ask");
        tokio::time::advance(PATIENCE).await;
        let third = enter(&table, A).unwrap();
        assert_eq!(left(&of_a).len(), 1);
        assert!(has_place(&third));
    }

    #[tokio::test(start_paused = true)]
    async fn owners_without_number_do_not_keep_others_out() {
        let table = table(4);
        let places: Vec<_> = (10..14).map(|owner| enter(&table, owner).unwrap()).collect();
        assert!(enter(&table, A).is_none());
        tokio::time::advance(PATIENCE).await;
        assert!(enter(&table, A).is_some());
        assert_eq!(left(&places).len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_that_becomes_free_is_told_of() {
        let table = table(1);
        let place = enter(&table, A).unwrap();
        place.connection.engage();
        assert!(enter(&table, A).is_none());
        assert!(tokio::time::timeout(PATIENCE, table.freed()).await.is_err());
        drop(place);
        table.freed().await;
        assert!(enter(&table, A).is_some());
    }
}
