//! Images as tensors in shared memory: their description in requests, and their removal.

use std::path::Path;
use std::sync::Arc;

use chiasm_backend::{
    FieldValue, Input, ItemField, Job, JobItem, MediaForm, MediaSource, SourceError, Tensor,
    TensorBytes, TensorFormat, TensorRequest,
};
use chiasm_transfer::{SHM_DIR, ShmBlobBudget};
use chiasm_types::{Dtype, MmHash, Modality, Placeholder, TensorField, TokenId};
use futures_util::future::{BoxFuture, FutureExt};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::worker::{FakeWorker, ReceivedRequest};
use super::{Picture, SOON, job, sampling};
use crate::tensors::ReadyTensors;

const FORMAT: TensorFormat = TensorFormat::Raw;

/// A picture whose tensor has these bytes, or which fails.
struct TensorPicture(Option<u8>);

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

impl MediaSource for TensorPicture {
    fn tensors(
        &self,
        request: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        assert_eq!(request.format, FORMAT);
        assert!(request.memory.reserve(300).is_none());
        let fields = self
            .0
            .map(fields)
            .ok_or_else(|| SourceError::new(std::io::Error::other("not a picture")));
        async move { fields.map(Some) }.boxed()
    }

    fn encoded(&self) -> Option<chiasm_backend::EncodedItem> {
        Picture.encoded()
    }
}

/// Returns a job with two pictures, one of which occurs twice.
fn pictures(bytes: [Option<u8>; 2]) -> Job {
    let item = |number: usize, offset: usize, is_embed: Option<Vec<bool>>| JobItem {
        modality: Modality::Image,
        hash: MmHash::new([number as u8; 32]),
        placeholder: Placeholder { offset, length: 2, is_embed },
        elements: 1,
        source: Arc::new(TensorPicture(bytes[number])),
    };
    let tokens = [9, 9, 9, 4].map(TokenId).into();
    let expanded = [9, 9, 9, 9, 9, 9, 4].map(TokenId).into();
    let input = Input::Marked { tokens: Arc::new(tokens), expanded: Arc::new(expanded) };
    let media = Arc::new([item(0, 0, None), item(1, 2, Some(vec![true, false])), item(0, 4, None)]);
    Job { input, media, ..job(sampling()) }
}

fn segments(request: &ReceivedRequest) -> Vec<(String, u64)> {
    let items = request.body["extra_args"]["mm_kwargs_shm"]["items"].as_array().unwrap();
    items
        .iter()
        .map(|item| (item["name"].as_str().unwrap().to_owned(), item["size"].as_u64().unwrap()))
        .collect()
}

/// Returns the number of segments that exist.
fn existing(segments: &[(String, u64)]) -> usize {
    segments.iter().filter(|(name, _)| Path::new(SHM_DIR).join(name).exists()).count()
}

async fn wait_until_removed(budget: &ShmBlobBudget, segments: &[(String, u64)]) {
    let removed = async {
        while budget.used_bytes() > 0 || existing(segments) > 0 {
            sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, removed).await.unwrap();
}

#[tokio::test]
async fn tensors_exist_until_the_answer_begins() {
    let mut worker = FakeWorker::start("").await;
    let budget = ShmBlobBudget::new(1 << 20);
    let backend =
        worker.connect_with_tensors(ReadyTensors { format: FORMAT, budget: budget.clone() }).await;
    assert_eq!(backend.capabilities().media, MediaForm::Tensors(FORMAT));
    // The largest item is unknown here, so the size is that of the context.
    assert_eq!(backend.capabilities().encoder_cache_tokens, 4096);
    let mut running = backend.start(Arc::new(pictures([Some(5), Some(6)]))).await.unwrap();
    let request = worker.next_request().await;
    let segments = segments(&request);
    assert_eq!(segments[0], segments[2]);
    let names: Vec<String> =
        [0_u8, 1, 0].iter().map(|number| MmHash::new([*number; 32]).to_string()).collect();
    let extra_arg = |key: &str| request.body["extra_args"][key].clone();
    assert_eq!(extra_arg("expanded_token_ids"), json!([9, 9, 9, 9, 9, 9, 4]));
    let ranges = json!([
        {"offset": 0, "length": 2},
        {"offset": 2, "length": 2, "is_embed": [true, false]},
        {"offset": 4, "length": 2},
    ]);
    assert_eq!(extra_arg("mm_placeholders"), ranges);
    assert_eq!(extra_arg("mm_kwargs_shm")["modality"], "image");
    assert_eq!(extra_arg("mm_kwargs_shm")["mm_hashes"], json!(names));
    assert_eq!(extra_arg("mm_hashes"), Value::Null, "a worker would use 64 bits of each");
    // A worker that can't use the tensors uses these fields.
    assert_eq!(request.body["token_ids"], json!([9, 9, 9, 4]));
    assert_eq!(request.body["multi_modal_data"]["image_url"].as_array().unwrap().len(), 3);
    assert_eq!(request.body["multi_modal_uuids"]["image_url"], json!(names));
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
    assert_eq!(budget.used_bytes(), segments[0].1 + segments[1].1);
    let mut connection = request.open_answer().await;
    connection.output(json!({"token_ids": [5]})).await;
    timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
    wait_until_removed(&budget, &segments).await;
    connection.output(json!({"token_ids": [6], "finish_reason": "length"})).await;
    connection.end().await;
    timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
    assert_eq!((running.delivered().shared_memory, running.delivered().inline), (3, 0));
}

#[tokio::test]
async fn tensors_of_an_ended_job_are_removed() {
    let mut worker = FakeWorker::start("").await;
    let budget = ShmBlobBudget::new(1 << 20);
    let tensors = ReadyTensors { format: FORMAT, budget: budget.clone() };
    let backend = worker.connect_with_tensors(tensors.clone()).await;
    let job = Arc::new(pictures([Some(5), Some(6)]));
    let running = backend.start(job.clone()).await.unwrap();
    let request = worker.next_request().await;
    assert_eq!(existing(&segments(&request)), 3);
    drop(running);
    wait_until_removed(&budget, &segments(&request)).await;

    // The second of two choices has not begun.
    let two = Job {
        sampling: chiasm_backend::Sampling { n: 2, ..sampling() },
        ..pictures([Some(5), Some(6)])
    };
    let mut running = backend.start(Arc::new(two)).await.unwrap();
    let first = worker.next_request().await;
    let second = worker.next_request().await;
    assert_eq!(segments(&first), segments(&second));
    first.open_answer().await.output(json!({"token_ids": [5]})).await;
    let began = timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(existing(&segments(&first)), 3);
    running.stop(1 - began.choice);
    wait_until_removed(&budget, &segments(&first)).await;
    drop(running);

    let mut running = backend.start(job.clone()).await.unwrap();
    let request = worker.next_request().await;
    worker.kill().await;
    assert!(timeout(SOON, running.next()).await.unwrap().unwrap().is_err());
    drop(running);
    wait_until_removed(&budget, &segments(&request)).await;

    let mut refusing = FakeWorker::start("no").await;
    assert!(refusing.connect_with_tensors(tensors).await.start(job).await.is_err());
    let request = refusing.next_request().await;
    wait_until_removed(&budget, &segments(&request)).await;
}

#[tokio::test]
async fn images_are_sent_as_files_without_budget() {
    let mut worker = FakeWorker::start("").await;
    // Enough for one of the two images.
    let budget = ShmBlobBudget::new(600);
    let backend =
        worker.connect_with_tensors(ReadyTensors { format: FORMAT, budget: budget.clone() }).await;
    let running = backend.start(Arc::new(pictures([Some(5), Some(6)]))).await.unwrap();
    let request = worker.next_request().await;
    assert_eq!((request.body.get("extra_args"), budget.used_bytes()), (None, 0));
    assert_eq!(request.body["multi_modal_data"]["image_url"].as_array().unwrap().len(), 3);
    assert_eq!((running.delivered().shared_memory, running.delivered().inline), (0, 3));
    let failed = backend.start(Arc::new(pictures([Some(5), None]))).await;
    assert!(matches!(failed, Err(chiasm_backend::JobError::Source(_))));
    assert_eq!(budget.used_bytes(), 0);
}
