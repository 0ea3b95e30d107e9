//! What frontends may send without its being read.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;

/// Frames of HTTP/2 by their types, and the setting that has a stream's window.
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const STREAM_WINDOW_ID: u16 = 4;
/// What a connection's window is before it is told of.
const FIRST_WINDOW: u32 = 65_535;

/// The type of the next frame, and what is in it.
async fn frame(connection: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 9];
    connection.read_exact(&mut head).await?;
    let [a, b, c, kind, ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    connection.read_exact(&mut payload).await?;
    Ok((kind, payload))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_all_connections_may_send_without_its_being_read_fits_into_memory() {
    let stand = Stand::new().await;
    let mut connection = TcpStream::connect(stand.link.address()).await.unwrap();
    let no_settings = [0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
    connection
        .write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &no_settings[..]].concat())
        .await
        .unwrap();
    let (mut of_stream, mut of_connection) = (None, None);
    while of_stream.is_none() || of_connection.is_none() {
        let next = tokio::time::timeout(Duration::from_secs(10), frame(&mut connection))
            .await
            .unwrap()
            .unwrap();
        match next {
            (SETTINGS, settings) => {
                let told = settings
                    .chunks(6)
                    .find(|setting| setting[..2] == STREAM_WINDOW_ID.to_be_bytes());
                of_stream = of_stream
                    .or(told.map(|told| u32::from_be_bytes(told[2..].try_into().unwrap())));
            }
            (WINDOW_UPDATE, more) => {
                of_connection = Some(FIRST_WINDOW + u32::from_be_bytes(more.try_into().unwrap()))
            }
            _ => {}
        }
    }
    // All 1,024 connections hold 2 GiB at most, and a stream that is not read leaves room to the
    // others of its connection.
    assert_eq!((of_stream, of_connection), (Some(1 << 20), Some(2 << 20)));
}
