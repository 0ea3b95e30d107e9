//! Writing to a peer.

use std::io::{self, IoSlice};

use bytes::{Buf, Bytes};
use tokio::io::AsyncWriteExt;

use crate::address::Writer;
use crate::frames::encode_message;

/// The maximum number of pieces per system call.
const MAX_PIECES: usize = 64;

/// Writes a message.
pub(crate) async fn write_message(to: &mut Writer, frames: Vec<Bytes>) -> io::Result<()> {
    let mut pieces = encode_message(frames);
    let mut first = 0;
    while first < pieces.len() {
        let mut slices = [IoSlice::new(&[]); MAX_PIECES];
        let rest = &pieces[first..];
        for (slice, piece) in slices.iter_mut().zip(rest) {
            *slice = IoSlice::new(piece);
        }
        let mut written = to.write_vectored(&slices[..rest.len().min(MAX_PIECES)]).await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        while let Some(piece) = pieces.get_mut(first)
            && written > 0
        {
            let taken = written.min(piece.len());
            piece.advance(taken);
            written -= taken;
            first += usize::from(piece.is_empty());
        }
    }
    Ok(())
}
