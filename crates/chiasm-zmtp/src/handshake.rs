//! The handshake of a connection: a greeting of 64 bytes, then the command READY with the kind of
//! socket, from both sides.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::codec::FramedRead;

use crate::address::{Reader, Writer};
use crate::frames::{
    FrameDecoder, Incoming, MAX_MESSAGE_BYTES, MAX_PUBLISHED_BYTES, MAX_ROUTER_MESSAGE_BYTES,
    invalid, put_command,
};

const GREETING_BYTES: usize = 64;
/// The range of the mechanism's name in the greeting.
const MECHANISM: std::ops::Range<usize> = 12..32;
const NULL: &[u8; MECHANISM.end - MECHANISM.start] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// The maximum size of a message to an XPUB socket, which is a subscription.
const MAX_SUBSCRIPTION_BYTES: usize = 4096;
const READY: &[u8] = b"\x05READY";

/// The kinds of sockets in this crate.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Router,
    Pull,
    XPub,
    Sub,
    Dealer,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Router => "ROUTER",
            Self::Pull => "PULL",
            Self::XPub => "XPUB",
            Self::Sub => "SUB",
            Self::Dealer => "DEALER",
        }
    }

    /// Returns the maximum size of a message to this kind of socket.
    fn max_message_bytes(self) -> usize {
        match self {
            Self::Router => MAX_ROUTER_MESSAGE_BYTES,
            Self::Pull => MAX_MESSAGE_BYTES,
            Self::XPub => MAX_SUBSCRIPTION_BYTES,
            Self::Sub | Self::Dealer => MAX_PUBLISHED_BYTES,
        }
    }

    /// Returns `true` if a socket of the kind `other` may connect to this kind.
    fn accepts(self, other: &[u8]) -> bool {
        match self {
            Self::Router => matches!(other, b"DEALER" | b"REQ" | b"ROUTER"),
            Self::Pull => other == b"PUSH",
            Self::XPub => matches!(other, b"SUB" | b"XSUB"),
            Self::Sub => matches!(other, b"PUB" | b"XPUB"),
            Self::Dealer => matches!(other, b"ROUTER" | b"REP" | b"DEALER"),
        }
    }
}

/// Performs the handshake. Returns the stream of the peer's messages and the peer's identity, which
/// is empty if it has none.
pub(crate) async fn handshake(
    kind: Kind,
    mut reader: Reader,
    writer: &mut Writer,
) -> io::Result<(FramedRead<Reader, FrameDecoder>, Bytes)> {
    writer.write_all(&greeting()).await?;
    let mut peer_greeting = [0; GREETING_BYTES];
    reader.read_exact(&mut peer_greeting).await?;
    if peer_greeting[0] != 0xff || peer_greeting[9] != 0x7f {
        return Err(invalid("the peer does not speak ZMTP"));
    }
    if peer_greeting[10] < 3 || peer_greeting[MECHANISM] != *NULL {
        return Err(invalid("the peer speaks ZMTP before version 3, or requires authentication"));
    }
    writer.write_all(&ready(kind)).await?;
    let mut incoming = FramedRead::new(reader, FrameDecoder::new(kind.max_message_bytes()));
    let Some(Incoming::Command(command)) = incoming.next().await.transpose()? else {
        return Err(invalid("the peer sent no READY command"));
    };
    let peer = command
        .strip_prefix(READY)
        .and_then(PeerProperties::parse)
        .ok_or_else(|| invalid("the peer's READY command is malformed"))?;
    if !kind.accepts(peer.kind) {
        return Err(invalid("the peer's socket type can't connect to this socket type"));
    }
    let identity = Bytes::copy_from_slice(peer.identity);
    Ok((incoming, identity))
}

/// Returns our greeting.
fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    // The signature.
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    // Version 3.0: peers of this version send no heartbeats, which would need responses.
    greeting[10] = 3;
    greeting[MECHANISM].copy_from_slice(NULL);
    greeting
}

/// Returns our READY command.
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

/// The properties in a peer's READY command.
#[derive(Debug, Default, PartialEq, Eq)]
struct PeerProperties<'a> {
    kind: &'a [u8],
    /// The identity; empty if the peer has none, at most 255 bytes.
    identity: &'a [u8],
}

impl<'a> PeerProperties<'a> {
    /// Parses the properties; `None` if they are malformed.
    fn parse(mut properties: &'a [u8]) -> Option<Self> {
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
    fn ready_properties_are_parsed() {
        let dealer =
            b"\x0bsocket-type\0\0\0\x06DEALER\x08Identity\0\0\0\x02\0\x01\x04Else\0\0\0\x01x";
        assert_eq!(
            PeerProperties::parse(dealer),
            Some(PeerProperties { kind: b"DEALER", identity: b"\0\x01" })
        );
        let own = ready(Kind::Pull);
        assert_eq!(
            PeerProperties::parse(&own[2 + READY.len()..]),
            Some(PeerProperties { kind: b"PULL", identity: b"" })
        );
        let long = [&b"\x08Identity\0\0\x01\0"[..], &[0; 256]].concat();
        for wrong in [&dealer[..dealer.len() - 1], &dealer[..5], b"\x01a\xff\xff\xff\xff", &long] {
            assert_eq!(PeerProperties::parse(wrong), None, "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn random_properties_are_parsed_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            PeerProperties::parse(&bytes);
        }
    }
}
