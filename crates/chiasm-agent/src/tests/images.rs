//! Images whose tensors a frontend makes in place of the agent.

use std::borrow::Cow;
use std::sync::Mutex;

use chiasm_backend::{FieldValue, Making, SentForm, Tensor, TensorBytes, TensorFormat, WorkSize};
use chiasm_types::TensorField;
use chiasm_vision::{Contents, ImagePlan, PixelFormat, TensorSpec};

use super::*;
use crate::client::{AgentMedia, OwnMemory};

/// What an observer is told.
#[derive(Default)]
struct Told {
    sent: Mutex<Vec<SentForm>>,
    stepped_down: Mutex<Vec<(&'static str, String)>>,
}

impl MediaObserver for Told {
    fn delivered(&self, _: Delivered) {}

    fn missed(&self, _: usize) {}

    fn sent_as(&self, form: SentForm) {
        self.sent.lock().unwrap().push(form);
    }

    fn stepped_down(&self, cause: &'static str, why: &dyn std::fmt::Display) {
        self.stepped_down.lock().unwrap().push((cause, why.to_string()));
    }
}

/// A picture that this side could make tensors of.
struct Picture {
    file: File,
    size: (u32, u32),
    /// Those that it makes; none if it fails.
    fields: Vec<ItemField>,
}

impl MediaSource for Picture {
    fn tensors(
        &self,
        order: TensorOrder,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        assert_eq!(order.format, TensorFormat::Raw);
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

    fn making(&self, format: TensorFormat) -> Option<Making> {
        assert_eq!(format, TensorFormat::Raw);
        let pixels = self
            .fields
            .first()
            .map_or(0, |field| crate::tensors::bytes(std::slice::from_ref(field)));
        let price = Duration::from_millis(10);
        Some(Making { size: self.size, bytes: pixels, price, work: WorkSize::Usual, at_once: true })
    }
}

fn plan(stand: &Stand, width: u32, height: u32) -> ImagePlan {
    let vision = stand.model.vision.as_ref().unwrap();
    vision.plan(ImageSize { width, height }, &ImageKwargs::default()).unwrap()
}

/// Tensors of an image of this size, with pixels that no file has.
fn tensors(stand: &Stand, width: u32, height: u32) -> Vec<ItemField> {
    let plan = plan(stand, width, height);
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

/// A stand, and a job with the picture.
struct Scene {
    stand: Stand,
    told: Arc<Told>,
}

impl Scene {
    async fn new() -> Self {
        Self { stand: Stand::new().await, told: Arc::default() }
    }

    fn job(&self, size: (u32, u32), fields: Vec<ItemField>) -> Job {
        let file = Bytes::from_static(PICTURE);
        let job = self.stand.with_picture(&file);
        let mut item = job.media[0].clone();
        item.source =
            Arc::new(Picture { file: File::new(&file, ContentHash::of(PICTURE)), size, fields });
        Job { media: vec![item].into(), ..job }
    }

    /// Gives the engine a job in this way.
    async fn start(&self, media: AgentMedia, job: &Job) -> Result<Delivered, JobError> {
        let connector =
            AgentConnector::new(self.stand.link.clone(), 0, fake_capabilities().class.processor);
        let connected =
            connector.with_media(media).connect(WorkerId(0), self.told.clone()).await.unwrap();
        self.stand.engine.next_job(Script::tokens(&[1, 2]));
        delivered(&*connected.backend, job).await
    }

    fn sent(&self) -> Vec<SentForm> {
        std::mem::take(&mut *self.told.sent.lock().unwrap())
    }

    fn stepped_down(&self) -> Vec<(&'static str, String)> {
        std::mem::take(&mut *self.told.stepped_down.lock().unwrap())
    }

    /// The tensors that the engine would be given if it asked for those of its last job.
    async fn given(&self) -> Vec<ItemField> {
        let item = self.stand.engine.jobs().last().unwrap().media[0].clone();
        let order = TensorOrder {
            format: TensorFormat::Raw,
            memory: Arc::new(OwnMemory),
            still_wanted: Arc::new(|| true),
        };
        item.source.tensors(order).await.unwrap().unwrap()
    }
}

const INLINE: Delivered = Delivered { cached: 0, shared_memory: 0, inline: 1, unfound: 0 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_that_a_frontend_makes_of_an_image_are_those_that_the_engine_gets() {
    let scene = Scene::new().await;
    let fields = tensors(&scene.stand, SIZE.0, SIZE.1);
    let job = scene.job(SIZE, fields.clone());
    assert_eq!(scene.start(AgentMedia::Tensors, &job).await.unwrap(), INLINE);
    assert_eq!((scene.sent(), scene.stepped_down()), (vec![SentForm::Tensors], vec![]));
    // They were kept for other engines.
    assert_eq!(format!("{:?}", scene.given().await), format!("{fields:?}"));
    assert_eq!(
        scene.start(AgentMedia::Tensors, &job).await.unwrap(),
        Delivered { cached: 1, ..Delivered::default() }
    );
    assert!(scene.sent().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_go_to_who_is_idle_and_where_tensors_are_not_to_go() {
    for media in [AgentMedia::Auto, AgentMedia::Encoded] {
        let scene = Scene::new().await;
        let job = scene.job(SIZE, tensors(&scene.stand, SIZE.0, SIZE.1));
        assert_eq!(scene.start(media, &job).await.unwrap(), INLINE);
        assert_eq!(
            (scene.sent(), scene.stepped_down()),
            (vec![SentForm::Encoded], vec![]),
            "{media:?}"
        );
    }
}

/// What makes other tensors of some.
type Change<'a> = &'a dyn Fn(&mut Vec<ItemField>);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_what_the_image_becomes_is_refused_and_its_file_is_taken() {
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
        let scene = Scene::new().await;
        let mut fields = tensors(&scene.stand, SIZE.0, SIZE.1);
        change(&mut fields);
        let job = scene.job(SIZE, fields);
        assert_eq!(scene.start(AgentMedia::Tensors, &job).await.unwrap(), INLINE, "{what}");
        assert_eq!(scene.sent(), [SentForm::Tensors, SentForm::Encoded], "{what}");
        let stepped_down = scene.stepped_down();
        let [("tensors_refused", why)] = &stepped_down[..] else {
            panic!("{what}: {stepped_down:?}")
        };
        assert!(why.contains("tensors: "), "{what}: {why}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_size_that_the_file_has_not_is_worth_nothing() {
    let (wide, high) = SIZE;
    // The tensors would be right for it: the place in the prompt is not.
    let scene = Scene::new().await;
    let job = scene.job((wide * 2, high), tensors(&scene.stand, wide * 2, high));
    let Err(JobError::Refused { message, .. }) = scene.start(AgentMedia::Tensors, &job).await
    else {
        panic!("taken")
    };
    assert!(message.contains("placeholder"), "{message}");
    // Larger than any image may be.
    let scene = Scene::new().await;
    let job = scene.job((u32::MAX, u32::MAX), tensors(&scene.stand, wide, high));
    let Err(JobError::Refused { message, .. }) = scene.start(AgentMedia::Tensors, &job).await
    else {
        panic!("taken")
    };
    assert!(message.contains("side"), "{message}");
    // A file that is there says what is right.
    let scene = Scene::new().await;
    let job = scene.job(SIZE, tensors(&scene.stand, wide, high));
    scene.start(AgentMedia::Encoded, &job).await.unwrap();
    scene.sent();
    let lies = scene.job((wide * 2, high), tensors(&scene.stand, wide * 2, high));
    scene.start(AgentMedia::Tensors, &lies).await.unwrap();
    assert!(scene.sent().is_empty());
    assert!(scene.stand.engine.jobs().len() == 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_not_be_made_or_is_too_large_goes_as_a_file() {
    let scene = Scene::new().await;
    assert_eq!(
        scene.start(AgentMedia::Tensors, &scene.job(SIZE, Vec::new())).await.unwrap(),
        INLINE
    );
    assert_eq!(scene.stepped_down(), [("tensors_not_made", "it is broken".to_owned())]);
    assert_eq!(scene.sent(), [SentForm::Encoded]);
    // The stand's agent takes a MiB.
    let scene = Scene::new().await;
    let job = scene.job(SIZE, tensors(&scene.stand, 700, 700));
    assert_eq!(scene.start(AgentMedia::Tensors, &job).await.unwrap(), INLINE);
    let stepped_down = scene.stepped_down();
    assert!(matches!(&stepped_down[..], [("tensors_too_large", _)]), "{stepped_down:?}");
    assert_eq!(scene.sent(), [SentForm::Encoded]);
}
