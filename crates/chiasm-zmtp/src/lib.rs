//! The ZeroMQ sockets of a frontend: ROUTER, PULL and XPUB, to which engines connect, and
//! connections as SUB or DEALER to the publishers of engines.
//!
//! They speak [ZMTP 3.0](https://rfc.zeromq.org/spec/23/) without authentication (the mechanism
//! NULL), over TCP and Unix sockets. The `zeromq` crate does the same, but allocates as many bytes
//! as a peer announces: a single frame header of 2^60 bytes, from any client that reaches the port,
//! kills the process. Here, outgoing messages are only queued in the system's buffers, and
//! everything that a peer can make a socket hold is limited:
//!
//! | resource | limit |
//! |---|---|
//! | a message | [`MAX_MESSAGE_BYTES`], to a ROUTER [`MAX_ROUTER_MESSAGE_BYTES`], to a SUB or a DEALER [`MAX_PUBLISHED_BYTES`], to an XPUB 4 KiB; memory grows with the bytes that arrive |
//! | a command | 4 KiB |
//! | peers of a socket, and connections still in their handshake | [`MAX_PEERS`] each |
//! | time for a handshake | 10 s |
//!
//! A peer that violates the protocol or a limit is disconnected. Other peers are not affected.
//!
//! | module | contents |
//! |---|---|
//! | `address` | the addresses of sockets: TCP or a path |
//! | `handshake` | the handshake of a connection |
//! | `frames` | encoding and decoding of messages and commands |
//! | `sending` | writing to one peer |
//! | `socket` | listening sockets: ROUTER and PULL |
//! | `publisher` | the listening socket that publishes: XPUB |
//! | `connection` | outgoing connections: SUB and DEALER |

mod address;
mod connection;
mod frames;
mod handshake;
mod publisher;
mod sending;
mod socket;

pub use connection::Connection;
pub use frames::{MAX_MESSAGE_BYTES, MAX_PUBLISHED_BYTES, MAX_ROUTER_MESSAGE_BYTES};
pub use publisher::XPub;
pub use socket::{Event, MAX_PEERS, Pull, Router, SendError};
