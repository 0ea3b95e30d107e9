//! Tensors made by a frontend.

use std::sync::atomic::{AtomicUsize, Ordering};

use chiasm_backend::{FieldValue, Tensor, TensorBytes, TensorFormat};
use chiasm_types::{Dtype, TensorField};
use tonic::Code;

use super::*;
use crate::client::OwnMemory;
use crate::proto::TensorChunk;

/// Tensors made by a frontend, and the number of times they were requested.
#[derive(Default)]
pub(super) struct MadeTensors {
    pub(super) fields: Vec<ItemField>,
    pub(super) times: AtomicUsize,
}

impl MediaSource for MadeTensors {
    fn tensors(
        &self,
        _: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        self.times.fetch_add(1, Ordering::Relaxed);
        let fields = self.fields.clone();
        async move {
            if fields.is_empty() {
                return Err(SourceError::new(std::io::Error::other("it is broken")));
            }
            Ok(Some(fields))
        }
        .boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

impl MadeTensors {
    pub(super) fn with_bytes(bytes: usize) -> Arc<Self> {
        let tensor = Tensor {
            dtype: Dtype::U8,
            shape: vec![2, bytes / 2],
            bytes: TensorBytes::Here((0..bytes).map(|byte| byte as u8).collect::<Vec<_>>().into()),
        };
        let field = TensorField::Flat { rows: 2, dim: 0, keep_on_cpu: false };
        let fields = vec![ItemField {
            name: "pixel_values".into(),
            field,
            value: FieldValue::Tensor(tensor),
        }];
        Arc::new(Self { fields, times: AtomicUsize::new(0) })
    }
}

/// Returns a job with a recording whose tensors the frontend has.
pub(super) fn with_recording(source: Arc<MadeTensors>, mask: Vec<bool>) -> Job {
    let item = JobItem {
        modality: Modality::Audio,
        hash: MmHash::new([5; 32]),
        placeholder: Placeholder { offset: 1, length: mask.len(), is_embed: Some(mask) },
        elements: 1,
        source,
    };
    Job { media: vec![item].into(), ..job(&[TokenId(1); 4]) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frontend_tensors_reach_the_engine_unchanged() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    // More than fits into one message.
    let made = MadeTensors::with_bytes(3 * crate::CHUNK_BYTES);
    let job = with_recording(made.clone(), vec![false, true, true]);
    harness.engine.next_job(Script::tokens(&[1, 2]));
    assert_eq!(
        delivered(&*engine, &job).await.unwrap(),
        MediaDelivery { inline: 1, ..MediaDelivery::default() }
    );
    let item = harness.engine.jobs()[0].media[0].clone();
    assert_eq!((item.hash, &item.placeholder), (job.media[0].hash, &job.media[0].placeholder));
    // They are kept for other engines of the machine.
    let request = TensorRequest {
        format: TensorFormat::Raw,
        model_dtype: None,
        memory: Arc::new(OwnMemory),
        is_still_needed: Arc::new(|| true),
    };
    let received = item.source.tensors(request).await.unwrap().unwrap();
    assert_eq!(format!("{received:?}"), format!("{:?}", made.fields));
    assert_eq!(made.times.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_or_refused_tensors_end_the_job() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    let failure = async |made: Arc<MadeTensors>, mask: Vec<bool>| {
        delivered(&*engine, &with_recording(made, mask)).await.unwrap_err().to_string()
    };
    assert!(failure(Arc::default(), vec![true]).await.contains("it is broken"));
    // The test agent takes tensors of at most 1 MiB.
    assert!(
        failure(MadeTensors::with_bytes(2 << 20), vec![true]).await.contains("bytes are accepted")
    );
    assert!(failure(MadeTensors::with_bytes(2), vec![false]).await.contains("placeholder"));
    assert!(failure(MadeTensors::with_bytes(2), vec![true; 4]).await.contains("placeholder"));
    let (_, mut files) = harness.link.clients();
    let messages: Vec<_> =
        crate::tensors::to_messages(&MmHash::new([5; 32]), &MadeTensors::with_bytes(8).fields)
            .collect();
    let mut put = async |messages: Vec<TensorChunk>| {
        files.put_tensors(tokio_stream::iter(messages)).await.map(drop)
    };
    put(messages.clone()).await.unwrap();
    let [first, rest] = &messages[..] else { panic!("two messages") };
    for messages in [
        vec![],
        vec![first.clone()],
        vec![first.clone(), rest.clone(), rest.clone()],
        vec![TensorChunk { mm_hash: Bytes::new(), ..first.clone() }, rest.clone()],
    ] {
        assert_eq!(put(messages).await.unwrap_err().code(), Code::InvalidArgument);
    }
}
