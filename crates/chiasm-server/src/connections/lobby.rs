//! Connections that have been accepted and wait for a place.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use chiasm_limit::Owner;
use tokio::time::{Interval, MissedTickBehavior};

use super::table::{Place, Table};
use crate::connection::Connection;

/// Most connections that wait; for a further one another is closed, or it is itself.
const MOST: usize = 1024;
/// How often those who wait look whether a connection has become idle for long enough. Places that
/// become free are told of.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Most owners for whom a place is looked for at once, as each look goes through the table.
const LOOKS: usize = 16;

/// The connections that wait. They are accepted first, and not left in the system's queue: whose a
/// connection is can't be seen before, and those who have to wait would stand before those who have
/// not. `S` is the connection's stream.
pub(super) struct Lobby<S> {
    table: Arc<Table>,
    waiting: VecDeque<(S, Arc<Connection>)>,
    look_again: Interval,
    /// Somebody has just got a place, so there may be more.
    more: bool,
}

impl<S> Lobby<S> {
    pub(super) fn before(table: Arc<Table>) -> Self {
        let mut look_again = tokio::time::interval(LOOK_AGAIN);
        look_again.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { table, waiting: VecDeque::new(), look_again, more: false }
    }

    /// A new connection's place, if there is one at once. Else it waits here. If too many do, the
    /// one that came last of the owner who has most of them is closed, which may be the new one.
    pub(super) fn arrive(&mut self, stream: S, connection: Arc<Connection>) -> Option<(S, Place)> {
        if let Some(place) = self.table.try_enter(&connection) {
            return Some((stream, place));
        }
        self.waiting.push_back((stream, connection));
        if self.waiting.len() > MOST {
            let last = self.last_of_the_greediest();
            self.waiting.remove(last);
        }
        None
    }

    /// Where the connection is that came last of the owner who has most of those that wait.
    fn last_of_the_greediest(&self) -> usize {
        // The number of each owner's connections, and where the last one is.
        let mut owners: HashMap<Owner, (usize, usize)> = HashMap::new();
        for (index, (_, connection)) in self.waiting.iter().enumerate() {
            let (count, last) = owners.entry(connection.owner()).or_default();
            (*count, *last) = (*count + 1, index);
        }
        owners.into_values().max().map_or(0, |(_, last)| last)
    }

    /// Waits until one of those who wait has a place. Nothing is lost if this is not waited for to
    /// its end.
    pub(super) async fn next(&mut self) -> (S, Place) {
        loop {
            if self.waiting.is_empty() {
                std::future::pending::<()>().await;
            }
            if !self.more {
                tokio::select! {
                    _ = self.look_again.tick() => {}
                    () = self.table.freed() => {}
                }
            }
            let entered = self.let_in();
            self.more = entered.is_some();
            if let Some(entered) = entered {
                return entered;
            }
        }
    }

    /// Lets in the first who may enter. What one owner's connection may not, its others may not
    /// either.
    fn let_in(&mut self) -> Option<(S, Place)> {
        let mut tried: Vec<Owner> = Vec::with_capacity(LOOKS);
        for index in 0..self.waiting.len() {
            let connection = self.waiting.get(index)?.1.clone();
            if tried.contains(&connection.owner()) {
                continue;
            }
            if let Some(place) = self.table.try_enter(&connection) {
                return self.waiting.remove(index).map(|(stream, _)| (stream, place));
            }
            tried.push(connection.owner());
            if tried.len() == LOOKS {
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

    fn lobby(places: usize) -> Lobby<u8> {
        Lobby::before(Table::new(places, ConnectionMetrics::default()))
    }

    fn arrive(lobby: &mut Lobby<u8>, owner: u8) -> Option<Place> {
        let connection = Connection::from_peer(Ipv4Addr::new(192, 0, 2, owner).into());
        lobby.arrive(owner, Arc::new(connection)).map(|(_, place)| place)
    }

    /// A lobby before a table whose places are all at work for one owner.
    fn full(places: usize) -> (Lobby<u8>, Vec<Place>) {
        let mut lobby = lobby(places);
        let places: Vec<_> = (0..places).map(|_| arrive(&mut lobby, A).unwrap()).collect();
        places.iter().for_each(|place| place.connection().engage());
        (lobby, places)
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_to_wait_keeps_out_nobody_behind_it() {
        let (mut lobby, places) = full(4);
        places[0].connection().answered();
        // Who has all of it does not get the place of a connection that was at work until now, but
        // who has nothing does.
        assert!(arrive(&mut lobby, A).is_none());
        assert!(arrive(&mut lobby, B).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_gets_what_becomes_free_at_once() {
        let (mut lobby, mut places) = full(3);
        assert!(arrive(&mut lobby, A).is_none() && arrive(&mut lobby, B).is_none());
        let started = Instant::now();
        let nobody = tokio::time::timeout(Duration::from_secs(3600), lobby.next()).await;
        assert!(nobody.is_err());
        places.truncate(1);
        let (first, second) = (lobby.next().await, lobby.next().await);
        assert_eq!((first.0, second.0), (A, B));
        assert_eq!(started.elapsed(), Duration::from_secs(3600));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_gets_the_place_of_one_that_has_nothing_to_do() {
        let (mut lobby, places) = full(2);
        places[0].connection().answered();
        assert!(arrive(&mut lobby, A).is_none());
        let started = Instant::now();
        let entered = lobby.next().await;
        assert_eq!(entered.0, A);
        assert!((1..2).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_wait_than_there_is_room_for() {
        let (mut lobby, places) = full(1);
        for _ in 0..2 * MOST {
            assert!(arrive(&mut lobby, A).is_none());
        }
        // Whoever comes late waits in the place of one of those, until it has as many itself.
        for _ in 0..MOST {
            assert!(arrive(&mut lobby, B).is_none());
        }
        assert_eq!(lobby.waiting.len(), MOST);
        assert_eq!(lobby.waiting.iter().filter(|(owner, _)| *owner == B).count(), MOST / 2);
        drop(places);
        assert_eq!(lobby.next().await.0, A);
    }
}
