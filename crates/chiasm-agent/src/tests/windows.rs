//! The flow-control windows of frontends.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;

/// HTTP/2 frame types, and the setting of a stream's window.
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const STREAM_WINDOW_ID: u16 = 4;
/// The initial window of a connection.
const FIRST_WINDOW: u32 = 65_535;

/// Reads a frame and returns its type and payload.
async fn frame(connection: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 9];
    connection.read_exact(&mut head).await?;
    let [a, b, c, kind, ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    connection.read_exact(&mut payload).await?;
    Ok((kind, payload))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_data_of_all_connections_fits_into_memory() {
    let harness = TestHarness::new().await;
    let mut connection = TcpStream::connect(harness.link.address()).await.unwrap();
    let no_settings = [0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
    connection
        .write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &no_settings[..]].concat())
        .await
        .unwrap();
    let mut stream_window = None;
    let mut connection_window = None;
    while stream_window.is_none() || connection_window.is_none() {
        let next = tokio::time::timeout(Duration::from_secs(10), frame(&mut connection))
            .await
            .unwrap()
            .unwrap();
        match next {
            (SETTINGS, settings) => {
                let setting = settings
                    .chunks(6)
                    .find(|setting| setting[..2] == STREAM_WINDOW_ID.to_be_bytes());
                let window =
                    setting.map(|setting| u32::from_be_bytes(setting[2..].try_into().unwrap()));
                stream_window = stream_window.or(window);
            }
            (WINDOW_UPDATE, more) => {
                connection_window =
                    Some(FIRST_WINDOW + u32::from_be_bytes(more.try_into().unwrap()))
            }
            _ => {}
        }
    }
    // All 1,024 connections hold 2 GiB at most, and an unread stream leaves room to the others of
    // its connection.
    assert_eq!((stream_window, connection_window), (Some(1 << 20), Some(2 << 20)));
}
