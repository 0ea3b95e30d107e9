//! What frontends are told of one engine.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{KvSource, Load as BackendLoad, MediaLoad, OthersEvent};
use chiasm_fleet::{Fleet, KvHeard, KvKnown, Worker};
use chiasm_pipeline::MachineMedia;
use chiasm_types::WorkerId;
use tokio::sync::mpsc;
use tokio::sync::watch::Receiver;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tonic::Status;

use super::announcements::Announcements;
use super::drain::Drain;
use super::shares::{Held, Share};
use crate::capabilities::{self, OfAgent};
use crate::others;
use crate::proto::watch_event::Event;
use crate::proto::{KvBatch, Load, SnapshotPart, WatchEvent};

/// Messages that wait for a frontend to take them. What comes meanwhile waits in the fleet, which
/// has a limit of its own.
const MOST_WAITING: usize = 16;
/// How often it is asked again whether there is room for a snapshot.
const ROOM_EVERY: Duration = Duration::from_millis(20);
/// Bytes of a snapshot in one message.
const PART: usize = 1 << 20;
/// How often the load is told of, if it has changed.
const LOAD_EVERY: Duration = Duration::from_millis(50);

/// What a frontend wants to be told of.
pub(super) struct Watch {
    pub(super) fleet: Arc<Fleet>,
    pub(super) id: WorkerId,
    /// What the agent has to do with media items, and how it takes them.
    pub(super) media: Arc<MachineMedia>,
    /// Jobs on the engine.
    pub(super) announcements: Arc<Announcements>,
    /// Who watches: it is told of the jobs of others.
    pub(super) frontend: u64,
    /// Whether the engine gets no new jobs because the agent goes down.
    pub(super) drain: Drain,
    /// Its place among those that watch.
    pub(super) _place: Held,
    /// The places of snapshots that were made and not yet read, as far as they are for frontends at
    /// its address.
    pub(super) snapshots: Share,
}

impl Watch {
    /// Tells of an engine from when it is ready, or from now on if it is, to its end. When the
    /// agent goes down, who has heard that it is ready has jobs to hear the end of first, and hangs
    /// up then.
    pub(super) fn begin(self) -> mpsc::Receiver<Result<WatchEvent, Status>> {
        let (events, out) = mpsc::channel(MOST_WAITING);
        tokio::spawn(async move {
            let worker = tokio::select! {
                () = events.closed() => return,
                () = self.drain.over() => return,
                worker = self.fleet.when_ready(self.id) => worker,
            };
            let ended = tokio::select! {
                () = events.closed() => return,
                death = worker.backend.ended() => death.to_string(),
                // Ends when nobody listens any more.
                _ = tell_all(&self, &worker, &events) => return,
            };
            let _ = tell(&events, Event::Ended(ended)).await;
        });
        out
    }
}

/// Nobody listens any more.
struct Gone;

type Teller = mpsc::Sender<Result<WatchEvent, Status>>;

async fn tell(events: &Teller, event: Event) -> Result<(), Gone> {
    events.send(Ok(WatchEvent { event: Some(event) })).await.map_err(|_| Gone)
}

async fn tell_all(watch: &Watch, worker: &Worker, events: &Teller) -> Result<Infallible, Gone> {
    let of_agent = OfAgent {
        life: worker.life,
        tensor_bytes: watch.media.max_tensor_bytes(),
        fetches_media: watch.media.fetches(),
        adapters: worker.own_adapters(watch.fleet.adapters()),
    };
    tell(events, Event::Ready(capabilities::to_message(worker.backend.capabilities(), of_agent)))
        .await?;
    let load = tell_load(worker, &watch.media, watch.drain.follow(), events);
    let others = tell_others(watch, events);
    let kv = async {
        match &worker.backend.capabilities().kv {
            KvSource::Unknown { .. } => std::future::pending().await,
            KvSource::Events(_) | KvSource::Backend => tell_kv(watch, events).await,
        }
    };
    tokio::select! {
        gone = load => gone,
        gone = kv => gone,
        gone = others => gone,
    }
}

async fn tell_others(watch: &Watch, events: &Teller) -> Result<Infallible, Gone> {
    let mut followed = watch.announcements.follow(watch.frontend);
    loop {
        let event = match followed.next().await {
            OthersEvent::Begun(job, told) => Event::OthersJob(others::to_message(job, &told)),
            OthersEvent::Computed(job) => Event::OthersJobComputed(job),
            OthersEvent::Ended(job) => Event::OthersJobEnded(job),
            OthersEvent::Forget => Event::OthersJobsVoid(true),
        };
        tell(events, event).await?;
    }
}

async fn tell_load(
    worker: &Worker,
    media: &MachineMedia,
    mut drain: Receiver<bool>,
    events: &Teller,
) -> Result<Infallible, Gone> {
    let mut loads = worker.follow_load();
    let mut looks = interval(LOAD_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut silent = 0;
    let mut is_first = true;
    let mut told = MediaLoad::default();
    loop {
        looks.tick().await;
        let media = media.load();
        // Work that is under way gets less without a word: frontends reckon with the time that has
        // passed.
        let is_media_new = media != told || media.all() > Duration::ZERO;
        let is_new = is_media_new
            || is_first
            || loads.has_changed().unwrap_or_default()
            || drain.has_changed().unwrap_or_default();
        if is_new {
            is_first = false;
            let BackendLoad {
                running,
                waiting,
                kv_usage,
                draining,
                // Jobs of others are told one by one, as `OthersJob`.
                pending_tokens_of_others: _,
                // The agent's own: engines have nothing to do with media.
                media: _,
            } = *loads.borrow_and_update();
            let draining = draining || *drain.borrow_and_update();
            told = media;
            let MediaLoad { threads: media_threads, pending } = media;
            let media_pending_us = pending.map(|pending| pending.as_micros() as u64).to_vec();
            let load =
                Load { running, waiting, kv_usage, draining, media_threads, media_pending_us };
            tell(events, Event::Load(load)).await?;
        }
        // To the second: it is seconds that decide.
        let now = worker.backend.silent_for().as_secs() * 1000;
        if now != silent {
            silent = now;
            tell(events, Event::SilentMs(silent)).await?;
        }
    }
}

async fn tell_kv(watch: &Watch, events: &Teller) -> Result<Infallible, Gone> {
    let id = watch.id;
    loop {
        let place = place_of_snapshot(&watch.snapshots).await;
        let known = {
            let fleet = watch.fleet.clone();
            tokio::task::spawn_blocking(move || fleet.follow_kv(id)).await.ok().flatten()
        };
        // The engine is gone, or says nothing of its cache: its end is what comes next.
        let Some(mut known) = known else { return std::future::pending().await };
        tell_snapshot(std::mem::take(&mut known.snapshot), known.history_known, events).await?;
        drop(place);
        tell_heard(known, events).await?;
        tracing::debug!(worker = %id, "a frontend was too slow for KV events: it gets another snapshot");
    }
}

/// Waits for a place. Who reads its snapshot gives it back within a moment.
async fn place_of_snapshot(snapshots: &Share) -> Held {
    loop {
        if let Ok(place) = snapshots.take(1) {
            return place;
        }
        sleep(ROOM_EVERY).await;
    }
}

/// Tells a snapshot. Over when all of it has left the queue, so that whoever reads nothing keeps
/// its place.
async fn tell_snapshot(
    snapshot: Vec<u8>,
    history_known: bool,
    events: &Teller,
) -> Result<(), Gone> {
    let mut rest = Bytes::from(snapshot);
    while !rest.is_empty() {
        let bytes = rest.split_to(rest.len().min(PART));
        let is_last = rest.is_empty();
        tell(events, Event::Snapshot(SnapshotPart { bytes, is_last, history_known })).await?;
    }
    events.reserve_many(events.max_capacity()).await.map(drop).map_err(|_| Gone)
}

/// Tells what is heard behind a snapshot, until some of that is lost.
async fn tell_heard(mut known: KvKnown, events: &Teller) -> Result<(), Gone> {
    tell(events, Event::CaughtUp(known.caught_up)).await?;
    while let Some((heard, history_known)) = known.next().await {
        let event = match heard {
            KvHeard::Batch(payload) => Event::Batch(KvBatch { payload, history_known }),
            KvHeard::Reset => Event::Reset(true),
            KvHeard::CaughtUp(caught_up) => Event::CaughtUp(caught_up),
        };
        tell(events, event).await?;
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
    async fn who_reads_no_snapshot_keeps_its_place_and_leaves_one_to_others() {
        let shares = Shares::new(ByteBudget::new(4), 1);
        let [one, other] =
            [1, 2].map(|host| shares.of(Peer::at(IpAddr::V4(Ipv4Addr::new(10, 0, 0, host)))));
        let (events, mut read) = mpsc::channel(MOST_WAITING);
        let (place, _another) = (place_of_snapshot(&one).await, place_of_snapshot(&one).await);
        let mut told = Box::pin(tell_snapshot(vec![7; 2 * PART + 1], true, &events));
        assert!((&mut told).now_or_never().is_none(), "it is in the queue");
        let again = tokio::spawn(async move { place_of_snapshot(&one).await });
        sleep(Duration::from_secs(60)).await;
        assert!(!again.is_finished());
        assert!(place_of_snapshot(&other).now_or_never().is_some());
        let mut bytes = 0;
        for is_last in [false, false, true] {
            let Event::Snapshot(part) = read.recv().await.unwrap().unwrap().event.unwrap() else {
                panic!("a part")
            };
            bytes += part.bytes.len();
            assert_eq!(part.is_last, is_last);
        }
        assert_eq!(bytes, 2 * PART + 1);
        assert!(told.await.is_ok());
        drop(place);
        again.await.unwrap();
    }
}
