//! A worker's KV events, from a worker whose behaviour each test chooses.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use chiasm_backend::{Connector, ForeignJobEvent, KvSink, KvSinkError};
use chiasm_kv::event::{ExternalHash, KvEvent, decode};
use chiasm_types::WorkerId;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use super::SOON;
use super::worker::{FakeWorker, ReceivedRequest, Unobserved, connector};

/// Records the calls as text.
struct Sink(mpsc::Sender<String>);

impl KvSink for Sink {
    fn snapshot(&mut self, _: &[u8], _: bool) -> Result<(), KvSinkError> {
        panic!("workers of Dynamo have no snapshots");
    }

    fn batch(&mut self, payload: &[u8], history_known: bool) -> Result<(), KvSinkError> {
        let hash = |hash: &ExternalHash| match hash {
            ExternalHash::U64(hash) => hash.to_string(),
            ExternalHash::Bytes(_) => panic!("no hash of ours"),
        };
        for event in decode(payload).unwrap().events {
            let text = match &event {
                KvEvent::AllBlocksCleared => "cleared".to_owned(),
                KvEvent::BlockStored(stored) => {
                    stored.block_hashes.iter().map(hash).collect::<Vec<_>>().join(",")
                }
                other => format!("{other:?}"),
            };
            let _ = self.0.send(if history_known { text } else { format!("{text}?") });
        }
        Ok(())
    }

    fn reset(&mut self) {}

    fn set_caught_up(&mut self, caught_up: bool) {
        let _ = self.0.send(format!("caught up: {caught_up}"));
    }

    fn foreign_job(&mut self, _: ForeignJobEvent) {}
}

fn stored(id: u64, parent: Option<u64>, hashes: &[u64]) -> Value {
    let blocks: Vec<Value> =
        hashes.iter().map(|hash| json!({"block_hash": hash, "tokens_hash": 0})).collect();
    let data = json!({"stored": {"parent_hash": parent, "start_position": null, "blocks": blocks}});
    json!({
        "worker_id": 31, "storage_tier": "device",
        "event": {"event_id": id, "data": data, "dp_rank": 0},
    })
}

/// The answer with the whole cache.
fn tree_dump(events: &[Value], last_event_id: u64) -> Value {
    json!({"TreeDump": {
        "events": events, "last_event_id": last_event_id, "reset_scope": "all",
    }})
}

async fn answer(request: &ReceivedRequest, answer: Value) {
    let mut connection = request.open_answer().await;
    connection.item(json!({"data": answer, "complete_final": false})).await;
    connection.end().await;
}

/// Returns the next calls of a sink.
async fn calls<const N: usize>(
    sink: mpsc::Receiver<String>,
) -> ([String; N], mpsc::Receiver<String>) {
    tokio::task::spawn_blocking(move || {
        (std::array::from_fn(|_| sink.recv_timeout(SOON).unwrap()), sink)
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn connecting_waits_for_the_event_channel() {
    let worker = FakeWorker::start("").await;
    let (registered, workers) = watch::channel(worker.registered(true));
    let connector = connector(workers);
    let mut connecting = connector.connect(WorkerId(0), Arc::new(Unobserved));
    assert!(timeout(Duration::from_millis(50), &mut connecting).await.is_err());
    registered.send_replace(worker.registered_with_channel("tcp://127.0.0.1:1"));
    // Sooner than for a worker that never registers a channel.
    timeout(Duration::from_secs(3), connecting).await.unwrap().unwrap();
}

#[tokio::test]
async fn first_query_is_for_the_whole_cache() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect_with(true, false).await;
    let (sender, sink) = mpsc::channel();
    backend.follow_kv(Box::new(Sink(sender)));
    let request = worker.next_request().await;
    assert_eq!(
        (request.path.as_str(), &request.body["start_event_id"]),
        ("1f/ns/backend/query", &json!(null))
    );
    assert_eq!((&request.body["worker_id"], &request.body["dp_rank"]), (&json!(31), &json!(0)));
    answer(&request, tree_dump(&[stored(0, None, &[1, 2])], 7)).await;
    let (first, sink) = calls(sink).await;
    assert_eq!(first, ["cleared", "1,2", "caught up: true"]);
    let request = worker.next_request().await;
    assert_eq!(request.body["start_event_id"], json!(8));
    answer(
        &request,
        json!({"TooNew": {"requested_start": 8, "requested_end": 7, "newest_available": 7}}),
    )
    .await;
    let request = worker.next_request().await;
    assert_eq!(request.body["start_event_id"], json!(8));
    let events = [stored(8, Some(2), &[3]), stored(9, Some(3), &[4])];
    answer(&request, json!({"Events": {"events": events, "last_event_id": 9}})).await;
    let (changes, sink) = calls(sink).await;
    assert_eq!(changes, ["3", "4"]);
    // A worker whose last event is older than the known one has restarted its numbering: the whole
    // cache is queried again, as after a skipped event.
    let request = worker.next_request().await;
    assert_eq!(request.body["start_event_id"], json!(10));
    answer(
        &request,
        json!({"TooNew": {"requested_start": 10, "requested_end": 3, "newest_available": 3}}),
    )
    .await;
    assert_eq!(worker.next_request().await.body["start_event_id"], json!(null));
    let (behind, _sink) = calls(sink).await;
    assert_eq!(behind, ["caught up: false"]);
}

#[tokio::test]
async fn failed_or_malformed_report_makes_it_approximate() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect_with(true, false).await;
    let (sender, sink) = mpsc::channel();
    backend.follow_kv(Box::new(Sink(sender)));
    answer(&worker.next_request().await, json!({"Surprise": 1})).await;
    answer(&worker.next_request().await, json!({"TreeDump": {"events": "none"}})).await;
    assert!(sink.try_recv().is_err(), "no event was passed on");
    answer(&worker.next_request().await, json!({"TreeDumpFailed": {"why": "busy"}})).await;
    let (failed, sink) = calls(sink).await;
    assert_eq!(failed, ["cleared?", "caught up: true"]);
    answer(&worker.next_request().await, tree_dump(&[], 0)).await;
    let (all, _sink) = calls(sink).await;
    assert_eq!(all, ["cleared"]);
    assert!(backend.silent_for() < SOON);
}

#[tokio::test]
async fn worker_with_images_has_unknown_history() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect_with(true, true).await;
    let (sender, sink) = mpsc::channel();
    backend.follow_kv(Box::new(Sink(sender)));
    answer(&worker.next_request().await, tree_dump(&[stored(0, None, &[1])], 1)).await;
    let (all, _sink) = calls(sink).await;
    assert_eq!(all, ["cleared?", "1?", "caught up: true"]);
}
