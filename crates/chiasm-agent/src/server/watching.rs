//! The stream of events about one engine for a frontend.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{ForeignJobEvent, KvSource, Load as BackendLoad, MediaLoad};
use chiasm_fleet::{Fleet, KvSubscription, KvUpdate, Worker};
use chiasm_pipeline::MachineMedia;
use chiasm_types::WorkerId;
use tokio::sync::mpsc;
use tokio::sync::watch::Receiver;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tonic::Status;

use super::announcements::Announcements;
use super::drain::Drain;
use super::shares::{Share, ShareGuard};
use crate::capabilities::{self, AgentFacts};
use crate::foreign_jobs;
use crate::proto::watch_event::Event;
use crate::proto::{KvBatch, Load, SnapshotPart, WatchEvent};

/// The maximum number of messages queued for a frontend. Further events wait in the fleet, which
/// has a limit of its own.
const MAX_QUEUED_MESSAGES: usize = 16;
/// The interval at which a snapshot slot is tried again.
const SLOT_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The size of a snapshot's part in one message, in bytes.
const PART_BYTES: usize = 1 << 20;
/// The interval at which a changed load is sent.
const LOAD_INTERVAL: Duration = Duration::from_millis(50);

/// A frontend's watch of an engine.
pub(super) struct Watch {
    pub(super) fleet: Arc<Fleet>,
    pub(super) id: WorkerId,
    /// The agent's media processing: its load, and the forms that it takes.
    pub(super) media: Arc<MachineMedia>,
    /// The announcements of jobs on the engine.
    pub(super) announcements: Arc<Announcements>,
    /// The watching frontend, which gets announcements of other frontends' jobs.
    pub(super) frontend: u64,
    /// The drain state of the agent.
    pub(super) drain: Drain,
    /// The frontend's share of watch calls.
    pub(super) _slot: ShareGuard,
    /// The share of snapshots, made and not yet read, of frontends at this address.
    pub(super) snapshots: Share,
}

impl Watch {
    /// Sends events, from the time when the engine is ready until the engine ends.
    ///
    /// Frontends of a ready engine stay subscribed while the agent goes down, until their jobs have
    /// ended, then disconnect.
    pub(super) fn start(self) -> mpsc::Receiver<Result<WatchEvent, Status>> {
        let (events, receiver) = mpsc::channel(MAX_QUEUED_MESSAGES);
        tokio::spawn(async move {
            let worker = tokio::select! {
                () = events.closed() => return,
                () = self.drain.wait_calls_ended() => return,
                worker = self.fleet.wait_for_worker(self.id) => worker,
            };
            let ended = tokio::select! {
                () = events.closed() => return,
                death = worker.backend.ended() => death.to_string(),
                // Ends when the frontend has disconnected.
                _ = send_all(&self, &worker, &events) => return,
            };
            let _ = send(&events, Event::Ended(ended)).await;
        });
        receiver
    }
}

/// The error of sending to a frontend that has disconnected.
struct Disconnected;

type EventSender = mpsc::Sender<Result<WatchEvent, Status>>;

async fn send(events: &EventSender, event: Event) -> Result<(), Disconnected> {
    events.send(Ok(WatchEvent { event: Some(event) })).await.map_err(|_| Disconnected)
}

async fn send_all(
    watch: &Watch,
    worker: &Worker,
    events: &EventSender,
) -> Result<Infallible, Disconnected> {
    let facts = AgentFacts {
        life: worker.life,
        tensor_bytes: watch.media.max_tensor_bytes(),
        video_slots: watch.media.video_slots(worker),
        fetches_media: watch.media.fetches_urls(),
        adapters: worker.adapter_reports(watch.fleet.adapters()),
    };
    send(events, Event::Ready(capabilities::to_message(worker.backend.capabilities(), facts)))
        .await?;
    let load = send_load(worker, &watch.media, watch.drain.subscribe(), events);
    let foreign_jobs = send_foreign_jobs(watch, events);
    let kv = async {
        match &worker.backend.capabilities().kv {
            KvSource::Unknown { .. } => std::future::pending().await,
            KvSource::Events(_) | KvSource::Backend => send_kv(watch, events).await,
        }
    };
    tokio::select! {
        disconnected = load => disconnected,
        disconnected = kv => disconnected,
        disconnected = foreign_jobs => disconnected,
    }
}

async fn send_foreign_jobs(
    watch: &Watch,
    events: &EventSender,
) -> Result<Infallible, Disconnected> {
    let mut follower = watch.announcements.follow(watch.frontend);
    loop {
        let event = match follower.next().await {
            ForeignJobEvent::Started(number, job) => {
                Event::OthersJob(foreign_jobs::to_message(number, &job))
            }
            ForeignJobEvent::PromptComputed(job) => Event::OthersJobComputed(job),
            ForeignJobEvent::Ended(job) => Event::OthersJobEnded(job),
            ForeignJobEvent::Reset => Event::OthersJobsVoid(true),
        };
        send(events, event).await?;
    }
}

async fn send_load(
    worker: &Worker,
    media: &MachineMedia,
    mut drain: Receiver<bool>,
    events: &EventSender,
) -> Result<Infallible, Disconnected> {
    let mut loads = worker.watch_load();
    let mut ticks = interval(LOAD_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut silent_ms = 0;
    let mut is_first = true;
    let mut sent_media = MediaLoad::default();
    loop {
        ticks.tick().await;
        let media = media.load();
        // Frontends subtract elapsed time from the media load, so it is sent again while there is
        // any.
        let is_media_changed = media != sent_media || media.total() > Duration::ZERO;
        let is_changed = is_media_changed
            || is_first
            || loads.has_changed().unwrap_or_default()
            || drain.has_changed().unwrap_or_default();
        if is_changed {
            is_first = false;
            let BackendLoad {
                running,
                waiting,
                kv_usage,
                draining,
                // Other frontends' jobs are announced one by one, as `OthersJob`.
                pending_tokens_of_others: _,
                // Engines process no media; the agent reports its own load.
                media: _,
            } = *loads.borrow_and_update();
            let draining = draining || *drain.borrow_and_update();
            sent_media = media;
            let MediaLoad { threads: media_threads, pending } = media;
            let media_pending_us = pending.map(|pending| pending.as_micros() as u64).to_vec();
            let load =
                Load { running, waiting, kv_usage, draining, media_threads, media_pending_us };
            send(events, Event::Load(load)).await?;
        }
        // Rounded to seconds, as only seconds matter.
        let now_ms = worker.backend.silent_for().as_secs() * 1000;
        if now_ms != silent_ms {
            silent_ms = now_ms;
            send(events, Event::SilentMs(silent_ms)).await?;
        }
    }
}

async fn send_kv(watch: &Watch, events: &EventSender) -> Result<Infallible, Disconnected> {
    let id = watch.id;
    loop {
        let slot = snapshot_slot(&watch.snapshots).await;
        let subscription = {
            let fleet = watch.fleet.clone();
            tokio::task::spawn_blocking(move || fleet.subscribe_kv(id)).await.ok().flatten()
        };
        // Without a subscription the engine has ended or reports nothing about its cache, so only
        // its end is left to send.
        let Some(mut subscription) = subscription else { return std::future::pending().await };
        let snapshot = std::mem::take(&mut subscription.snapshot);
        send_snapshot(snapshot, subscription.history_known, events).await?;
        drop(slot);
        send_kv_updates(subscription, events).await?;
        tracing::debug!(
            worker = %id,
            "a frontend was too slow for KV events: it gets another snapshot"
        );
    }
}

/// Waits for a snapshot slot. Frontends that read their snapshot release it within a moment.
async fn snapshot_slot(snapshots: &Share) -> ShareGuard {
    loop {
        if let Ok(slot) = snapshots.acquire(1) {
            return slot;
        }
        sleep(SLOT_RETRY_INTERVAL).await;
    }
}

/// Sends a snapshot. Returns once all of it has left the queue, so that a frontend that does not
/// read keeps its slot.
async fn send_snapshot(
    snapshot: Vec<u8>,
    history_known: bool,
    events: &EventSender,
) -> Result<(), Disconnected> {
    let mut rest = Bytes::from(snapshot);
    while !rest.is_empty() {
        let bytes = rest.split_to(rest.len().min(PART_BYTES));
        let is_last = rest.is_empty();
        send(events, Event::Snapshot(SnapshotPart { bytes, is_last, history_known })).await?;
    }
    events.reserve_many(events.max_capacity()).await.map(drop).map_err(|_| Disconnected)
}

/// Sends the updates after a snapshot, until some are lost.
async fn send_kv_updates(
    mut subscription: KvSubscription,
    events: &EventSender,
) -> Result<(), Disconnected> {
    send(events, Event::CaughtUp(subscription.caught_up)).await?;
    while let Some((update, history_known)) = subscription.next().await {
        let event = match update {
            KvUpdate::Batch(payload) => Event::Batch(KvBatch { payload, history_known }),
            KvUpdate::Reset => Event::Reset(true),
            KvUpdate::CaughtUp(caught_up) => Event::CaughtUp(caught_up),
        };
        send(events, event).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use chiasm_media::ByteBudget;
    use futures_util::FutureExt;

    use super::super::shares::Shares;
    use super::*;
    use crate::peer::Peer;

    #[tokio::test(start_paused = true)]
    async fn unread_snapshot_keeps_its_slot() {
        let shares = Shares::new(ByteBudget::new(4), 1);
        let [first, second] = [1, 2].map(|host| {
            shares.for_peer(Peer::from_address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, host))))
        });
        let (events, mut read) = mpsc::channel(MAX_QUEUED_MESSAGES);
        let slot = snapshot_slot(&first).await;
        let _another = snapshot_slot(&first).await;
        let mut sending = Box::pin(send_snapshot(vec![7; 2 * PART_BYTES + 1], true, &events));
        assert!((&mut sending).now_or_never().is_none(), "the snapshot is sent before it is read");
        let again = tokio::spawn(async move { snapshot_slot(&first).await });
        sleep(Duration::from_secs(60)).await;
        assert!(!again.is_finished());
        assert!(snapshot_slot(&second).now_or_never().is_some());
        let mut bytes = 0;
        for is_last in [false, false, true] {
            let Event::Snapshot(part) = read.recv().await.unwrap().unwrap().event.unwrap() else {
                panic!("a part")
            };
            bytes += part.bytes.len();
            assert_eq!(part.is_last, is_last);
        }
        assert_eq!(bytes, 2 * PART_BYTES + 1);
        assert!(sending.await.is_ok());
        drop(slot);
        again.await.unwrap();
    }
}
