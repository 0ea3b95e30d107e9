//! What is told of a KV cache, by a worker that does what a test has it do.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use chiasm_backend::{Connector, KvSink, KvSinkError, OthersEvent};
use chiasm_kv::event::{ExternalHash, KvEvent, decode};
use chiasm_types::WorkerId;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use super::SOON;
use super::worker::{Asked, FakeWorker, Unobserved, connector};

/// Writes down what it is told.
struct Sink(mpsc::Sender<String>);

impl KvSink for Sink {
    fn snapshot(&mut self, _: &[u8], _: bool) -> Result<(), KvSinkError> {
        panic!("no snapshots are made of what workers of Dynamo say");
    }

    fn batch(&mut self, payload: &[u8], history_known: bool) -> Result<(), KvSinkError> {
        let hash = |hash: &ExternalHash| match hash {
            ExternalHash::U64(hash) => hash.to_string(),
            ExternalHash::Bytes(_) => panic!("no hash of ours"),
        };
        for event in decode(payload).unwrap().events {
            let told = match &event {
                KvEvent::AllBlocksCleared => "cleared".to_owned(),
                KvEvent::BlockStored(stored) => {
                    stored.block_hashes.iter().map(hash).collect::<Vec<_>>().join(",")
                }
                other => format!("{other:?}"),
            };
            let _ = self.0.send(if history_known { told } else { format!("{told}?") });
        }
        Ok(())
    }

    fn reset(&mut self) {}

    fn set_caught_up(&mut self, caught_up: bool) {
        let _ = self.0.send(format!("caught up: {caught_up}"));
    }

    fn others(&mut self, _: OthersEvent) {}
}

fn stored(id: u64, parent: Option<u64>, hashes: &[u64]) -> Value {
    let blocks: Vec<Value> =
        hashes.iter().map(|hash| json!({"block_hash": hash, "tokens_hash": 0})).collect();
    let data = json!({"stored": {"parent_hash": parent, "start_position": null, "blocks": blocks}});
    json!({"worker_id": 31, "storage_tier": "device", "event": {"event_id": id, "data": data, "dp_rank": 0}})
}

async fn answer(asked: &Asked, answer: Value) {
    let mut home = asked.call().await;
    home.item(json!({"data": answer, "complete_final": false})).await;
    home.end().await;
}

/// The next things that a sink was told.
async fn told<const N: usize>(
    sink: mpsc::Receiver<String>,
) -> ([String; N], mpsc::Receiver<String>) {
    tokio::task::spawn_blocking(move || {
        (std::array::from_fn(|_| sink.recv_timeout(SOON).unwrap()), sink)
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn a_worker_is_connected_to_when_it_has_named_where_its_events_are_published() {
    let worker = FakeWorker::start("").await;
    let (named, workers) = watch::channel(worker.named(true));
    let connector = connector(workers);
    let mut connecting = connector.connect(WorkerId(0), Arc::new(Unobserved));
    assert!(timeout(Duration::from_millis(50), &mut connecting).await.is_err());
    named.send_replace(worker.published_at("tcp://127.0.0.1:1"));
    // Sooner than one that never names it.
    timeout(Duration::from_secs(3), connecting).await.unwrap().unwrap();
}

#[tokio::test]
async fn all_that_a_worker_holds_is_asked_for_first_and_then_what_is_new() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect_with(true, false).await;
    let (sender, sink) = mpsc::channel();
    backend.follow_kv(Box::new(Sink(sender)));
    let asked = worker.asked().await;
    assert_eq!(
        (asked.path.as_str(), &asked.body["start_event_id"]),
        ("1f/ns/backend/query", &json!(null))
    );
    assert_eq!((&asked.body["worker_id"], &asked.body["dp_rank"]), (&json!(31), &json!(0)));
    let dump = json!({"TreeDump": {"events": [stored(0, None, &[1, 2])], "last_event_id": 7, "reset_scope": "all"}});
    answer(&asked, dump).await;
    let (first, sink) = told(sink).await;
    assert_eq!(first, ["cleared", "1,2", "caught up: true"]);
    let asked = worker.asked().await;
    assert_eq!(asked.body["start_event_id"], json!(8));
    answer(
        &asked,
        json!({"TooNew": {"requested_start": 8, "requested_end": 7, "newest_available": 7}}),
    )
    .await;
    let asked = worker.asked().await;
    assert_eq!(asked.body["start_event_id"], json!(8));
    answer(
        &asked,
        json!({"Events": {"events": [stored(8, Some(2), &[3]), stored(9, Some(3), &[4])], "last_event_id": 9}}),
    )
    .await;
    let (news, sink) = told(sink).await;
    assert_eq!(news, ["3", "4"]);
    // A worker that knows less than it has told: all of it is asked for again, as it is for one
    // that skips an event.
    let asked = worker.asked().await;
    assert_eq!(asked.body["start_event_id"], json!(10));
    answer(
        &asked,
        json!({"TooNew": {"requested_start": 10, "requested_end": 3, "newest_available": 3}}),
    )
    .await;
    assert_eq!(worker.asked().await.body["start_event_id"], json!(null));
    let (behind, _sink) = told(sink).await;
    assert_eq!(behind, ["caught up: false"]);
}

#[tokio::test]
async fn a_worker_that_can_t_tell_or_tells_nonsense_is_asked_again_and_is_not_known_exactly() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect_with(true, false).await;
    let (sender, sink) = mpsc::channel();
    backend.follow_kv(Box::new(Sink(sender)));
    answer(&worker.asked().await, json!({"Surprise": 1})).await;
    answer(&worker.asked().await, json!({"TreeDump": {"events": "none"}})).await;
    assert!(sink.try_recv().is_err(), "nothing was told");
    answer(&worker.asked().await, json!({"TreeDumpFailed": {"why": "busy"}})).await;
    let (failed, sink) = told(sink).await;
    assert_eq!(failed, ["cleared?", "caught up: true"]);
    answer(
        &worker.asked().await,
        json!({"TreeDump": {"events": [], "last_event_id": 0, "reset_scope": "all"}}),
    )
    .await;
    let (all, _sink) = told(sink).await;
    assert_eq!(all, ["cleared"]);
    assert!(backend.silent_for() < SOON);
}

#[tokio::test]
async fn a_worker_that_takes_images_is_taken_to_hold_what_it_was_sent_too() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect_with(true, true).await;
    let (sender, sink) = mpsc::channel();
    backend.follow_kv(Box::new(Sink(sender)));
    let dump = json!({"TreeDump": {"events": [stored(0, None, &[1])], "last_event_id": 1, "reset_scope": "all"}});
    answer(&worker.asked().await, dump).await;
    let (all, _sink) = told(sink).await;
    assert_eq!(all, ["cleared?", "1?", "caught up: true"]);
}
