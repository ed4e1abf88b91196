//! Decides which connections a listener keeps: a table of all open connections, free of IO and of time.
//!
//! A new connection is admitted even if the table is full, as long as another connection can be closed for it. So a
//! client that opens many connections and does not use them closes its own, and all other clients are answered.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// The limits of one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Largest number of open connections.
    pub total: usize,
    /// Largest number of open connections of one address.
    pub per_peer: usize,
    /// Longest time from the accept to the end of the first request head, with the TLS handshake.
    pub head_timeout: Duration,
    /// Longest time between two requests on one connection, and for receiving an answer that is in memory.
    pub idle_timeout: Duration,
}

/// Identifies an open connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u64);

/// What a connection does. The order is the order in which connections are closed for new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The client has sent no complete request head yet, and no client certificate.
    Opening,
    /// No request runs.
    Idle,
    /// The client receives an answer that is in memory.
    Sending,
    /// The client receives a stream, which may be endless.
    Streaming,
    /// A handler works on a request. Such a connection is never closed for another one.
    Busy,
}

/// The decision about a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The connection is admitted.
    Admitted {
        /// Identifies the new connection.
        id: ConnectionId,
        /// Another connection that has to be closed for it.
        closed: Option<ConnectionId>,
    },
    /// The connection is closed, because handlers work for all others that it could replace.
    Refused,
}

/// The open connections of one listener.
#[derive(Debug)]
pub struct ConnectionTable {
    limits: ConnectionLimits,
    /// Counts admissions and changes of phases, and so orders them without a clock.
    turn: u64,
    connections: BTreeMap<ConnectionId, Connection>,
}

#[derive(Debug)]
struct Connection {
    peer: IpAddr,
    phase: Phase,
    /// Turn in which the phase began.
    since: u64,
}

impl ConnectionTable {
    /// Creates an empty table.
    #[must_use]
    pub fn new(limits: ConnectionLimits) -> Self {
        Self { limits, turn: 0, connections: BTreeMap::new() }
    }

    /// Decides about a new connection. A closed connection is removed from the table at once.
    pub fn admit(&mut self, peer: IpAddr) -> Admission {
        let peer = group(peer);
        let of_peer = self.connections.values().filter(|connection| connection.peer == peer).count();
        let closed = if of_peer >= self.limits.per_peer {
            self.first_to_close(peer)
        } else if self.connections.len() >= self.limits.total {
            self.largest_peer().and_then(|largest| self.first_to_close(largest))
        } else {
            return Admission::Admitted { id: self.insert(peer), closed: None };
        };
        let Some(closed) = closed else { return Admission::Refused };
        self.connections.remove(&closed);
        Admission::Admitted { id: self.insert(peer), closed: Some(closed) }
    }

    /// Records that a connection begins another phase. A connection that was closed is ignored.
    pub fn set_phase(&mut self, id: ConnectionId, phase: Phase) {
        self.turn += 1;
        if let Some(connection) = self.connections.get_mut(&id) {
            (connection.phase, connection.since) = (phase, self.turn);
        }
    }

    /// Removes a connection that has ended.
    pub fn remove(&mut self, id: ConnectionId) {
        self.connections.remove(&id);
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Returns whether no connection is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    fn insert(&mut self, peer: IpAddr) -> ConnectionId {
        self.turn += 1;
        let id = ConnectionId(self.turn);
        self.connections.insert(id, Connection { peer, phase: Phase::Opening, since: self.turn });
        id
    }

    fn closable(&self) -> impl Iterator<Item = (&ConnectionId, &Connection)> {
        self.connections.iter().filter(|(_, connection)| connection.phase != Phase::Busy)
    }

    /// Returns the connection of a peer that is closed first.
    fn first_to_close(&self, peer: IpAddr) -> Option<ConnectionId> {
        let of_peer = self.closable().filter(|(_, connection)| connection.peer == peer);
        of_peer.min_by_key(|(_, connection)| (connection.phase, connection.since)).map(|(id, _)| *id)
    }

    /// Returns the peer with the most connections that may be closed.
    fn largest_peer(&self) -> Option<IpAddr> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for (_, connection) in self.closable() {
            *counts.entry(connection.peer).or_default() += 1;
        }
        counts.into_iter().max_by_key(|(peer, count)| (*count, *peer)).map(|(peer, _)| peer)
    }
}

/// Returns the address by which connections are counted. One host has a whole /64 of IPv6 addresses.
pub(crate) fn group(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let prefix = u128::from(address) & !u128::from(u64::MAX);
            IpAddr::V6(Ipv6Addr::from(prefix))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits = ConnectionLimits {
        total: 4,
        per_peer: 3,
        head_timeout: Duration::from_secs(1),
        idle_timeout: Duration::from_secs(1),
    };

    fn peer(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    /// Admits connections of these peers and returns their identifiers.
    fn opened(table: &mut ConnectionTable, peers: &[u8]) -> Vec<ConnectionId> {
        let admitted = peers.iter().map(|number| match table.admit(peer(*number)) {
            Admission::Admitted { id, closed: None } => id,
            other => panic!("{other:?}"),
        });
        admitted.collect()
    }

    fn closed(admission: Admission) -> Option<ConnectionId> {
        match admission {
            Admission::Admitted { closed, .. } => closed,
            Admission::Refused => panic!("refused"),
        }
    }

    #[test]
    fn a_peer_with_too_many_connections_closes_its_own_oldest() {
        let mut table = ConnectionTable::new(LIMITS);
        let ids = opened(&mut table, &[1, 1, 1, 2]);
        assert_eq!(closed(table.admit(peer(1))), Some(ids[0]));
        assert_eq!(closed(table.admit(peer(1))), Some(ids[1]));
        assert_eq!(table.len(), 4);
    }

    #[test]
    fn a_full_table_closes_a_connection_of_the_peer_with_the_most() {
        let mut table = ConnectionTable::new(LIMITS);
        let ids = opened(&mut table, &[2, 1, 1, 3]);
        assert_eq!(closed(table.admit(peer(4))), Some(ids[1]), "not the oldest, but the oldest of peer 1");
        assert_eq!(table.len(), 4);
    }

    #[test]
    fn connections_are_closed_by_phase_and_then_by_age() {
        let mut table = ConnectionTable::new(LIMITS);
        let ids = opened(&mut table, &[1, 1, 1]);
        table.set_phase(ids[0], Phase::Streaming);
        table.set_phase(ids[2], Phase::Idle);
        table.set_phase(ids[1], Phase::Idle);
        assert_eq!(closed(table.admit(peer(1))), Some(ids[2]), "idle for longer than the other");
    }

    #[test]
    fn a_connection_with_a_running_request_is_never_closed() {
        let mut table = ConnectionTable::new(LIMITS);
        let ids = opened(&mut table, &[1, 1, 1]);
        for id in &ids {
            table.set_phase(*id, Phase::Busy);
        }
        assert_eq!(table.admit(peer(1)), Admission::Refused);
        let others = opened(&mut table, &[2]);
        assert_eq!(closed(table.admit(peer(3))), Some(others[0]), "peer 1 has more, but they are busy");
        table.set_phase(ids[1], Phase::Idle);
        assert_eq!(closed(table.admit(peer(1))), Some(ids[1]));
    }

    #[test]
    fn ended_connections_make_room() {
        let mut table = ConnectionTable::new(LIMITS);
        let ids = opened(&mut table, &[1, 1, 1]);
        table.remove(ids[0]);
        table.set_phase(ids[0], Phase::Busy);
        opened(&mut table, &[1, 2]);
        for id in ids {
            table.remove(id);
        }
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn all_ipv6_addresses_of_a_host_count_together() {
        let mut table = ConnectionTable::new(LIMITS);
        let one = |address: &str| address.parse::<IpAddr>().unwrap();
        for address in ["2001:db8::1", "2001:db8::2", "2001:db8::3"] {
            assert_eq!(closed(table.admit(one(address))), None);
        }
        assert!(closed(table.admit(one("2001:db8::4"))).is_some());
        assert_eq!(closed(table.admit(one("2001:db8:0:1::1"))), None, "another network");
        let mut table = ConnectionTable::new(LIMITS);
        opened(&mut table, &[1, 1, 1]);
        assert!(closed(table.admit(one("::ffff:10.0.0.1"))).is_some(), "an IPv4 address in IPv6 form");
    }
}
