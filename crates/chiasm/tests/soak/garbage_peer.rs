//! A peer that is not an engine and sends garbage to the port where the frontend expects engines.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

/// A ZeroMQ greeting: version 3.1, mechanism NULL.
const GREETING: [u8; 64] = {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[11] = 1;
    greeting[12] = b'N';
    greeting[13] = b'U';
    greeting[14] = b'L';
    greeting[15] = b'L';
    greeting
};
/// The READY command of a DEALER socket, the type that engines use.
const READY: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER";

/// The start of a frame whose length is larger than any memory.
const HUGE_FRAME: &[u8] = b"\x02\x10\0\0\0\0\0\0\0";

/// Connects, sends a random part of a valid handshake, then garbage.
pub(crate) async fn connect(address: String, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    // The port may have no listener at the moment.
    let Ok(mut stream) = TcpStream::connect(address).await else { return };
    let handshake = [&[][..], &GREETING[..], &[&GREETING[..], READY].concat()]
        [random.random_range(0..3)]
    .to_vec();
    let mut garbage: Vec<u8> = (0..random.random_range(1..5000)).map(|_| random.random()).collect();
    if random.random() {
        garbage.splice(..0, HUGE_FRAME.iter().copied());
    }
    // The frontend may close the connection at any time.
    let _ = stream.write_all(&handshake).await;
    let _ = stream.write_all(&garbage).await;
    tokio::time::sleep(Duration::from_millis(random.random_range(0..3000))).await;
}
