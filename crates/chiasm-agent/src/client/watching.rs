//! What an agent tells of one engine, as it comes.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use chiasm_backend::{Death, KvSink, Load};
use tokio::sync::oneshot;
use tonic::Streaming;

use super::backend::Shared;
use super::lost;
use crate::proto::watch_event::Event;
use crate::proto::{self, KvBatch, SnapshotPart, WatchEvent};

/// Bytes of a snapshot: ten million blocks of one worker.
const MOST_SNAPSHOT_BYTES: usize = 512 << 20;

/// Follows one engine to its end. What it holds is told to whoever comes out of `sink`; until then nothing is read.
pub(super) async fn watch(
    shared: Arc<Shared>,
    events: Streaming<WatchEvent>,
    sink: oneshot::Receiver<Box<dyn KvSink>>,
) {
    let death = follow(&shared, events, sink).await;
    shared.end(death);
}

async fn follow(
    shared: &Arc<Shared>,
    mut events: Streaming<WatchEvent>,
    sink: oneshot::Receiver<Box<dyn KvSink>>,
) -> Death {
    let (mut waiting, mut kv) = (Some(sink), None);
    let mut snapshot = Vec::new();
    loop {
        let event = match events.message().await {
            Ok(Some(WatchEvent { event: Some(event) })) => event,
            // A kind of event that a later version tells of.
            Ok(Some(WatchEvent { event: None })) => continue,
            Ok(None) => return Death::new(format!("the agent at {} says no more of it", shared.link.address)),
            Err(status) => return lost(&shared.link.address, &status),
        };
        let told = match event {
            Event::Ready(_) => Ok(()),
            Event::Ended(how) => return Death::new(how),
            Event::Load(load) => {
                tell_load(shared, load);
                Ok(())
            }
            Event::SilentMs(silent) => {
                shared.silent_ms.store(silent, Relaxed);
                Ok(())
            }
            event => {
                if let Some(waiting) = waiting.take() {
                    kv = waiting.await.ok();
                }
                match kv.take() {
                    Some(sink) => tell_kv(sink, event, &mut snapshot).await.map(|sink| kv = Some(sink)),
                    None => Ok(()),
                }
            }
        };
        if let Err(why) = told {
            return Death::new(format!("the agent at {} tells nonsense of its KV cache: {why}", shared.link.address));
        }
    }
}

fn tell_load(shared: &Shared, load: proto::Load) {
    let proto::Load { running, waiting, kv_usage, draining } = load;
    let load = Load { running, waiting, kv_usage, pending_tokens_of_others: 0, draining };
    if let Some(sink) = &*shared.load.lock().unwrap_or_else(PoisonError::into_inner) {
        sink(load);
    }
}

/// Passes on what is told of the KV cache, and gives back to whom.
async fn tell_kv(mut sink: Box<dyn KvSink>, event: Event, snapshot: &mut Vec<u8>) -> Result<Box<dyn KvSink>, String> {
    if let Event::Snapshot(SnapshotPart { bytes, is_last: false, .. }) = &event {
        if snapshot.len() + bytes.len() > MOST_SNAPSHOT_BYTES {
            return Err("its snapshot is too long".to_owned());
        }
        snapshot.extend_from_slice(bytes);
        return Ok(sink);
    }
    let begun = std::mem::take(snapshot);
    let told = tokio::task::spawn_blocking(move || {
        match event {
            Event::Snapshot(SnapshotPart { bytes, history_known, .. }) => {
                sink.snapshot(&[&begun[..], &bytes[..]].concat(), history_known)?;
            }
            Event::Batch(KvBatch { payload, history_known }) => sink.batch(&payload, history_known)?,
            Event::Reset(_) => sink.reset(),
            Event::CaughtUp(caught_up) => sink.set_caught_up(caught_up),
            Event::Ready(_) | Event::Load(_) | Event::SilentMs(_) | Event::Ended(_) => {}
        }
        Ok(sink)
    });
    told.await.unwrap_or_else(|_| Err("taking it in failed".to_owned()))
}
