//! Says over ZMQ what an upstream's cache holds, as `vllm serve` does with `--kv-events-config`.

use std::error::Error;
use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::routers::cache::Taken;
use crate::routers::prompt::{BLOCK, Prompt};

/// Ends a replay.
const END: [u8; 8] = [0xff; 8];

/// Publishes what it is sent, and replays all of it to whoever asks: a run is short.
pub(crate) async fn publish(
    [events, replay]: [SocketAddr; 2],
    mut batches: mpsc::UnboundedReceiver<KvEventBatch>,
) -> Result<(), Box<dyn Error>> {
    let (mut publisher, mut replays) = (PubSocket::new(), RouterSocket::new());
    publisher.bind(&format!("tcp://{events}")).await?;
    replays.bind(&format!("tcp://{replay}")).await?;
    let mut said: Vec<Bytes> = Vec::new();
    loop {
        tokio::select! {
            batch = batches.recv() => {
                let payload = Bytes::from(batch.ok_or("the upstream has ended")?.encode());
                publisher.send(message([Bytes::new(), number(said.len()), payload.clone()])).await?;
                said.push(payload);
            }
            request = replays.recv() => {
                let request = request?.into_vec();
                let [asks, _, first] = &request[..] else { continue };
                let first = first.iter().fold(0, |number, &byte| number << 8 | usize::from(byte));
                let missed = said.iter().enumerate().skip(first).map(|(at, payload)| (number(at), payload.clone()));
                for (at, payload) in missed.chain([(Bytes::from_static(&END), Bytes::new())]) {
                    replays.send(message([asks.clone(), Bytes::new(), Bytes::new(), at, payload])).await?;
                }
            }
        }
    }
}

/// What a prompt has changed, if it has changed anything.
pub(crate) fn batch(prompt: &Prompt, blocks: &[u64], taken: &Taken) -> Option<KvEventBatch> {
    let name = |block: &u64| ExternalHash::U64(*block);
    let mut events = Vec::new();
    for run in &taken.stored {
        let keys = run.clone().map(|block| {
            let key = |it: &crate::routers::prompt::Picture| ExtraKey::Media {
                identifier: it.identifier.clone(),
                offset: it.offset as i64 - (block * BLOCK) as i64,
            };
            let keys: Vec<ExtraKey> = prompt.touching(block).map(key).collect();
            (!keys.is_empty()).then_some(keys)
        });
        events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: blocks[run.clone()].iter().map(name).collect(),
            parent_block_hash: run.start.checked_sub(1).map(|parent| name(&blocks[parent])),
            token_ids: prompt.tokens[run.start * BLOCK..run.end * BLOCK].to_vec(),
            block_size: BLOCK as u32,
            medium: Some("GPU".to_owned()),
            extra_keys: Some(keys.collect()),
            ..BlockStored::default()
        }));
    }
    if !taken.removed.is_empty() {
        let block_hashes = taken.removed.iter().map(name).collect();
        events.push(KvEvent::BlockRemoved(BlockRemoved {
            block_hashes,
            medium: Some("GPU".to_owned()),
            ..BlockRemoved::default()
        }));
    }
    let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    (!events.is_empty()).then_some(KvEventBatch { timestamp, events, data_parallel_rank: Some(0) })
}

fn number(of: usize) -> Bytes {
    Bytes::copy_from_slice(&(of as u64).to_be_bytes())
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    let mut frames = frames.into_iter();
    let mut message = ZmqMessage::from(frames.next().unwrap_or_default());
    frames.for_each(|frame| message.push_back(frame));
    message
}
