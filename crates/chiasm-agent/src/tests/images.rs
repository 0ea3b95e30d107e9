//! Images whose tensors a frontend makes in place of the agent.

use std::borrow::Cow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use chiasm_backend::{
    FieldValue, ProcessingCost, SentForm, Tensor, TensorBytes, TensorFormat, WorkSize,
};
use chiasm_types::TensorField;
use chiasm_vision::{Contents, ImagePlan, PixelFormat, TensorSpec};

use super::*;
use crate::client::{AgentMedia, OwnMemory};

/// An observer that records the sent forms, the sent bytes and the steps down.
#[derive(Default)]
pub(super) struct RecordingObserver {
    pub(super) sent: Mutex<Vec<SentForm>>,
    pub(super) sent_bytes: AtomicU64,
    pub(super) stepped_down: Mutex<Vec<(&'static str, String)>>,
}

impl MediaObserver for RecordingObserver {
    fn delivered(&self, _: MediaDelivery) {}

    fn missed(&self, _: usize) {}

    fn sent(&self, bytes: u64) {
        self.sent_bytes.fetch_add(bytes, Relaxed);
    }

    fn sent_as(&self, form: SentForm) {
        self.sent.lock().unwrap().push(form);
    }

    fn stepped_down(&self, cause: &'static str, why: &dyn std::fmt::Display) {
        self.stepped_down.lock().unwrap().push((cause, why.to_string()));
    }
}

/// A picture whose tensors this side could make.
struct Picture {
    file: File,
    size: (u32, u32),
    /// The tensors that it makes; empty if making them fails.
    fields: Vec<ItemField>,
}

impl MediaSource for Picture {
    fn tensors(
        &self,
        request: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        assert_eq!(request.format, TensorFormat::Raw);
        let fields = self.fields.clone();
        async move {
            let broken = || SourceError::new(std::io::Error::other("it is broken"));
            if fields.is_empty() { Err(broken()) } else { Ok(Some(fields)) }
        }
        .boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        self.file.encoded()
    }

    fn processing_cost(&self, format: TensorFormat) -> Option<ProcessingCost> {
        assert_eq!(format, TensorFormat::Raw);
        let pixels = self
            .fields
            .first()
            .map_or(0, |field| crate::tensors::total_bytes(std::slice::from_ref(field)));
        let cpu_time = Duration::from_millis(10);
        Some(ProcessingCost {
            image_size: self.size,
            tensor_bytes: pixels,
            cpu_time,
            work_size: WorkSize::Usual,
            starts_immediately: true,
        })
    }
}

fn plan(harness: &TestHarness, width: u32, height: u32) -> ImagePlan {
    let vision = harness.model.vision.as_ref().unwrap();
    vision.plan(ImageSize { width, height }, &ImageKwargs::default()).unwrap()
}

/// Returns tensors of an image of this size, with pixels that no file has.
fn tensors(harness: &TestHarness, width: u32, height: u32) -> Vec<ItemField> {
    let plan = plan(harness, width, height);
    let field = |TensorSpec { name, dtype, shape, contents, field }| {
        let bytes = match contents {
            Contents::Small(bytes) => bytes,
            Contents::Pixels => {
                (0..plan.pixel_bytes(PixelFormat::RawU8)).map(|at| at as u8).collect()
            }
        };
        let bytes = TensorBytes::Here(bytes.into());
        let value = FieldValue::Tensor(Tensor { dtype, shape, bytes });
        ItemField { name: Cow::Borrowed(name), field, value }
    };
    plan.tensors(PixelFormat::RawU8).into_iter().map(field).collect()
}

/// The size of [`PICTURE`].
const SIZE: (u32, u32) = (280, 224);

/// A test agent, and an observer of the frontend's side.
struct ImageTest {
    harness: TestHarness,
    observer: Arc<RecordingObserver>,
}

impl ImageTest {
    async fn new() -> Self {
        Self { harness: TestHarness::new().await, observer: Arc::default() }
    }

    /// Returns a job with a picture of this size, whose tensors are `fields`.
    fn job(&self, size: (u32, u32), fields: Vec<ItemField>) -> Job {
        let file = Bytes::from_static(PICTURE);
        let job = self.harness.with_picture(&file);
        let mut item = job.media[0].clone();
        item.source = Arc::new(Picture {
            file: File::new(&file, ContentHash::digest(PICTURE)),
            size,
            fields,
        });
        Job { media: vec![item].into(), ..job }
    }

    /// Sends the engine a job, with images in this form.
    async fn start(&self, media: AgentMedia, job: &Job) -> Result<MediaDelivery, JobError> {
        let connector =
            AgentConnector::new(self.harness.link.clone(), 0, fake_capabilities().class.processor);
        let connected =
            connector.with_media(media).connect(WorkerId(0), self.observer.clone()).await.unwrap();
        self.harness.engine.next_job(Script::tokens(&[1, 2]));
        delivered(&*connected.backend, job).await
    }

    fn sent(&self) -> Vec<SentForm> {
        std::mem::take(&mut *self.observer.sent.lock().unwrap())
    }

    fn stepped_down(&self) -> Vec<(&'static str, String)> {
        std::mem::take(&mut *self.observer.stepped_down.lock().unwrap())
    }

    /// Returns the tensors that the engine would get if it requested those of its last job.
    async fn received(&self) -> Vec<ItemField> {
        let item = self.harness.engine.jobs().last().unwrap().media[0].clone();
        let request = TensorRequest {
            format: TensorFormat::Raw,
            model_dtype: None,
            memory: Arc::new(OwnMemory),
            is_still_needed: Arc::new(|| true),
        };
        item.source.tensors(request).await.unwrap().unwrap()
    }
}

const INLINE: MediaDelivery = MediaDelivery { cached: 0, shared_memory: 0, inline: 1, unfound: 0 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frontend_tensors_of_an_image_reach_the_engine() {
    let test = ImageTest::new().await;
    let fields = tensors(&test.harness, SIZE.0, SIZE.1);
    let job = test.job(SIZE, fields.clone());
    assert_eq!(test.start(AgentMedia::Tensors, &job).await.unwrap(), INLINE);
    assert_eq!((test.sent(), test.stepped_down()), (vec![SentForm::Tensors], vec![]));
    // They are kept for other engines.
    assert_eq!(format!("{:?}", test.received().await), format!("{fields:?}"));
    assert_eq!(
        test.start(AgentMedia::Tensors, &job).await.unwrap(),
        MediaDelivery { cached: 1, ..MediaDelivery::default() }
    );
    assert!(test.sent().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_agent_gets_files() {
    for media in [AgentMedia::Auto, AgentMedia::Encoded] {
        let test = ImageTest::new().await;
        let job = test.job(SIZE, tensors(&test.harness, SIZE.0, SIZE.1));
        assert_eq!(test.start(media, &job).await.unwrap(), INLINE);
        assert_eq!(
            (test.sent(), test.stepped_down()),
            (vec![SentForm::Encoded], vec![]),
            "{media:?}"
        );
    }
}

/// A change that makes tensors wrong.
type Change<'a> = &'a dyn Fn(&mut Vec<ItemField>);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_tensors_are_refused_in_favour_of_the_file() {
    let tensor = |fields: &mut Vec<ItemField>, at: usize, change: &dyn Fn(&mut Tensor)| {
        let FieldValue::Tensor(tensor) = &mut fields[at].value else { panic!("a tensor") };
        change(tensor);
    };
    let changes: [(&str, Change<'_>); 6] = [
        ("fewer", &|fields| drop(fields.pop())),
        ("twice", &|fields| fields.push(fields[0].clone())),
        ("another name", &|fields| fields[0].name = "pixels".into()),
        ("another join", &|fields| fields[0].field = TensorField::Shared { keep_on_cpu: false }),
        ("another shape", &|fields| tensor(fields, 0, &|tensor| tensor.shape.reverse())),
        ("another grid", &|fields| {
            tensor(fields, 1, &|tensor| {
                let mut bytes = tensor.bytes.as_ref().to_vec();
                bytes[0] += 1;
                tensor.bytes = TensorBytes::Here(bytes.into());
            });
        }),
    ];
    for (what, change) in changes {
        let test = ImageTest::new().await;
        let mut fields = tensors(&test.harness, SIZE.0, SIZE.1);
        change(&mut fields);
        let job = test.job(SIZE, fields);
        assert_eq!(test.start(AgentMedia::Tensors, &job).await.unwrap(), INLINE, "{what}");
        assert_eq!(test.sent(), [SentForm::Tensors, SentForm::Encoded], "{what}");
        let stepped_down = test.stepped_down();
        let [("tensors_refused", why)] = &stepped_down[..] else {
            panic!("{what}: {stepped_down:?}")
        };
        assert!(why.contains("tensors: "), "{what}: {why}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_image_size_is_not_trusted() {
    let (wide, high) = SIZE;
    // The tensors are right for this size, but the placeholder is not.
    let test = ImageTest::new().await;
    let job = test.job((wide * 2, high), tensors(&test.harness, wide * 2, high));
    let Err(JobError::Refused { message, .. }) = test.start(AgentMedia::Tensors, &job).await else {
        panic!("taken")
    };
    assert!(message.contains("placeholder"), "{message}");
    // The announced size is larger than any image may be.
    let test = ImageTest::new().await;
    let job = test.job((u32::MAX, u32::MAX), tensors(&test.harness, wide, high));
    let Err(JobError::Refused { message, .. }) = test.start(AgentMedia::Tensors, &job).await else {
        panic!("taken")
    };
    assert!(message.contains("side"), "{message}");
    // The size of a file that the agent has already is known.
    let test = ImageTest::new().await;
    let job = test.job(SIZE, tensors(&test.harness, wide, high));
    test.start(AgentMedia::Encoded, &job).await.unwrap();
    test.sent();
    let wrong = test.job((wide * 2, high), tensors(&test.harness, wide * 2, high));
    test.start(AgentMedia::Tensors, &wrong).await.unwrap();
    assert!(test.sent().is_empty());
    assert!(test.harness.engine.jobs().len() == 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_or_oversized_tensors_fall_back_to_the_file() {
    let test = ImageTest::new().await;
    assert_eq!(test.start(AgentMedia::Tensors, &test.job(SIZE, Vec::new())).await.unwrap(), INLINE);
    assert_eq!(test.stepped_down(), [("tensors_not_made", "it is broken".to_owned())]);
    assert_eq!(test.sent(), [SentForm::Encoded]);
    // The test agent takes tensors of at most 1 MiB.
    let test = ImageTest::new().await;
    let job = test.job(SIZE, tensors(&test.harness, 700, 700));
    assert_eq!(test.start(AgentMedia::Tensors, &job).await.unwrap(), INLINE);
    let stepped_down = test.stepped_down();
    assert!(matches!(&stepped_down[..], [("tensors_too_large", _)]), "{stepped_down:?}");
    assert_eq!(test.sent(), [SentForm::Encoded]);
}
