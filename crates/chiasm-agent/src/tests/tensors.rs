//! Tensors that a frontend has made.

use std::sync::atomic::{AtomicUsize, Ordering};

use chiasm_backend::{FieldValue, Tensor, TensorBytes, TensorFormat};
use chiasm_types::{Dtype, TensorField};
use tonic::Code;

use super::*;
use crate::client::OwnMemory;
use crate::proto::TensorChunk;

/// Tensors as a frontend has made them, and how often.
#[derive(Default)]
pub(super) struct Made {
    pub(super) fields: Vec<ItemField>,
    pub(super) times: AtomicUsize,
}

impl MediaSource for Made {
    fn tensors(
        &self,
        _: TensorOrder,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        self.times.fetch_add(1, Ordering::Relaxed);
        let fields = self.fields.clone();
        async move {
            match fields.is_empty() {
                true => Err(SourceError::new(std::io::Error::other("it is broken"))),
                false => Ok(Some(fields)),
            }
        }
        .boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

impl Made {
    pub(super) fn of(bytes: usize) -> Arc<Self> {
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

/// A prompt with a recording, of which the frontend has tensors.
pub(super) fn with_recording(source: Arc<Made>, mask: Vec<bool>) -> Job {
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
async fn tensors_that_a_frontend_has_made_come_as_they_are() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    // More than one message has room for.
    let made = Made::of(3 * crate::CHUNK);
    let told = with_recording(made.clone(), vec![false, true, true]);
    stand.engine.next_job(Script::tokens(&[1, 2]));
    assert_eq!(
        delivered(&*engine, &told).await.unwrap(),
        Delivered { inline: 1, ..Delivered::default() }
    );
    let item = stand.engine.jobs()[0].media[0].clone();
    assert_eq!((item.hash, &item.placeholder), (told.media[0].hash, &told.media[0].placeholder));
    // Another engine of that machine would have them so, as they were kept.
    let order = TensorOrder {
        format: TensorFormat::Raw,
        memory: Arc::new(OwnMemory),
        still_wanted: Arc::new(|| true),
    };
    let came = item.source.tensors(order).await.unwrap().unwrap();
    assert_eq!(format!("{came:?}"), format!("{:?}", made.fields));
    assert_eq!(made.times.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_that_are_not_to_be_had_or_taken_end_the_job_at_once() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let failure = async |made: Arc<Made>, mask: Vec<bool>| {
        delivered(&*engine, &with_recording(made, mask)).await.unwrap_err().to_string()
    };
    assert!(failure(Arc::default(), vec![true]).await.contains("it is broken"));
    // The stand's agent takes a MiB.
    assert!(failure(Made::of(2 << 20), vec![true]).await.contains("bytes at most"));
    assert!(failure(Made::of(2), vec![false]).await.contains("placeholder"));
    assert!(failure(Made::of(2), vec![true; 4]).await.contains("placeholder"));
    let (_, mut files) = stand.link.clients();
    let messages: Vec<_> =
        crate::tensors::to_messages(&MmHash::new([5; 32]), &Made::of(8).fields).collect();
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
