//! ZeroMQ's sockets as far as a frontend has them: ROUTER and PULL, which its engines connect to,
//! and connections of a SUB or a DEALER to what engines publish.
//!
//! They speak [ZMTP 3.0](https://rfc.zeromq.org/spec/23/) without authentication (its mechanism
//! NULL), over TCP and Unix sockets. The `zeromq` crate does so too, but takes memory for as many
//! bytes as a peer says that it will send: one header of a frame of 2^60 bytes, from anybody who
//! reaches the port, ends the process. Here nothing waits to be sent but in the system's buffers,
//! and all that a peer can make a socket hold is limited:
//!
//! | what | limit |
//! |---|---|
//! | a message | [`MAX_MESSAGE_BYTES`], to a ROUTER [`MAX_QUESTION_BYTES`], to a SUB or a DEALER [`MAX_PUBLISHED_BYTES`]; memory is taken as its bytes come |
//! | a command | 4 KiB |
//! | peers of a socket, and connections that have not introduced themselves yet | [`MAX_PEERS`] each |
//! | time until a connection has introduced itself | 10 s |
//!
//! Whoever says something else than ZMTP, or more than that, loses its connection, and nobody else
//! notices.
//!
//! | module | is |
//! |---|---|
//! | `address` | where a socket listens or connects to: TCP or a path |
//! | `introduction` | what both sides of a connection say first |
//! | `frames` | messages and commands as bytes |
//! | `sending` | writing to one peer |
//! | `socket` | the sockets that others connect to |
//! | `connection` | connections to sockets of others |

mod address;
mod connection;
mod frames;
mod introduction;
mod sending;
mod socket;

pub use connection::Connection;
pub use frames::{MAX_MESSAGE_BYTES, MAX_PUBLISHED_BYTES, MAX_QUESTION_BYTES};
pub use socket::{Event, MAX_PEERS, Pull, Router, SendError};
