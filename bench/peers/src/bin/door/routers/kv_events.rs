//! The KV events of an upstream over ZMQ, as `vllm serve` publishes them with `--kv-events-config`.

use std::error::Error;
use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::routers::cache::Changes;
use crate::routers::prompt::{BLOCK_SIZE, Picture, Prompt};

/// The sequence number at the end of a replay.
const END: [u8; 8] = [0xff; 8];

/// Publishes batches and replays all of them on request. They are kept, because a run is short.
pub(crate) async fn publish(
    [events, replay]: [SocketAddr; 2],
    mut batches: mpsc::UnboundedReceiver<KvEventBatch>,
) -> Result<(), Box<dyn Error>> {
    let mut publisher = PubSocket::new();
    publisher.bind(&format!("tcp://{events}")).await?;
    let mut replays = RouterSocket::new();
    replays.bind(&format!("tcp://{replay}")).await?;
    let mut published: Vec<Bytes> = Vec::new();
    loop {
        tokio::select! {
            batch = batches.recv() => {
                let payload = Bytes::from(batch.ok_or("the upstream has ended")?.encode());
                let frames = [Bytes::new(), sequence_number(published.len()), payload.clone()];
                publisher.send(message(frames)).await?;
                published.push(payload);
            }
            request = replays.recv() => {
                let request = request?.into_vec();
                let [client, _, first] = &request[..] else { continue };
                let first = first.iter().fold(0, |number, &byte| number << 8 | usize::from(byte));
                let missed = published.iter().enumerate().skip(first);
                let missed = missed.map(|(at, payload)| (sequence_number(at), payload.clone()));
                for (number, payload) in missed.chain([(Bytes::from_static(&END), Bytes::new())]) {
                    let frames = [client.clone(), Bytes::new(), Bytes::new(), number, payload];
                    replays.send(message(frames)).await?;
                }
            }
        }
    }
}

/// Returns the events of a prompt; `None` if it has changed nothing.
pub(crate) fn batch(prompt: &Prompt, blocks: &[u64], changes: &Changes) -> Option<KvEventBatch> {
    let hash = |block: &u64| ExternalHash::U64(*block);
    let medium = Some("GPU".to_owned());
    let mut events = Vec::new();
    for run in &changes.stored {
        let extra_keys = run.clone().map(|block| {
            let key = |picture: &Picture| ExtraKey::Media {
                identifier: picture.identifier.clone(),
                offset: picture.offset as i64 - (block * BLOCK_SIZE) as i64,
            };
            let keys: Vec<ExtraKey> = prompt.pictures_in(block).map(key).collect();
            (!keys.is_empty()).then_some(keys)
        });
        events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: blocks[run.clone()].iter().map(hash).collect(),
            parent_block_hash: run.start.checked_sub(1).map(|parent| hash(&blocks[parent])),
            token_ids: prompt.tokens[run.start * BLOCK_SIZE..run.end * BLOCK_SIZE].to_vec(),
            block_size: BLOCK_SIZE as u32,
            medium: medium.clone(),
            extra_keys: Some(extra_keys.collect()),
            ..BlockStored::default()
        }));
    }
    if !changes.removed.is_empty() {
        let block_hashes = changes.removed.iter().map(hash).collect();
        let removed = BlockRemoved { block_hashes, medium, ..BlockRemoved::default() };
        events.push(KvEvent::BlockRemoved(removed));
    }
    let timestamp = SystemTime::now().duration_since(UNIX_EPOCH);
    let timestamp = timestamp.map_or(0.0, |since| since.as_secs_f64());
    let batch = KvEventBatch { timestamp, events, data_parallel_rank: Some(0) };
    (!batch.events.is_empty()).then_some(batch)
}

fn sequence_number(number: usize) -> Bytes {
    Bytes::copy_from_slice(&(number as u64).to_be_bytes())
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    let mut frames = frames.into_iter();
    let mut message = ZmqMessage::from(frames.next().unwrap_or_default());
    frames.for_each(|frame| message.push_back(frame));
    message
}
