//! Somebody who is no engine, where engines are waited for.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

/// What a peer of ZeroMQ says first: version 3.1, no security.
const GREETING: [u8; 64] = {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
    (greeting[12], greeting[13], greeting[14], greeting[15]) = (b'N', b'U', b'L', b'L');
    greeting
};
/// And then: that it is a DEALER, as engines are.
const READY: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER";

/// The beginning of a frame of more bytes than there are.
const HUGE: &[u8] = b"\x02\x10\0\0\0\0\0\0\0";

/// Talks nonsense for a while, after as much sense as chance wants.
pub(crate) async fn visit(address: String, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    // Nobody may be listening there at the moment.
    let Ok(mut stream) = TcpStream::connect(address).await else { return };
    let sense = [&[][..], &GREETING[..], &[&GREETING[..], READY].concat()]
        [random.random_range(0..3)]
    .to_vec();
    let mut nonsense: Vec<u8> =
        (0..random.random_range(1..5000)).map(|_| random.random()).collect();
    if random.random() {
        nonsense.splice(..0, HUGE.iter().copied());
    }
    // Where the other side has had enough, the rest can't be written.
    let _ = stream.write_all(&sense).await;
    let _ = stream.write_all(&nonsense).await;
    tokio::time::sleep(Duration::from_millis(random.random_range(0..3000))).await;
}
