//! What an agent tells of one engine, as it comes.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use chiasm_backend::{Death, KvSink, KvSinkError, Load, MediaLoad};
use tokio::sync::oneshot;
use tonic::Streaming;

use super::lost;
use super::shared::Shared;
use crate::others;
use crate::proto::watch_event::Event;
use crate::proto::{self, KvBatch, SnapshotPart, WatchEvent};

/// Bytes of a batch that is taken in on an async thread.
const IN_PLACE: usize = 64 << 10;
/// Bytes of a snapshot: ten million blocks of one worker.
const MOST_SNAPSHOT_BYTES: usize = 512 << 20;

/// The fault of what an agent tells of an engine's KV cache.
#[derive(Debug, thiserror::Error)]
enum TellError {
    #[error("its snapshot is too long")]
    SnapshotTooLong,
    #[error("a job of others is malformed")]
    MalformedJob,
    #[error(transparent)]
    Sink(#[from] KvSinkError),
    /// The thread that took it in has panicked.
    #[error("taking it in failed")]
    Panicked,
}

/// Follows one engine to its end, or until its jobs are over: its agent waits then for frontends to
/// hang up. What it holds is told to whoever comes out of `sink`; until then nothing is read.
pub(super) async fn watch(
    shared: Arc<Shared>,
    events: Streaming<WatchEvent>,
    sink: oneshot::Receiver<Box<dyn KvSink>>,
) {
    let mut ended = shared.jobs.when_ended();
    tokio::select! {
        death = follow(&shared, events, sink) => shared.jobs.end(death),
        _ = ended.wait_for(Option::is_some) => {}
    }
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
            Ok(None) => return Death::new("its agent says no more of it"),
            Err(status) => return lost(&status),
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
                    Some(sink) => {
                        tell_kv(sink, event, &mut snapshot).await.map(|sink| kv = Some(sink))
                    }
                    None => Ok(()),
                }
            }
        };
        if let Err(why) = told {
            return Death::new(format!("its agent tells nonsense of its KV cache: {why}"));
        }
    }
}

fn tell_load(shared: &Shared, load: proto::Load) {
    let proto::Load { running, waiting, kv_usage, draining, media_threads, media_pending_us } =
        load;
    // An agent of an earlier version tells of none.
    let media = (media_threads > 0).then(|| media_load(media_threads, &media_pending_us));
    if let Some(media) = media {
        shared.link.work.told(media);
    }
    let load = Load { running, waiting, kv_usage, pending_tokens_of_others: 0, draining, media };
    if let Some(sink) = &*shared.load.lock().unwrap_or_else(PoisonError::into_inner) {
        sink(load);
    }
}

/// What an agent has to do with media. A later version may know more sizes of work: those are large
/// ones here.
fn media_load(threads: u32, pending_us: &[u64]) -> MediaLoad {
    let mut load = MediaLoad { threads, ..MediaLoad::default() };
    let last = load.pending.len() - 1;
    for (size, &us) in pending_us.iter().enumerate() {
        let pending = &mut load.pending[size.min(last)];
        *pending = pending.saturating_add(Duration::from_micros(us));
    }
    load
}

/// Passes on what is told of the KV cache and of jobs of others, and gives back to whom.
async fn tell_kv(
    mut sink: Box<dyn KvSink>,
    event: Event,
    snapshot: &mut Vec<u8>,
) -> Result<Box<dyn KvSink>, TellError> {
    let (last, history_known) = match event {
        Event::Snapshot(SnapshotPart { bytes, is_last, history_known }) => {
            if snapshot.len() + bytes.len() > MOST_SNAPSHOT_BYTES {
                return Err(TellError::SnapshotTooLong);
            }
            snapshot.extend_from_slice(&bytes);
            if !is_last {
                return Ok(sink);
            }
            (std::mem::take(snapshot), history_known)
        }
        // What a step of an engine tells takes microseconds.
        Event::Batch(KvBatch { payload, history_known }) if payload.len() <= IN_PLACE => {
            sink.batch(&payload, history_known)?;
            return Ok(sink);
        }
        Event::Batch(KvBatch { payload, history_known }) => {
            return elsewhere(sink, move |sink| sink.batch(&payload, history_known)).await;
        }
        Event::Reset(_) => {
            return elsewhere(sink, |sink| {
                sink.reset();
                Ok(())
            })
            .await;
        }
        Event::CaughtUp(caught_up) => {
            sink.set_caught_up(caught_up);
            return Ok(sink);
        }
        event => {
            sink.others(others::from_message(event).ok_or(TellError::MalformedJob)?);
            return Ok(sink);
        }
    };
    elsewhere(sink, move |sink| sink.snapshot(&last, history_known)).await
}

/// Does what takes long on a thread that may block.
async fn elsewhere(
    mut sink: Box<dyn KvSink>,
    tell: impl FnOnce(&mut dyn KvSink) -> Result<(), KvSinkError> + Send + 'static,
) -> Result<Box<dyn KvSink>, TellError> {
    let told = tokio::task::spawn_blocking(move || tell(&mut *sink).map(|()| sink));
    Ok(told.await.map_err(|_| TellError::Panicked)??)
}
