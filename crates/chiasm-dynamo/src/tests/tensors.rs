//! Images as tensors in shared memory: what a worker is told of them, and when they are gone.

use std::path::Path;
use std::sync::Arc;

use chiasm_backend::{
    FieldValue, Input, ItemField, Job, JobItem, MediaForm, MediaSource, SourceError, Tensor,
    TensorBytes, TensorFormat, TensorOrder,
};
use chiasm_transfer::{ParcelRoom, SHM_DIR};
use chiasm_types::{Dtype, MmHash, Modality, Placeholder, TensorField, TokenId};
use futures_util::future::{BoxFuture, FutureExt};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::worker::{Asked, FakeWorker};
use super::{Picture, SOON, job, sampling};
use crate::tensors::ReadyTensors;

const FORMAT: TensorFormat = TensorFormat::Raw;

/// A picture that becomes these bytes, or nothing.
struct Made(Option<u8>);

fn fields(byte: u8) -> Vec<ItemField> {
    let tensor = |shape: Vec<usize>, bytes: Vec<u8>| {
        FieldValue::Tensor(Tensor {
            dtype: Dtype::U8,
            shape,
            bytes: TensorBytes::Here(bytes.into()),
        })
    };
    vec![
        ItemField {
            name: "pixel_values".into(),
            field: TensorField::rows(30),
            value: tensor(vec![30, 10], vec![byte; 300]),
        },
        ItemField {
            name: "small".into(),
            field: TensorField::Batched { keep_on_cpu: true },
            value: tensor(vec![2], vec![1, 2]),
        },
    ]
}

impl MediaSource for Made {
    fn tensors(
        &self,
        order: TensorOrder,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        assert_eq!(order.format, FORMAT);
        assert!(order.memory.reserve(300).is_none());
        let made = self
            .0
            .map(fields)
            .ok_or_else(|| SourceError::new(std::io::Error::other("it is no picture")));
        async move { made.map(Some) }.boxed()
    }

    fn encoded(&self) -> Option<chiasm_backend::EncodedItem> {
        Picture.encoded()
    }
}

/// A job with two pictures, one of which is there twice.
fn pictures(bytes: [Option<u8>; 2]) -> Job {
    let item = |number: usize, offset: usize, is_embed: Option<Vec<bool>>| JobItem {
        modality: Modality::Image,
        hash: MmHash::new([number as u8; 32]),
        placeholder: Placeholder { offset, length: 2, is_embed },
        elements: 1,
        source: Arc::new(Made(bytes[number])),
    };
    let (tokens, expanded) =
        ([9, 9, 9, 4].map(TokenId).into(), [9, 9, 9, 9, 9, 9, 4].map(TokenId).into());
    let input = Input::Marked { tokens: Arc::new(tokens), expanded: Arc::new(expanded) };
    let media = Arc::new([item(0, 0, None), item(1, 2, Some(vec![true, false])), item(0, 4, None)]);
    Job { input, media, ..job(sampling()) }
}

fn segments(asked: &Asked) -> Vec<(String, u64)> {
    let items = asked.body["extra_args"]["mm_kwargs_shm"]["items"].as_array().unwrap();
    items
        .iter()
        .map(|item| (item["name"].as_str().unwrap().to_owned(), item["size"].as_u64().unwrap()))
        .collect()
}

/// Those of them that are there.
fn there(segments: &[(String, u64)]) -> usize {
    segments.iter().filter(|(name, _)| Path::new(SHM_DIR).join(name).exists()).count()
}

async fn all_gone(room: &ParcelRoom, segments: &[(String, u64)]) {
    let gone = async {
        while room.taken() > 0 || there(segments) > 0 {
            sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, gone).await.unwrap();
}

#[tokio::test]
async fn a_worker_of_this_machine_is_told_where_the_tensors_are_until_its_answer_begins() {
    let mut worker = FakeWorker::start("").await;
    let room = ParcelRoom::new(1 << 20);
    let backend =
        worker.connect_with_tensors(ReadyTensors { format: FORMAT, room: room.clone() }).await;
    assert_eq!(backend.capabilities().media, MediaForm::Tensors(FORMAT));
    // The model is not known here, and one that is would tell: as much as its context.
    assert_eq!(backend.capabilities().encoder_cache_tokens, 4096);
    let mut running = backend.start(Arc::new(pictures([Some(5), Some(6)]))).await.unwrap();
    let asked = worker.asked().await;
    let segments = segments(&asked);
    assert_eq!(segments[0], segments[2]);
    let names: Vec<String> =
        [0_u8, 1, 0].iter().map(|number| MmHash::new([*number; 32]).to_string()).collect();
    let told = |key: &str| asked.body["extra_args"][key].clone();
    assert_eq!(told("expanded_token_ids"), json!([9, 9, 9, 9, 9, 9, 4]));
    let ranges = json!([
        {"offset": 0, "length": 2}, {"offset": 2, "length": 2, "is_embed": [true, false]}, {"offset": 4, "length": 2}
    ]);
    assert_eq!(told("mm_placeholders"), ranges);
    assert_eq!(told("mm_kwargs_shm")["modality"], "image");
    assert_eq!(told("mm_kwargs_shm")["mm_hashes"], json!(names));
    assert_eq!(told("mm_hashes"), Value::Null, "a worker would take 64 bits of it");
    // A worker that can't use them takes these.
    assert_eq!(asked.body["token_ids"], json!([9, 9, 9, 4]));
    assert_eq!(asked.body["multi_modal_data"]["image_url"].as_array().unwrap().len(), 3);
    assert_eq!(asked.body["multi_modal_uuids"]["image_url"], json!(names));
    for (segment, byte) in segments.iter().zip([5, 6]) {
        let found = std::fs::read(Path::new(SHM_DIR).join(&segment.0)).unwrap();
        assert_eq!(found.len() as u64, segment.1);
        let frames = chiasm_engine::to_item(fields(byte)).unwrap().encode();
        let mut expected = (frames.len() as u32).to_le_bytes().to_vec();
        for frame in &frames {
            expected.extend((frame.len() as u64).to_le_bytes());
            expected.extend(frame);
        }
        assert_eq!((frames.len(), found), (2, expected));
    }
    assert_eq!(room.taken(), segments[0].1 + segments[1].1);
    let mut home = asked.call().await;
    home.output(json!({"token_ids": [5]})).await;
    timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
    all_gone(&room, &segments).await;
    home.output(json!({"token_ids": [6], "finish_reason": "length"})).await;
    home.end().await;
    timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
    assert_eq!((running.delivered().shared_memory, running.delivered().inline), (3, 0));
}

#[tokio::test]
async fn nothing_is_left_of_a_request_that_is_cancelled_refused_or_lost() {
    let mut worker = FakeWorker::start("").await;
    let room = ParcelRoom::new(1 << 20);
    let tensors = ReadyTensors { format: FORMAT, room: room.clone() };
    let backend = worker.connect_with_tensors(tensors.clone()).await;
    let job = Arc::new(pictures([Some(5), Some(6)]));
    let running = backend.start(job.clone()).await.unwrap();
    let asked = worker.asked().await;
    assert_eq!(there(&segments(&asked)), 3);
    drop(running);
    all_gone(&room, &segments(&asked)).await;

    // Of two continuations the second has not begun.
    let two = Job {
        sampling: chiasm_backend::Sampling { n: 2, ..sampling() },
        ..pictures([Some(5), Some(6)])
    };
    let mut running = backend.start(Arc::new(two)).await.unwrap();
    let (first, second) = (worker.asked().await, worker.asked().await);
    assert_eq!(segments(&first), segments(&second));
    first.call().await.output(json!({"token_ids": [5]})).await;
    let began = timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(there(&segments(&first)), 3);
    running.stop(1 - began.choice);
    all_gone(&room, &segments(&first)).await;
    drop(running);

    let mut running = backend.start(job.clone()).await.unwrap();
    let asked = worker.asked().await;
    worker.kill().await;
    assert!(timeout(SOON, running.next()).await.unwrap().unwrap().is_err());
    drop(running);
    all_gone(&room, &segments(&asked)).await;

    let mut refusing = FakeWorker::start("no").await;
    assert!(refusing.connect_with_tensors(tensors).await.start(job).await.is_err());
    let asked = refusing.asked().await;
    all_gone(&room, &segments(&asked)).await;
}

#[tokio::test]
async fn without_room_images_go_as_they_came_and_what_is_no_image_is_an_error() {
    let mut worker = FakeWorker::start("").await;
    // Room for one of the two.
    let room = ParcelRoom::new(600);
    let backend =
        worker.connect_with_tensors(ReadyTensors { format: FORMAT, room: room.clone() }).await;
    let running = backend.start(Arc::new(pictures([Some(5), Some(6)]))).await.unwrap();
    let asked = worker.asked().await;
    assert_eq!((asked.body.get("extra_args"), room.taken()), (None, 0));
    assert_eq!(asked.body["multi_modal_data"]["image_url"].as_array().unwrap().len(), 3);
    assert_eq!((running.delivered().shared_memory, running.delivered().inline), (0, 3));
    let failed = backend.start(Arc::new(pictures([Some(5), None]))).await;
    assert!(matches!(failed, Err(chiasm_backend::JobError::Source(_))));
    assert_eq!(room.taken(), 0);
}
