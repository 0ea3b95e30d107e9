//! What both sides of a connection say first: a greeting of 64 bytes, then the command READY with
//! what kind of socket each is.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::codec::FramedRead;

use crate::address::{Reading, Writing};
use crate::frames::{
    Frames, MAX_MESSAGE_BYTES, MAX_PUBLISHED_BYTES, MAX_QUESTION_BYTES, Said, invalid, put_command,
};

const GREETING: usize = 64;
const MECHANISM: std::ops::Range<usize> = 12..32;
const NULL: &[u8; MECHANISM.end - MECHANISM.start] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const READY: &[u8] = b"\x05READY";

/// The kinds of sockets that there are here.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Router,
    Pull,
    Sub,
    Dealer,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Router => "ROUTER",
            Self::Pull => "PULL",
            Self::Sub => "SUB",
            Self::Dealer => "DEALER",
        }
    }

    /// The most bytes of a message to it.
    fn max_message_bytes(self) -> usize {
        match self {
            Self::Router => MAX_QUESTION_BYTES,
            Self::Pull => MAX_MESSAGE_BYTES,
            Self::Sub | Self::Dealer => MAX_PUBLISHED_BYTES,
        }
    }

    /// The kinds that may talk with it.
    fn takes(self, other: &[u8]) -> bool {
        match self {
            Self::Router => matches!(other, b"DEALER" | b"REQ" | b"ROUTER"),
            Self::Pull => other == b"PUSH",
            Self::Sub => matches!(other, b"PUB" | b"XPUB"),
            Self::Dealer => matches!(other, b"ROUTER" | b"REP" | b"DEALER"),
        }
    }
}

/// Introduces a socket to its peer, and the other way round. What the peer says from now on, and
/// its identity if it has one.
pub(crate) async fn introduce(
    kind: Kind,
    mut reading: Reading,
    writing: &mut Writing,
) -> io::Result<(FramedRead<Reading, Frames>, Bytes)> {
    writing.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING];
    reading.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] != 0x7f {
        return Err(invalid("it does not speak ZMTP"));
    }
    if theirs[10] < 3 || theirs[MECHANISM] != *NULL {
        return Err(invalid("it speaks ZMTP before version 3, or wants to be authenticated"));
    }
    writing.write_all(&ready(kind)).await?;
    let mut said = FramedRead::new(reading, Frames::new(kind.max_message_bytes()));
    let Some(Said::Command(command)) = said.next().await.transpose()? else {
        return Err(invalid("it does not introduce itself"));
    };
    let peer = command
        .strip_prefix(READY)
        .and_then(Peer::read)
        .ok_or_else(|| invalid("its introduction can't be read"))?;
    if !kind.takes(peer.kind) {
        return Err(invalid("it is no peer for this kind of socket"));
    }
    let identity = Bytes::copy_from_slice(peer.identity);
    Ok((said, identity))
}

fn greeting() -> [u8; GREETING] {
    let mut greeting = [0; GREETING];
    // The signature; then version 3.0, after which nobody sends heartbeats that would have to be
    // answered.
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[MECHANISM].copy_from_slice(NULL);
    greeting
}

fn ready(kind: Kind) -> BytesMut {
    const PROPERTY: &[u8] = b"\x0bSocket-Type";
    let name = kind.name().as_bytes();
    let mut command = BytesMut::from(READY);
    command.put_slice(PROPERTY);
    command.put_u32(name.len() as u32);
    command.put_slice(name);
    let mut frame = BytesMut::new();
    put_command(&mut frame, &command);
    frame
}

/// What a peer says of itself in the properties of READY.
#[derive(Debug, Default, PartialEq, Eq)]
struct Peer<'a> {
    kind: &'a [u8],
    /// Empty if it has none; 255 bytes at most.
    identity: &'a [u8],
}

impl<'a> Peer<'a> {
    fn read(mut properties: &'a [u8]) -> Option<Self> {
        let mut peer = Self::default();
        while !properties.is_empty() {
            let length = usize::from(properties.try_get_u8().ok()?);
            let name = properties.split_off(..length)?;
            let length = usize::try_from(properties.try_get_u32().ok()?).ok()?;
            let value = properties.split_off(..length)?;
            if name.eq_ignore_ascii_case(b"Socket-Type") {
                peer.kind = value;
            } else if name.eq_ignore_ascii_case(b"Identity") {
                peer.identity = value;
            }
        }
        (peer.identity.len() <= 255).then_some(peer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn properties_are_read() {
        let dealer =
            b"\x0bsocket-type\0\0\0\x06DEALER\x08Identity\0\0\0\x02\0\x01\x04Else\0\0\0\x01x";
        assert_eq!(Peer::read(dealer), Some(Peer { kind: b"DEALER", identity: b"\0\x01" }));
        let written = ready(Kind::Pull);
        assert_eq!(
            Peer::read(&written[2 + READY.len()..]),
            Some(Peer { kind: b"PULL", identity: b"" })
        );
        let long = [&b"\x08Identity\0\0\x01\0"[..], &[0; 256]].concat();
        for wrong in [&dealer[..dealer.len() - 1], &dealer[..5], b"\x01a\xff\xff\xff\xff", &long] {
            assert_eq!(Peer::read(wrong), None, "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn nonsense_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            Peer::read(&bytes);
        }
    }
}
