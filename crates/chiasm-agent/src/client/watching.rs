//! Watching one engine of an agent.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use chiasm_backend::{DeathReason, KvSink, KvSinkError, Load, MediaLoad};
use tokio::sync::oneshot;
use tonic::Streaming;

use super::connection_lost;
use super::shared::Shared;
use crate::foreign_jobs;
use crate::proto::watch_event::Event;
use crate::proto::{self, KvBatch, SnapshotPart, WatchEvent};

/// The largest batch, in bytes, that is applied on an async thread.
const MAX_INLINE_BYTES: usize = 64 << 10;
/// The maximum size of a snapshot in bytes: ten million blocks of one worker.
const MAX_SNAPSHOT_BYTES: usize = 512 << 20;

/// An error in what an agent sends about an engine's KV cache.
#[derive(Debug, thiserror::Error)]
enum KvStreamError {
    #[error("the snapshot is too long")]
    SnapshotTooLong,
    #[error("a job of another frontend is malformed")]
    MalformedJob,
    #[error(transparent)]
    Sink(#[from] KvSinkError),
    /// The blocking task that applied an event has panicked.
    #[error("applying an event panicked")]
    Panicked,
}

/// Watches one engine until it ends or its jobs are over: an agent that goes down waits then for
/// frontends to disconnect.
///
/// KV cache events go to the sink that `sink` resolves to. Reading pauses at the first of them
/// until then.
pub(super) async fn watch(
    shared: Arc<Shared>,
    events: Streaming<WatchEvent>,
    sink: oneshot::Receiver<Box<dyn KvSink>>,
) {
    let mut ended = shared.jobs.watch_end();
    tokio::select! {
        death = follow(&shared, events, sink) => shared.jobs.end(death),
        _ = ended.wait_for(Option::is_some) => {}
    }
}

async fn follow(
    shared: &Arc<Shared>,
    mut events: Streaming<WatchEvent>,
    sink: oneshot::Receiver<Box<dyn KvSink>>,
) -> DeathReason {
    let mut pending_sink = Some(sink);
    let mut kv = None;
    let mut snapshot = Vec::new();
    loop {
        let event = match events.message().await {
            Ok(Some(WatchEvent { event: Some(event) })) => event,
            // Skips kinds of events that only later versions know.
            Ok(Some(WatchEvent { event: None })) => continue,
            Ok(None) => return DeathReason::new("the agent ended the watch"),
            Err(status) => return connection_lost(&status),
        };
        let applied = match event {
            Event::Ready(_) => Ok(()),
            Event::Ended(reason) => return DeathReason::new(reason),
            Event::Load(load) => {
                apply_load(shared, load);
                Ok(())
            }
            Event::SilentMs(silent) => {
                shared.silent_ms.store(silent, Relaxed);
                Ok(())
            }
            event => {
                if let Some(pending) = pending_sink.take() {
                    kv = pending.await.ok();
                }
                match kv.take() {
                    Some(sink) => {
                        apply_kv(sink, event, &mut snapshot).await.map(|sink| kv = Some(sink))
                    }
                    None => Ok(()),
                }
            }
        };
        if let Err(error) = applied {
            return DeathReason::new(format!(
                "the agent sent malformed data about the KV cache: {error}"
            ));
        }
    }
}

fn apply_load(shared: &Shared, load: proto::Load) {
    let proto::Load { running, waiting, kv_usage, draining, media_threads, media_pending_us } =
        load;
    // Older agents report no media load.
    let media = (media_threads > 0).then(|| media_load(media_threads, &media_pending_us));
    if let Some(media) = media {
        shared.link.work.set_load(media);
    }
    let load = Load { running, waiting, kv_usage, pending_tokens_of_others: 0, draining, media };
    if let Some(sink) = &*shared.load.lock().unwrap_or_else(PoisonError::into_inner) {
        sink(load);
    }
}

/// Builds an agent's media load. Later versions may have more sizes of work, which count as large
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

/// Applies an event about the KV cache or about other frontends' jobs, and returns the sink.
async fn apply_kv(
    mut sink: Box<dyn KvSink>,
    event: Event,
    snapshot: &mut Vec<u8>,
) -> Result<Box<dyn KvSink>, KvStreamError> {
    let (last, history_known) = match event {
        Event::Snapshot(SnapshotPart { bytes, is_last, history_known }) => {
            if snapshot.len() + bytes.len() > MAX_SNAPSHOT_BYTES {
                return Err(KvStreamError::SnapshotTooLong);
            }
            snapshot.extend_from_slice(&bytes);
            if !is_last {
                return Ok(sink);
            }
            (std::mem::take(snapshot), history_known)
        }
        // Applying the events of one engine step takes microseconds.
        Event::Batch(KvBatch { payload, history_known }) if payload.len() <= MAX_INLINE_BYTES => {
            sink.batch(&payload, history_known)?;
            return Ok(sink);
        }
        Event::Batch(KvBatch { payload, history_known }) => {
            return on_blocking_thread(sink, move |sink| sink.batch(&payload, history_known)).await;
        }
        Event::Reset(_) => {
            return on_blocking_thread(sink, |sink| {
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
            sink.foreign_job(foreign_jobs::from_message(event).ok_or(KvStreamError::MalformedJob)?);
            return Ok(sink);
        }
    };
    on_blocking_thread(sink, move |sink| sink.snapshot(&last, history_known)).await
}

/// Runs a slow operation on a thread that may block.
async fn on_blocking_thread(
    mut sink: Box<dyn KvSink>,
    apply: impl FnOnce(&mut dyn KvSink) -> Result<(), KvSinkError> + Send + 'static,
) -> Result<Box<dyn KvSink>, KvStreamError> {
    let applied = tokio::task::spawn_blocking(move || apply(&mut *sink).map(|()| sink));
    Ok(applied.await.map_err(|_| KvStreamError::Panicked)??)
}
